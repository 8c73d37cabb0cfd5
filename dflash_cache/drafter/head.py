"""From hidden states to loss, a few rows at a time, so that logits never exist for all anchors at once.

Only supervised slots come here: anchors' own slots, masked slots and padding are dropped before lm_head. Shape letters:
R supervised slots, C rows of a chunk, T tokens of a row, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dflash_cache.config import LossConfig
from dflash_cache.drafter.layers import as_weight
from dflash_cache.drafter.loss import term_losses

__all__ = ["HeadResult", "OutputHead", "SupervisedRows", "default_chunk_rows", "head_loss", "target_ids"]

_CHUNK_LOGITS = 2**27  # 512 MiB in float32, for each of the few copies that a loss and its gradient need


class OutputHead(Protocol):
    """The target's frozen output side."""

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, H]; receives no gradient."""
        ...

    @property
    def lm_head_bias(self) -> Tensor | None:
        """[V], added to the drafter's logits as to the target's; None for most targets."""
        ...

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        """Final norm and lm_head of last hidden states [C, H]; [C, V]."""
        ...


@dataclass(frozen=True)
class SupervisedRows:
    """The slots that are trained or scored.

    Attributes:
      hidden: The drafter's output; [R, H].
      weight: Of each slot in the loss; float32 [R].
      data_ids: The corpus' own token in each slot; int64 [R].
      target_index: Row index of the token whose last hidden states predict the slot, anchor + slot - 1; int64 [R].
      last_hidden_states: The row's, before the final norm; [T, H].
    """

    hidden: Tensor
    weight: Tensor
    data_ids: Tensor
    target_index: Tensor
    last_hidden_states: Tensor


@dataclass(frozen=True)
class HeadResult:
    """What came of the supervised slots.

    Attributes:
      numerator: Sum over slots of weight times loss; a scalar, differentiable with respect to the hidden states.
      term_numerators: The same for each term of the loss, before the term's own weight; detached, [terms].
      label_ids: Id that each slot should predict; int64 [R].
      predicted_ids: Argmax of the drafter's logits; int64 [R].
    """

    numerator: Tensor
    term_numerators: Tensor
    label_ids: Tensor
    predicted_ids: Tensor


def default_chunk_rows(vocab_size: int) -> int:
    """Rows of logits that fit the memory meant for one chunk; at least 1."""
    return max(1, _CHUNK_LOGITS // vocab_size)


def target_ids(last_hidden_CH: Tensor, head: OutputHead, *, chunk_rows: int | None = None) -> Tensor:
    """Argmax of the target's logits for each row of last hidden states; int64 [C]."""
    chunk_rows = chunk_rows or default_chunk_rows(len(head.lm_head_weight))
    with torch.no_grad():
        chunks = [head.logits(last_hidden_CH[rows]).argmax(-1) for rows in _slices(len(last_hidden_CH), chunk_rows)]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64, device=last_hidden_CH.device)


def head_loss(rows: SupervisedRows, head: OutputHead, loss: LossConfig, *, chunk_rows: int | None = None) -> HeadResult:
    """Project, compare and sum the supervised slots in chunks.

    The gradient with respect to the hidden states is taken inside each chunk and kept in place of the logits: memory
    does not grow with the number of anchors, and nothing is computed twice. With no rows the numerator is 0 and still
    joined to the graph, so every parameter gets a (zero) gradient on every rank.

    Args:
      rows: The slots.
      head: The target's output side.
      loss: Terms and labels.
      chunk_rows: Rows of logits in memory at a time; None suits the vocabulary.
    """
    chunk_rows = chunk_rows or default_chunk_rows(len(head.lm_head_weight))
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _ChunkedLoss.apply(
        rows.hidden, _ChunkLoss(rows, head, loss), chunk_rows
    )  # type: ignore[no-untyped-call]
    return HeadResult(*outputs)


@dataclass(frozen=True)
class _ChunkLoss:
    """The loss of a few consecutive rows."""

    rows: SupervisedRows
    head: OutputHead
    loss: LossConfig

    def __call__(self, hidden_CH: Tensor, chunk: slice) -> HeadResult:
        rows, head = self.rows, self.head
        label_ids_C, target_logits_CV = rows.data_ids[chunk], None
        if self.loss.label == "target_argmax" or "kl_div" in self.loss.terms:
            with torch.no_grad():
                target_logits_CV = head.logits(rows.last_hidden_states[rows.target_index[chunk]])
        if self.loss.label == "target_argmax":
            assert target_logits_CV is not None
            label_ids_C = target_logits_CV.argmax(-1)
        weight_VH = head.lm_head_weight
        logits_CV = functional.linear(as_weight(hidden_CH, weight_VH), weight_VH, head.lm_head_bias)
        losses = term_losses(self.loss, logits_CV, label_ids_C, target_logits_CV)
        sums = torch.stack([(one_C * rows.weight[chunk]).sum() for one_C in losses])
        term_weights = torch.tensor(list(self.loss.terms.values()), dtype=sums.dtype, device=sums.device)
        return HeadResult(
            numerator=(sums * term_weights).sum(),
            term_numerators=sums.detach(),
            label_ids=label_ids_C,
            predicted_ids=logits_CV.detach().argmax(-1),
        )


class _ChunkedLoss(torch.autograd.Function):
    """Sums chunks; its backward scales the gradients that its forward kept."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, chunk_loss: _ChunkLoss, chunk_rows: int) -> tuple[Tensor, ...]:
        wants_grad = bool(ctx.needs_input_grad[0])
        dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
        numerator = hidden_RH.new_zeros((), dtype=dtype)
        term_numerators = hidden_RH.new_zeros(len(chunk_loss.loss.terms), dtype=dtype)
        label_ids_R = torch.empty(len(hidden_RH), dtype=torch.int64, device=hidden_RH.device)
        predicted_ids_R = torch.empty_like(label_ids_R)
        grad_RH = torch.empty_like(hidden_RH) if wants_grad else None
        for chunk in _slices(len(hidden_RH), chunk_rows):
            hidden_CH = hidden_RH[chunk].detach().requires_grad_(wants_grad)
            with torch.set_grad_enabled(wants_grad):
                result = chunk_loss(hidden_CH, chunk)
            if grad_RH is not None:
                (grad_RH[chunk],) = torch.autograd.grad(result.numerator, hidden_CH)
            numerator += result.numerator.detach()
            term_numerators += result.term_numerators
            label_ids_R[chunk], predicted_ids_R[chunk] = result.label_ids, result.predicted_ids
        if grad_RH is not None:
            ctx.save_for_backward(grad_RH)
        ctx.mark_non_differentiable(term_numerators, label_ids_R, predicted_ids_R)
        return numerator, term_numerators, label_ids_R, predicted_ids_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_numerator: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (grad_RH,) = ctx.saved_tensors
        return grad_RH * grad_numerator.to(grad_RH.dtype), None, None


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
