"""Read everything in a cache and check it: digests, checksums, structure, and what must hold of the numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dflash_cache.errors import CacheDamagedError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.codec import ArrayReader
from dflash_cache.format.invariants import expected_positions, nonfinite_rows, zero_rows
from dflash_cache.format.manifest import ATTACHED_NAMES, file_digest
from dflash_cache.format.shard import ShardReader

__all__ = ["Problem", "VerifyReport", "verify_cache"]

_HIDDEN_STATES = ("fc_features", "last_hidden_states")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      shard: Number of the shard; None for a file beside the shards.
      message: What is wrong, naming the file.
    """

    shard: int | None
    message: str


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of a verification.

    Attributes:
      problems: Empty when the cache is intact.
      shards: Shards read.
      stored_bytes: Bytes read from disk.
    """

    problems: tuple[Problem, ...]
    shards: int
    stored_bytes: int


def verify_cache(
    cache: FeatureCache, *, shards: tuple[int, ...] | None = None, on_shard: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Verify shards of a cache, reading every byte of them.

    Args:
      cache: The cache, finished or not.
      shards: Numbers of the shards to verify; None verifies all of them and the files beside them.
      on_shard: Called after each shard with its number and its stored bytes.
    """
    problems: list[Problem] = []
    if shards is None:
        problems += [Problem(None, message) for message in _attached_problems(cache)]
    numbers = tuple(range(len(cache.manifest.shards))) if shards is None else shards
    total = 0
    for number in numbers:
        problems += [Problem(number, message) for message in _shard_problems(cache, number)]
        stored = cache.manifest.shards[number].stored_bytes
        total += stored
        if on_shard:
            on_shard(number, stored)
    return VerifyReport(tuple(problems), len(numbers), total)


def _attached_problems(cache: FeatureCache) -> Iterator[str]:
    for name in ATTACHED_NAMES:
        try:
            cache.attached(name)
        except CacheDamagedError as error:
            yield str(error)


def _shard_problems(cache: FeatureCache, number: int) -> Iterator[str]:
    try:
        reader = cache.shard(number)
    except CacheDamagedError as error:
        yield str(error)
        return
    for name, entry in reader.entry.arrays.items():
        path = reader.arrays[name].path
        if file_digest(path) != entry:
            yield f"{path}: its contents are not those that were sealed (digest differs from the manifest)"
    yield from _token_problems(cache, reader)
    for name in _HIDDEN_STATES:
        yield from _state_problems(reader.arrays[name])


def _token_problems(cache: FeatureCache, reader: ShardReader) -> Iterator[str]:
    """Check the small arrays, which are read whole."""
    tokens = reader.entry.num_tokens
    try:
        input_ids = reader.arrays["input_ids"].read(0, tokens)
        positions = reader.arrays["positions"].read(0, tokens)
        loss_mask = reader.arrays["loss_mask"].read(0, tokens)
    except CacheDamagedError as error:
        yield str(error)
        return
    vocab_size = cache.manifest.identity.target.vocab_size
    if input_ids.min() < 0 or input_ids.max() >= vocab_size:
        found = f"{input_ids.min()} to {input_ids.max()}"
        yield f"{reader.arrays['input_ids'].path}: token ids {found}, expected 0 to {vocab_size - 1}"
    if not np.array_equal(positions, expected_positions(reader.doc_lengths)):
        yield f"{reader.arrays['positions'].path}: positions do not restart with each document"
    if int(loss_mask.sum()) != reader.entry.supervised_tokens:
        yield (
            f"{reader.arrays['loss_mask'].path}: {int(loss_mask.sum())} supervised tokens, "
            f"the manifest says {reader.entry.supervised_tokens}"
        )
    # The parts of a split document share its id.
    least_step = 0 if cache.manifest.identity.corpus.long == "split" else 1
    if (np.diff(reader.doc_ids) < least_step).any():
        yield f"{reader.arrays['doc_ids'].path}: document ids do not ascend"


def _state_problems(array: ArrayReader) -> Iterator[str]:
    """Read hidden states chunk by chunk; report each damaged chunk, and rows that no target produces."""
    rows, step = array.layout.shape[0], array.layout.chunk_items
    nonfinite = zero = 0
    for start in range(0, rows, step):
        try:
            bits = array.read(start, min(start + step, rows))
        except CacheDamagedError as error:
            yield str(error)
            continue
        nonfinite += int(nonfinite_rows(bits).sum())
        zero += int(zero_rows(bits).sum())
    if nonfinite:
        yield f"{array.path}: {nonfinite} rows hold NaN or infinite numbers"
    if zero:
        yield f"{array.path}: {zero} rows are all zero"
