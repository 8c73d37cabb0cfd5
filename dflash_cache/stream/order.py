"""Which documents are trained on, and in which order. Pure functions of numbers; D documents."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["DocumentSplit", "epoch_order", "split_documents"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DocumentSplit:
    """Training and held-out documents, as ordinals in the cache, ascending; int64."""

    train: IntArray
    held_out: IntArray


def split_documents(doc_ids: IntArray, *, eval_fraction: float, seed: int) -> DocumentSplit:
    """Hold out about a fraction of the documents, each by a seeded hash of its own id.

    A document's side does not depend on the other documents, their order or their number, so an extended corpus keeps
    its held-out documents; the parts of a split document share its id and its side. Two exceptions keep both sides
    usable: with a positive fraction and at least two documents, one is always held out and one is always trained on.

    Args:
      doc_ids: Ids in the corpus; int64 [D].
      eval_fraction: In [0, 1).
      seed: Of the run.
    """
    draw_D = _hash(doc_ids, seed)
    held_out_D = draw_D < np.uint64(eval_fraction * 2.0**64)
    if eval_fraction > 0 and len(doc_ids):
        # Only one of these can change anything, and only where the hash alone would leave a side empty. Parts of a
        # document share its id, hence its draw; a single document is trained on.
        held_out_D[draw_D == draw_D.min()] = True
        held_out_D[draw_D == draw_D.max()] = False
    documents = np.arange(len(doc_ids), dtype=np.int64)
    return DocumentSplit(train=documents[~held_out_D], held_out=documents[held_out_D])


def epoch_order(documents: IntArray, *, seed: int, epoch: int) -> IntArray:
    """Permute documents for one epoch; the same numbers always give the same order, on every machine.

    Sorted by raw random bits rather than shuffled: numpy promises that the bits of a bit generator never change, and
    does not promise that of ``permutation``.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(len(documents))
    return documents[np.argsort(bits, kind="stable")]


def _hash(doc_ids: IntArray, seed: int) -> npt.NDArray[np.uint64]:
    """Map each id to 64 well-mixed bits: two rounds of splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return _mix(_mix(doc_ids.astype(np.uint64)) ^ key)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)  # array arithmetic wraps modulo 2^64 silently, as intended
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
