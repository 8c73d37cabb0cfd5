"""Collect documents' rows, which arrive in any order, into shards, which leave in order.

Shapes: n tokens of a document, P planes (fc layers, then the last), L fc layers, H hidden size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.errors import SelfCheckError
from dflash_cache.extract.plan import ShardPlan, WindowPlan
from dflash_cache.format.invariants import expected_positions
from dflash_cache.format.manifest import QuarantinedDocument
from dflash_cache.format.shard import ShardData
from dflash_cache.spec import FeatureSpec

__all__ = ["ReadyShard", "WindowAssembler"]


@dataclass(frozen=True)
class ReadyShard:
    """A shard whose documents have all been computed.

    Attributes:
      plan: Which documents it was planned to hold.
      data: Those of them that are good, in order; None when none is.
      first_document: Ordinal of the first of them; the plan's own when there is none.
      quarantined: The others.
    """

    plan: ShardPlan
    data: ShardData | None
    first_document: int
    quarantined: tuple[QuarantinedDocument, ...]


@dataclass
class _Buffer:
    plan: ShardPlan
    data: ShardData
    starts: npt.NDArray[np.int64]
    missing: set[int]
    quarantined: dict[int, QuarantinedDocument]

    def ready(self) -> ReadyShard:
        """Take the good documents out."""
        if not self.quarantined:
            return ReadyShard(self.plan, self.data, self.plan.first_document, ())
        bad = tuple(entry for _, entry in sorted(self.quarantined.items()))
        good = np.ones(self.plan.num_documents, dtype=np.bool_)
        good[list(self.quarantined)] = False
        if not good.any():
            return ReadyShard(self.plan, None, self.plan.first_document, bad)
        tokens = np.repeat(good, self.data.doc_lengths)
        data = ShardData(
            input_ids=self.data.input_ids[tokens],
            loss_mask=self.data.loss_mask[tokens],
            positions=self.data.positions[tokens],
            doc_lengths=self.data.doc_lengths[good],
            doc_ids=self.data.doc_ids[good],
            fc_features=self.data.fc_features[tokens],
            last_hidden_states=self.data.last_hidden_states[tokens],
        )
        return ReadyShard(self.plan, data, self.plan.first_document + int(good.argmax()), bad)


class WindowAssembler:
    """The shards of one window that are not sealed yet."""

    def __init__(self, window: WindowPlan, corpus: TokenizedCorpus, features: FeatureSpec, num_sealed: int) -> None:
        """Begin a window.

        Args:
          window: The window.
          corpus: The tokenised corpus.
          features: What is stored.
          num_sealed: Documents of the corpus that are sealed or quarantined already; always the first ones.
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

    def quarantine(self, entry: QuarantinedDocument) -> None:
        """Leave a document out of its shard."""
        shard = int(np.searchsorted(self._ends, entry.document, side="right"))
        buffer = self._buffers.get(shard) or self._begin_shard(shard)
        place = entry.document - buffer.plan.first_document
        buffer.quarantined[place] = entry
        buffer.missing.remove(place)

    def take_ready(self) -> list[ReadyShard]:
        """Return, and forget, the shards that are whole and whose predecessors all have been returned."""
        ready = []
        while self._next in self._buffers and not self._buffers[self._next].missing:
            ready.append(self._buffers.pop(self._next).ready())
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
            positions=expected_positions(lengths),
            doc_lengths=lengths,
            doc_ids=np.array([document.doc_id for document in documents], dtype=np.int64),
            fc_features=np.empty((tokens, planes, hidden), dtype=np.uint16),
            last_hidden_states=np.empty((tokens, hidden), dtype=np.uint16),
        )
        self._buffers[number] = _Buffer(plan, data, starts, set(range(plan.num_documents)), {})
        return self._buffers[number]
