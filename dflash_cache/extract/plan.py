"""Cut a corpus into shards, shards into windows, and windows into batches. Pure: numbers in, numbers out.

What a batch holds depends on the plan alone, never on where a continued run starts: rounding differs between a document
computed in this company and in that, and a continued cache must equal an uninterrupted one byte for byte.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_cache.corpus.batches import length_batches

__all__ = [
    "ExtractionPlan",
    "ShardPlan",
    "WindowPlan",
    "default_shard_tokens",
    "default_window_tokens",
    "pending_batches",
    "plan_extraction",
]

_SHARD_BYTES = 512 << 20
# With batches of 4,096 tokens a window of 32 leaves about 3% of padding on a mix of lengths (docs/benchmarks.md).
_WINDOW_BYTES = 8 << 30
_WINDOW_BATCHES = 32

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardPlan:
    """Which documents a shard will hold.

    Attributes:
      number: 0-based.
      first_document: Ordinal of its first.
      num_documents: How many, consecutive.
      num_tokens: Their tokens.
    """

    number: int
    first_document: int
    num_documents: int
    num_tokens: int

    @property
    def end_document(self) -> int:
        """One beyond its last document."""
        return self.first_document + self.num_documents


@dataclass(frozen=True)
class WindowPlan:
    """Consecutive shards whose documents are batched together."""

    shards: tuple[ShardPlan, ...]

    @property
    def first_document(self) -> int:
        """Ordinal of its first document."""
        return self.shards[0].first_document

    @property
    def end_document(self) -> int:
        """One beyond its last document."""
        return self.shards[-1].end_document


@dataclass(frozen=True)
class ExtractionPlan:
    """The whole corpus."""

    windows: tuple[WindowPlan, ...]

    @property
    def shards(self) -> tuple[ShardPlan, ...]:
        """All shards, in order."""
        return tuple(shard for window in self.windows for shard in window.shards)


def default_shard_tokens(bytes_per_token: int) -> int:
    """Tokens in 512 MiB of raw hidden states."""
    return max(1, _SHARD_BYTES // bytes_per_token)


def default_window_tokens(batch_tokens: int, bytes_per_token: int) -> int:
    """Tokens in 32 batches, but at most 8 GiB of raw hidden states: a window is held in memory."""
    return max(1, min(_WINDOW_BATCHES * batch_tokens, _WINDOW_BYTES // bytes_per_token))


def plan_extraction(lengths: IntArray, shard_tokens: int, window_tokens: int) -> ExtractionPlan:
    """Plan a corpus.

    Args:
      lengths: [D] tokens of each document, in order.
      shard_tokens: Most tokens of a shard; a longer document is a shard alone.
      window_tokens: Most tokens of a window; at least one whole shard.
    """
    windows: list[WindowPlan] = []
    pending: list[ShardPlan] = []
    pending_tokens = 0
    for shard in _plan_shards(lengths, shard_tokens):
        if pending and pending_tokens + shard.num_tokens > window_tokens:
            windows.append(WindowPlan(tuple(pending)))
            pending, pending_tokens = [], 0
        pending.append(shard)
        pending_tokens += shard.num_tokens
    if pending:
        windows.append(WindowPlan(tuple(pending)))
    return ExtractionPlan(tuple(windows))


def pending_batches(window: WindowPlan, lengths: IntArray, batch_tokens: int, num_sealed: int) -> list[IntArray]:
    """Return a window's batches that hold at least one document that is not sealed, each of them whole.

    Args:
      window: The window.
      lengths: [D] tokens of each document of the corpus.
      batch_tokens: Most padded tokens of a batch.
      num_sealed: Documents of the corpus that are sealed already; always the first ones.

    Returns:
      Batches of ordinals, in the order in which they are run.
    """
    first = window.first_document
    batches = length_batches(lengths[first : window.end_document], batch_tokens)
    return [batch + first for batch in batches if int(batch.max()) + first >= num_sealed]


def _plan_shards(lengths: IntArray, shard_tokens: int) -> list[ShardPlan]:
    ends = np.cumsum(lengths, dtype=np.int64)
    shards: list[ShardPlan] = []
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + shard_tokens, side="right")))
        shards.append(ShardPlan(len(shards), first, end - first, int(ends[end - 1]) - before))
        first = end
    return shards
