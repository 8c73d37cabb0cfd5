"""The one function that training and evaluation share: a packed row and its anchors in, loss and figures out.

Shape letters: T tokens of a row, L fc layers, H hidden size, V vocabulary, A anchors, K slots of a block.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_cache.config import LossConfig
from dflash_cache.drafter.anchors import Anchors, BlockSlots, block_slots
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.head import OutputHead, SupervisedRows, head_loss
from dflash_cache.drafter.loss import loss_denominator, slot_weights
from dflash_cache.drafter.metrics import MetricSums, score_blocks
from dflash_cache.drafter.model import DraftContext

__all__ = ["FrozenTarget", "Objective", "ObjectiveResult", "PackedRow", "block_token_ids"]


class PackedRow(Protocol):
    """A packed row; ``stream.PackedBatch`` is one."""

    @property
    def input_ids(self) -> Tensor:
        """Int64 [T]."""
        ...

    @property
    def positions(self) -> Tensor:
        """Index of each token within its document; int64 [T]."""
        ...

    @property
    def doc_ids(self) -> Tensor:
        """Document of each token within the row, -1 for padding; int64 [T]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """Tokens that count as targets; bool [T]."""
        ...

    @property
    def fc_features(self) -> Tensor:
        """[T, L, H], noised or not."""
        ...

    @property
    def last_hidden_states(self) -> Tensor:
        """Before the final norm, never noised; [T, H]."""
        ...


class FrozenTarget(OutputHead, Protocol):
    """What the drafter borrows from the target; ``TargetHead`` is one."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings of ids of any shape; [..., H]."""
        ...


@dataclass(frozen=True)
class ObjectiveResult:
    """What came of one row.

    Attributes:
      numerator: Weighted sum of slot losses; a scalar joined to the drafter's graph.
      denominator: What it counts; float64 scalar. Add both up over all rows of a step and all ranks, then divide by
        ``effective_denominator``.
      sums: Figures, detached.
    """

    numerator: Tensor
    denominator: Tensor
    sums: MetricSums


@dataclass(frozen=True)
class Objective:
    """How a drafter is judged on a row.

    Attributes:
      config: The drafter's.
      loss: Terms, labels, weights, denominator.
      target: Frozen embedding and output side of the target.
      chunk_rows: Rows of logits in memory at a time; None suits the vocabulary.
    """

    config: DrafterConfig
    loss: LossConfig
    target: FrozenTarget
    chunk_rows: int | None = None

    def __call__(self, drafter: nn.Module, row: PackedRow, anchors: Anchors) -> ObjectiveResult:
        """Draft a block at every anchor and compare it with the target.

        Args:
          drafter: A ``Drafter``, or a wrapper with the same forward.
          row: On the drafter's device.
          anchors: On the same device; invalid ones change neither loss nor gradients.
        """
        slots = self._slots(row, anchors)
        token_ids_AK = block_token_ids(row.input_ids, anchors, self.config)
        with torch.no_grad():
            embeddings_AKH = self.target.embed(token_ids_AK)
        context = DraftContext(row.fc_features, row.positions, row.doc_ids)
        drafted_AKH: Tensor = drafter(context, anchors, embeddings_AKH)
        result = head_loss(
            self._supervised_rows(drafted_AKH, row, slots), self.target, self.loss, chunk_rows=self.chunk_rows
        )
        correct_AK = torch.zeros_like(slots.supervised)
        correct_AK[slots.supervised] = result.predicted_ids == result.label_ids
        denominator = loss_denominator(slots.supervised, self.loss)
        sums = score_blocks(
            correct_AK,
            slots.supervised,
            numerator=result.numerator,
            denominator=denominator,
            term_numerators=result.term_numerators,
        )
        return ObjectiveResult(result.numerator, denominator, sums)

    def denominator(self, row: PackedRow, anchors: Anchors) -> Tensor:
        """The row's denominator without a forward pass; float64 scalar."""
        return loss_denominator(self._slots(row, anchors).supervised, self.loss)

    def _slots(self, row: PackedRow, anchors: Anchors) -> BlockSlots:
        return block_slots(anchors, row.loss_mask, row.doc_ids, self.config.block_size)

    def _supervised_rows(self, drafted_AKH: Tensor, row: PackedRow, slots: BlockSlots) -> SupervisedRows:
        weight_K = slot_weights(self.config.block_size, self.loss.gamma, device=drafted_AKH.device)
        token_index_R = slots.token_index[slots.supervised]
        return SupervisedRows(
            hidden=drafted_AKH[slots.supervised],
            weight=weight_K.expand_as(slots.supervised)[slots.supervised],
            data_ids=row.input_ids[token_index_R],
            # The token before a slot predicts it. Slot 0 is never supervised, so this never reaches before the row.
            target_index=token_index_R - 1,
            last_hidden_states=row.last_hidden_states,
        )


def block_token_ids(input_ids_T: Tensor, anchors: Anchors, config: DrafterConfig) -> Tensor:
    """What a block shows the drafter: the anchor's token, then mask tokens; int64 [A, K]."""
    token_ids_AK = torch.full(
        (len(anchors.positions), config.block_size),
        config.mask_token_id,
        dtype=input_ids_T.dtype,
        device=input_ids_T.device,
    )
    token_ids_AK[:, 0] = input_ids_T[anchors.positions]
    return token_ids_AK
