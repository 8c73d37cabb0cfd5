"""Collect documents' rows, which arrive in any order, into shards, which leave in order.

Shapes: n tokens of a document, P planes (fc layers, then the last), L fc layers, H hidden size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.errors import SelfCheckError
from dflash_cache.extract.plan import ShardPlan, WindowPlan
from dflash_cache.format.shard import ShardData
from dflash_cache.spec import FeatureSpec

__all__ = ["WindowAssembler"]


@dataclass
class _Buffer:
    plan: ShardPlan
    data: ShardData
    starts: npt.NDArray[np.int64]
    missing: set[int]


class WindowAssembler:
    """The shards of one window that are not sealed yet."""

    def __init__(self, window: WindowPlan, corpus: TokenizedCorpus, features: FeatureSpec, num_sealed: int) -> None:
        """Begin a window.

        Args:
          window: The window.
          corpus: The tokenised corpus.
          features: What is stored.
          num_sealed: Documents of the corpus that are sealed already.
        """
        self._corpus = corpus
        self._features = features
        self._waiting = [shard for shard in window.shards if shard.first_document >= num_sealed]
        self._ends = np.array([shard.end_document for shard in self._waiting])
        self._buffers: dict[int, _Buffer] = {}
        self._next = 0
        self._first = self._waiting[0].first_document if self._waiting else window.end_document

    def wants(self, document: int) -> bool:
        """Tell whether a document of the window belongs to a shard that is not sealed."""
        return document >= self._first

    def place(self, document: int, rows_nPH: npt.NDArray[np.uint16]) -> None:
        """Put a document's rows where they belong.

        Args:
          document: Its ordinal in the corpus.
          rows_nPH: [n, P, H] bfloat16 as uint16; copied.

        Raises:
          SelfCheckError: If there are not as many rows as tokens.
        """
        shard = int(np.searchsorted(self._ends, document, side="right"))
        buffer = self._buffers.get(shard) or self._begin_shard(shard)
        place = document - buffer.plan.first_document
        length = int(buffer.data.doc_lengths[place])
        if len(rows_nPH) != length:
            raise SelfCheckError(
                f"document {int(buffer.data.doc_ids[place])}: {len(rows_nPH)} rows were captured for {length} tokens"
            )
        rows = slice(int(buffer.starts[place]), int(buffer.starts[place]) + length)
        buffer.data.fc_features[rows] = rows_nPH[:, :-1]
        buffer.data.last_hidden_states[rows] = rows_nPH[:, -1]
        buffer.missing.remove(place)

    def take_ready(self) -> list[tuple[ShardPlan, ShardData]]:
        """Return, and forget, the shards that are whole and whose predecessors all have been returned."""
        ready = []
        while self._next in self._buffers and not self._buffers[self._next].missing:
            buffer = self._buffers.pop(self._next)
            ready.append((buffer.plan, buffer.data))
            self._next += 1
        return ready

    def _begin_shard(self, number: int) -> _Buffer:
        plan = self._waiting[number]
        documents = [self._corpus.document(i) for i in range(plan.first_document, plan.end_document)]
        lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        planes, hidden = len(self._features.fc_layers), self._features.hidden_size
        tokens = plan.num_tokens
        data = ShardData(
            input_ids=np.concatenate([document.input_ids for document in documents]),
            loss_mask=np.concatenate([document.loss_mask for document in documents]),
            positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            doc_lengths=lengths,
            doc_ids=np.array([document.doc_id for document in documents], dtype=np.int64),
            fc_features=np.empty((tokens, planes, hidden), dtype=np.uint16),
            last_hidden_states=np.empty((tokens, hidden), dtype=np.uint16),
        )
        self._buffers[number] = _Buffer(plan, data, starts, set(range(plan.num_documents)))
        return self._buffers[number]
