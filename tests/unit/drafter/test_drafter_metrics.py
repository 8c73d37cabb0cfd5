"""Figures that add up."""

import pytest
import torch
from torch import Tensor

from dflash_cache.config import LossConfig
from dflash_cache.drafter.metrics import MetricSums, block_streaks, score_blocks

LOSS = LossConfig(terms={"kl_div": 0.7, "ce": 0.3})


def blocks(*rows: str) -> tuple[Tensor, Tensor]:
    """Slots 1.. of each block: ``+`` correct, ``x`` wrong, ``.`` unsupervised."""
    correct = torch.tensor([[False] + [slot == "+" for slot in row] for row in rows])
    supervised = torch.tensor([[False] + [slot != "." for slot in row] for row in rows])
    return correct, supervised


def sums(*rows: str) -> MetricSums:
    correct, supervised = blocks(*rows)
    return score_blocks(
        correct,
        supervised,
        numerator=torch.tensor(2.0),
        denominator=supervised.sum().double(),
        term_numerators=torch.tensor([1.0, 3.0]),
    )


def test_runs_of_3_2_1_0_are_accepted_for_one_and_a_half() -> None:
    """Products of accuracies pooled over blocks or batches give 1.25 or 1.219 here."""
    whole = sums("+++", "++x", "+xx", "xxx")
    metrics = whole.finalize(LOSS)
    assert metrics.streak == 1.5
    assert metrics.eal == 2.5
    assert metrics.streak_share == (0.25, 0.25, 0.25, 0.25)
    assert metrics.eal_marginal == pytest.approx(0.75 + 0.75 * 0.5 + 0.75 * 0.5 * 0.25)
    split = sums("+++", "+xx") + sums("++x", "xxx")
    assert split.finalize(LOSS).eal == 2.5
    assert torch.equal(split.streaks, whole.streaks)


def test_accuracy_is_per_slot_and_over_all_slots() -> None:
    metrics = sums("+x.", "x+.", "++.").finalize(LOSS)
    assert metrics.accuracy_by_slot == (2 / 3, 2 / 3, None)
    assert metrics.accuracy == 4 / 6
    assert (metrics.num_blocks, metrics.num_slots) == (3, 6)


@pytest.mark.parametrize(
    ("block", "streak"), [("...", 0), ("+..+", 2), ("..+x+", 1), ("x++", 0), ("+.x+", 1), ("+++", 3), ("...+", 1)]
)
def test_a_streak_passes_over_holes_and_ends_at_the_first_mistake(block: str, streak: int) -> None:
    assert block_streaks(*blocks(block)).tolist() == [streak]


def test_correct_slots_without_a_label_do_not_count() -> None:
    correct, supervised = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[False, True, False, False]])
    assert block_streaks(correct, supervised).tolist() == [1]
    scored = score_blocks(
        correct, supervised, numerator=torch.zeros(()), denominator=torch.ones(()), term_numerators=torch.zeros(1)
    )
    assert scored.correct.tolist() == [0, 1, 0, 0]


def test_blocks_without_a_label_do_not_count() -> None:
    metrics = sums("+x", "..").finalize(LOSS)
    assert (metrics.num_blocks, metrics.eal) == (1, 2.0)


def test_loss_and_terms_are_divided_once_at_the_end() -> None:
    joined = sums("+x", "+x") + sums("+.", "..")
    metrics = joined.finalize(LOSS)
    assert metrics.loss == pytest.approx(4.0 / (5 + 1e-5), rel=1e-12)
    assert metrics.terms == {"kl_div": pytest.approx(2 / (5 + 1e-5)), "ce": pytest.approx(6 / (5 + 1e-5))}


def test_nothing_supervised_has_no_figures() -> None:
    metrics = sums("..", "..").finalize(LOSS)
    assert (metrics.loss, metrics.accuracy, metrics.streak, metrics.eal, metrics.eal_marginal) == (None,) * 5
    assert metrics.accuracy_by_slot == (None, None)
    assert (metrics.num_blocks, metrics.num_slots) == (0, 0)


def test_a_vector_carries_all_sums() -> None:
    original = sums("+++", "+x.", "..x")
    vector = original.to_vector()
    assert vector.dtype == torch.float64
    copy = MetricSums.from_vector(vector, block_size=4)
    assert all(torch.equal(value, getattr(copy, name)) for name, value in vars(original).items())
    doubled = MetricSums.from_vector(2 * vector, block_size=4)
    assert doubled.finalize(LOSS) == (original + original).finalize(LOSS)
