"""What becomes of a tokenised document: kept, cut, split into parts, or dropped."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dflash_cache.corpus.records import RawDocument, Source
from dflash_cache.corpus.store import TokenizedDocument
from dflash_cache.corpus.summary import DropReason

if TYPE_CHECKING:
    from dflash_cache.config import LongDocuments

__all__ = ["MIN_TOKENS", "Dropped", "Encoded", "Kept", "Split", "fit_document"]

MIN_TOKENS = 2
"""A shorter document holds no token that another leads to."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A document that goes into the corpus, and how many tokens were cut off its end."""

    document: TokenizedDocument
    tokens_cut: int


@dataclass(frozen=True, slots=True)
class Split:
    """A document that goes into the corpus in parts.

    Attributes:
      parts: The usable parts in order; all have the document's id.
      parts_left_out: Parts in which nothing can be learnt: a single token, or none supervised after the first.
      tokens_left_out: Their tokens.
    """

    parts: tuple[TokenizedDocument, ...]
    parts_left_out: int
    tokens_left_out: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A document that does not, and why."""

    doc_id: int
    source: Source
    reason: DropReason
    detail: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A whole document's tokens [n] and loss mask [n]."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    is_chat: bool


def fit_document(raw: RawDocument, encoded: Encoded, max_length: int, long: "LongDocuments") -> Kept | Split | Dropped:
    """Decide what becomes of a document.

    Args:
      raw: Where it comes from.
      encoded: All of it.
      max_length: Most tokens of a document in the corpus.
      long: What happens to a longer one.
    """
    length = len(encoded.input_ids)

    def dropped(reason: DropReason, detail: str) -> Dropped:
        return Dropped(raw.index, raw.source, reason, detail)

    if length < MIN_TOKENS:
        return dropped(DropReason.TOO_SHORT, f"{length} tokens")
    if not encoded.loss_mask.any():
        return dropped(DropReason.NO_SUPERVISED_TOKEN, f"{length} tokens, none supervised")
    if encoded.is_chat and encoded.loss_mask[:max_length].all():
        return dropped(DropReason.ALL_SUPERVISED, f"all {min(length, max_length)} tokens are supervised")
    if length > max_length and long == "drop":
        return dropped(DropReason.TOO_LONG, f"{length} tokens, at most {max_length} are allowed")
    if length > max_length and long == "split":
        parts = tuple(_usable_parts(raw.index, encoded, max_length))
        if parts:
            left_out = length - sum(len(part.input_ids) for part in parts)
            return Split(parts, -(-length // max_length) - len(parts), left_out)
        detail = f"{length} tokens in parts of {max_length}, none of them with a supervised token after its first"
        return dropped(DropReason.NO_SUPERVISED_TOKEN, detail)
    ids, mask = encoded.input_ids[:max_length], encoded.loss_mask[:max_length]
    if not mask.any():
        first = int(encoded.loss_mask.argmax())
        detail = f"token {first} is the first supervised one, and only {max_length} of {length} are kept"
        return dropped(DropReason.SUPERVISED_PART_CUT_OFF, detail)
    return Kept(TokenizedDocument(raw.index, ids, mask), tokens_cut=length - len(ids))


def _usable_parts(doc_id: int, encoded: Encoded, max_length: int) -> Iterator[TokenizedDocument]:
    for start in range(0, len(encoded.input_ids), max_length):
        ids = encoded.input_ids[start : start + max_length]
        mask = encoded.loss_mask[start : start + max_length].copy()
        # The target reads each part by itself: nothing in a part leads to its first token.
        mask[0] = mask[0] and start == 0
        if len(ids) >= MIN_TOKENS and mask.any():
            yield TokenizedDocument(doc_id, ids, mask)
