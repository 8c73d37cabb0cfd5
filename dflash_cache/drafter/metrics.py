"""How well blocks are drafted, as sums that add up over rows, micro-batches and ranks (dflash.md section 7).

All numbers are teacher-forced: the context of every block is the corpus', not the drafter's own output.
Shape letters: A anchors, K slots of a block.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dflash_cache.config import LossConfig
from dflash_cache.drafter.loss import effective_denominator

__all__ = ["MetricSums", "Metrics", "block_streaks", "score_blocks"]


@dataclass(frozen=True)
class Metrics:
    """Finished figures; None where nothing was supervised.

    Attributes:
      loss: The whole loss.
      terms: Each term of it by name, before the term's weight.
      accuracy: Share of supervised slots whose argmax is the label.
      accuracy_by_slot: The same for slots 1 to K-1.
      streak: Mean number of leading correct slots of a block.
      streak_share: Share of blocks with each streak, 0 to K-1.
      eal: Expected acceptance length, streak + 1 bonus token, averaged over blocks.
      eal_marginal: Sum over slots of the product of accuracies up to each: what speculators reported before it counted
        blocks. Neither per block nor with a bonus token; kept for comparison only.
      num_blocks: Blocks with a supervised slot.
      num_slots: Supervised slots.
    """

    loss: float | None
    terms: dict[str, float | None]
    accuracy: float | None
    accuracy_by_slot: tuple[float | None, ...]
    streak: float | None
    streak_share: tuple[float | None, ...]
    eal: float | None
    eal_marginal: float | None
    num_blocks: int
    num_slots: int


@dataclass(frozen=True)
class MetricSums:
    """Counts and sums of some blocks; add them up, then :meth:`finalize`.

    Attributes:
      correct: Supervised slots whose argmax is the label, per slot; int64 [K].
      total: Supervised slots, per slot; int64 [K].
      streaks: Blocks with a supervised slot by their streak, 0 to K-1; int64 [K].
      numerator: Of the loss, detached; float64 scalar.
      denominator: Of the loss; float64 scalar.
      term_numerators: Of each term of the loss, in its order; float64 [terms].
    """

    correct: Tensor
    total: Tensor
    streaks: Tensor
    numerator: Tensor
    denominator: Tensor
    term_numerators: Tensor

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Join two disjoint sets of blocks."""
        return MetricSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def to_vector(self) -> Tensor:
        """Lay all sums in one float64 vector, for one all-reduce; counts up to 2^53 stay exact."""
        return torch.cat([getattr(self, field.name).reshape(-1).to(torch.float64) for field in fields(self)])

    @classmethod
    def from_vector(cls, vector: Tensor, block_size: int) -> "MetricSums":
        """Undo :meth:`to_vector`."""
        counts = vector[: 3 * block_size].round().to(torch.int64).view(3, block_size)
        losses = vector[3 * block_size :]
        return cls(counts[0], counts[1], counts[2], losses[0], losses[1], losses[2:])

    def finalize(self, loss: LossConfig) -> Metrics:
        """Divide once, at the end.

        Args:
          loss: The loss that the sums were made with.
        """
        correct, total, streaks = self.correct.tolist(), self.total.tolist(), self.streaks.tolist()
        num_slots, num_blocks = sum(total), sum(streaks)
        divisor = float(effective_denominator(self.denominator, loss)) if num_slots else 0
        accuracy_by_slot = tuple(_ratio(c, t) for c, t in zip(correct[1:], total[1:], strict=True))
        streak = _ratio(sum(length * count for length, count in enumerate(streaks)), num_blocks)
        return Metrics(
            loss=_ratio(float(self.numerator), divisor),
            terms={
                name: _ratio(value, divisor)
                for name, value in zip(loss.terms, self.term_numerators.tolist(), strict=True)
            },
            accuracy=_ratio(sum(correct), num_slots),
            accuracy_by_slot=accuracy_by_slot,
            streak=streak,
            streak_share=tuple(_ratio(count, num_blocks) for count in streaks),
            eal=None if streak is None else streak + 1,
            eal_marginal=_marginal_length(accuracy_by_slot) if num_slots else None,
            num_blocks=num_blocks,
            num_slots=num_slots,
        )


def block_streaks(correct_AK: Tensor, supervised_AK: Tensor) -> Tensor:
    """Count the leading correct slots of each block among its supervised ones; int64 [A].

    Unsupervised slots are passed over: behind a hole in the loss mask the count goes on, as in SpecForge and Automodel.
    """
    unbroken_AK = (correct_AK | ~supervised_AK).to(torch.int64).cumprod(dim=1)
    return (unbroken_AK * supervised_AK).sum(1)


def score_blocks(
    correct_AK: Tensor,
    supervised_AK: Tensor,
    *,
    numerator: Tensor,
    denominator: Tensor,
    term_numerators: Tensor,
) -> MetricSums:
    """Sum up what became of some blocks.

    Args:
      correct_AK: Slots whose argmax is the label; bool; ignored where unsupervised.
      supervised_AK: Slots with a label; bool, False in slot 0.
      numerator, denominator, term_numerators: Of the loss over the same slots.
    """
    counted_A = supervised_AK.any(1)
    streak_A = block_streaks(correct_AK, supervised_AK)
    return MetricSums(
        correct=(correct_AK & supervised_AK).sum(0),
        total=supervised_AK.sum(0),
        streaks=torch.bincount(streak_A[counted_A], minlength=supervised_AK.shape[1]),
        numerator=numerator.detach().to(torch.float64),
        denominator=denominator.detach().to(torch.float64),
        term_numerators=term_numerators.detach().to(torch.float64),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _marginal_length(accuracy_by_slot: tuple[float | None, ...]) -> float:
    length, chance = 0.0, 1.0
    for accuracy in accuracy_by_slot:
        if accuracy is None:
            break
        chance *= accuracy
        length += chance
    return length
