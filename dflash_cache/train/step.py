"""One optimizer step over any number of rows, with one exact denominator.

The loss of a step is (sum of all rows' numerators) / (sum of all rows' denominators). Rows come one at a time, so each
row's numerator is differentiated as it is, and the summed gradient is divided once, at the end: the same number
whichever way documents fall into rows and rows into steps (dflash.md section 11, trap 8).
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dflash_cache.config import TrainConfig
from dflash_cache.drafter.anchors import AnchorCoverage, sample_anchors
from dflash_cache.drafter.loss import effective_denominator
from dflash_cache.drafter.metrics import MetricSums
from dflash_cache.drafter.objective import Objective
from dflash_cache.errors import ConfigError, NonFiniteError
from dflash_cache.stream.batch import PackedBatch
from dflash_cache.train.noise import add_feature_noise
from dflash_cache.train.optimizer import clip_gradients, divide_gradients, set_learning_rate
from dflash_cache.train.state import TrainState

__all__ = ["StepResult", "TrainStep", "autocast", "explain_out_of_memory", "no_sums", "refuse_mask_token"]


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
      sums: Over all its blocks.
      grad_norm: Before clipping; None when nothing was supervised.
      num_tokens: Tokens of its rows.
      num_eligible, num_used: Anchors that could be, and were, used.
    """

    sums: MetricSums
    grad_norm: float | None
    num_tokens: int
    num_eligible: int
    num_used: int


@dataclass(frozen=True)
class _RowResult:
    sums: MetricSums
    coverage: AnchorCoverage
    num_tokens: int
    documents: str


class TrainStep:
    """Takes optimizer steps; holds settings, no state."""

    def __init__(self, objective: Objective, config: TrainConfig, device: torch.device) -> None:
        """Fix what all steps share.

        Args:
          objective: How the drafter is judged.
          config: Anchors, noise and clipping.
          device: Where rows go.
        """
        self._objective = objective
        self._num_anchors = config.num_anchors
        self._noise_half_width = config.noise_half_width
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._device = device

    def __call__(self, state: TrainState, rows: Iterable[PackedBatch], lr: float) -> StepResult:
        """Take one step. The weights change last: until then a failure leaves them as they were.

        A step in which nothing is supervised changes no weight and no moment, and draws its anchors and noise as any
        other does.

        Args:
          state: The run; weights, moments and generators change in place, its progress does not.
          rows: At least one, on the CPU.
          lr: Learning rate.

        Raises:
          NonFiniteError: If the loss or the gradient is NaN or infinite, naming step and documents.
          ConfigError: If a document contains the mask token.
        """
        state.optimizer.zero_grad(set_to_none=True)
        state.drafter.train()
        with explain_out_of_memory():
            done = [self._differentiate(state, row) for row in rows]
        sums = reduce(MetricSums.__add__, (row.sums for row in done))
        step = state.progress.step + 1
        _refuse_non_finite_loss(done, step)
        grad_norm = None
        if int(sums.total.sum()):
            divide_gradients(state.optimizer, effective_denominator(sums.denominator, self._objective.loss))
            grad_norm = self._clipped_norm(state, done, step)
            set_learning_rate(state.optimizer, lr)
            state.optimizer.step()
        return StepResult(
            sums=sums,
            grad_norm=grad_norm,
            num_tokens=sum(row.num_tokens for row in done),
            num_eligible=sum(row.coverage.num_eligible for row in done),
            num_used=sum(row.coverage.num_used for row in done),
        )

    def _differentiate(self, state: TrainState, row: PackedBatch) -> _RowResult:
        """Add one row's gradient, not yet divided, to the drafter's."""
        config = self._objective.config
        refuse_mask_token(row, config.mask_token_id)
        anchors = sample_anchors(
            row.loss_mask,
            row.doc_ids,
            block_size=config.block_size,
            num_anchors=self._num_anchors,
            generator=state.generators.anchors,
        )
        coverage = anchors.coverage(row.loss_mask, row.doc_ids, config.block_size)
        on_device = row.to(self._device)
        noised = add_feature_noise(
            on_device.fc_features, half_width=self._noise_half_width, generator=state.generators.noise
        )
        with autocast(self._device):
            result = self._objective(state.drafter, on_device.with_fc_features(noised), anchors.to(self._device))
        result.numerator.backward()  # type: ignore[no-untyped-call]
        return _RowResult(result.sums, coverage, len(row), row.describe())

    def _clipped_norm(self, state: TrainState, rows: list[_RowResult], step: int) -> float:
        norm = float(clip_gradients(state.optimizer, self._max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteError(
                f"the gradient of step {step} is {norm}, its loss is finite; in {_names(rows)}. The weights are those "
                "of the step before, and the latest checkpoint is intact. Lower optimizer.lr, or check these documents "
                "with `dflash-cache inspect doc`."
            )
        return norm


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """Run matrix products in bfloat16 on a GPU; on the CPU everything stays float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Say which settings the memory depends on when there is not enough of it, on a GPU or on the host.

    Raises:
      ConfigError: In place of torch's error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # The host's allocator raises a bare RuntimeError.
        if type(error) is RuntimeError and "DefaultCPUAllocator" not in str(error):
            raise
        raise ConfigError(
            f"there is too little memory for these rows: {str(error).splitlines()[0]} Lower num_anchors or "
            "row_tokens, and raise rows_per_step for as many tokens in a step; these settings belong to a run, so "
            "begin a new one."
        ) from error


def no_sums(objective: Objective, device: torch.device) -> MetricSums:
    """Sums over no block at all, to begin adding with."""
    size = 3 * objective.config.block_size + 2 + len(objective.loss.terms)
    return MetricSums.from_vector(torch.zeros(size, dtype=torch.float64, device=device), objective.config.block_size)


def refuse_mask_token(row: PackedBatch, mask_token_id: int) -> None:
    """Refuse a row that contains the mask token: the drafter could not tell a known token from an unknown slot.

    Raises:
      ConfigError: Naming the document.
    """
    found: Tensor = (row.input_ids == mask_token_id).nonzero()
    if not len(found):
        return
    index = int(found[0])
    number = int(row.doc_ids[index])
    where = (
        f"corpus document {row.corpus_ids[number]}, position {int(row.positions[index])}" if number >= 0 else "padding"
    )
    raise ConfigError(
        f"the mask token {mask_token_id} occurs in the text itself ({where}); set drafter.mask_token_id to an id that "
        "no document contains, such as a reserved special token, or leave the document out"
    )


def _refuse_non_finite_loss(rows: list[_RowResult], step: int) -> None:
    finite = torch.stack([row.sums.numerator for row in rows]).isfinite().tolist()
    bad = [row for row, is_finite in zip(rows, finite, strict=True) if not is_finite]
    if bad:
        raise NonFiniteError(
            f"the loss of step {step} is {float(bad[0].sums.numerator)} in {_names(bad)}. The weights are those of the "
            "step before, and the latest checkpoint is intact. Lower optimizer.lr, or check these documents with "
            "`dflash-cache inspect doc`."
        )


def _names(rows: list[_RowResult]) -> str:
    return "; ".join(row.documents for row in rows)
