"""What stage one reports while it runs. The library sends these to a callback and never prints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BatchComputed",
    "CorpusRead",
    "DocumentQuarantined",
    "ExtractEvent",
    "Notice",
    "OnEvent",
    "Phase",
    "PhaseName",
    "SelfCheckPassed",
    "ShardSealed",
]

PhaseName = Literal["open_target", "tokenize", "load_weights", "extract", "finish"]


@dataclass(frozen=True)
class Phase:
    """A phase begins."""

    name: PhaseName


@dataclass(frozen=True)
class Notice:
    """Something that the user should know and need not act on."""

    text: str


@dataclass(frozen=True)
class CorpusRead:
    """How far tokenising is: documents and tokens so far, bytes of the files read and in all."""

    documents: int
    tokens: int
    bytes_read: int
    total_bytes: int


@dataclass(frozen=True)
class BatchComputed:
    """A batch has been through the target.

    Attributes:
      documents, tokens: Computed or sealed so far, of the whole corpus.
      total_documents, total_tokens: Of the whole corpus.
      tokens_computed: Through the target in this run.
      bytes_written: Of sealed shards, compressed, those of earlier runs included.
      tokens_per_second: Of this run.
      megabytes_per_second: Raw hidden states of this run, 10^6 bytes.
      seconds_left: At that rate; None before the first batch is measured.
    """

    documents: int
    tokens: int
    total_documents: int
    total_tokens: int
    tokens_computed: int
    bytes_written: int
    tokens_per_second: float
    megabytes_per_second: float
    seconds_left: float | None


@dataclass(frozen=True)
class DocumentQuarantined:
    """A document is left out of the cache, and why; its index in the corpus."""

    doc_id: int
    text: str


@dataclass(frozen=True)
class SelfCheckPassed:
    """What was stored agrees with the target.

    Attributes:
      documents: How many were recomputed.
      worst_layer_error: Largest relative error of a layer.
      agreement: Share of compared positions with the target's own argmax.
    """

    documents: int
    worst_layer_error: float
    agreement: float


@dataclass(frozen=True)
class ShardSealed:
    """A shard exists now.

    Attributes:
      name: Its folder.
      documents, tokens: What it holds.
      stored_bytes: Its data files.
      sealed_documents: Of the whole cache.
      bytes_written: Of the whole cache.
    """

    name: str
    documents: int
    tokens: int
    stored_bytes: int
    sealed_documents: int
    bytes_written: int


ExtractEvent = Phase | Notice | CorpusRead | BatchComputed | DocumentQuarantined | SelfCheckPassed | ShardSealed
OnEvent = Callable[[ExtractEvent], None]
