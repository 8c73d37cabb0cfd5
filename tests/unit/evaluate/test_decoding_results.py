"""Figures of decoding: with and without the bonus token, never under one name."""

import pytest

from dflash_cache.evaluate.results import (
    Comparison,
    GreedyResult,
    SpeculativeResult,
    compare_with_greedy,
    summarize,
)


def speculative(tokens: tuple[int, ...], accepted: tuple[int, ...] = (), seconds: float = 1.0) -> SpeculativeResult:
    return SpeculativeResult(tokens, accepted, block_size=4, target_passes=1 + len(accepted), seconds=seconds)


def greedy(tokens: tuple[int, ...], seconds: float = 1.0) -> GreedyResult:
    margins = tuple(0.5 + index for index in range(len(tokens)))
    return GreedyResult(tokens, margins, target_passes=len(tokens), seconds=seconds)


def test_equal_outputs() -> None:
    assert compare_with_greedy(speculative((1, 2, 3)), greedy((1, 2, 3))) == Comparison(equal=True)


def test_first_difference_and_its_margin() -> None:
    found = compare_with_greedy(speculative((1, 2, 9, 4)), greedy((1, 2, 3, 4)))
    assert found == Comparison(equal=False, position=2, speculative_token=9, greedy_token=3, margin=2.5)


def test_one_output_ends_early() -> None:
    short = compare_with_greedy(speculative((1, 2)), greedy((1, 2, 3)))
    assert short == Comparison(equal=False, position=2, speculative_token=None, greedy_token=3, margin=2.5)
    long = compare_with_greedy(speculative((1, 2, 3)), greedy((1, 2)))
    assert long == Comparison(equal=False, position=2, speculative_token=3, greedy_token=None, margin=None)


def test_acceptance_length_has_the_bonus_token() -> None:
    # Trap 28.
    result = speculative((1,) * 8, accepted=(3, 0, 1))
    assert result.num_accepted == (3, 0, 1)
    assert result.acceptance_length == pytest.approx(4 / 3 + 1)


def test_rounds_weigh_the_same_over_prompts() -> None:
    # Runs of 3, 2, 1, 0 over two prompts: 1.5 and the bonus token, not a mean of means or of products (trap 23).
    figures = summarize(
        [speculative((1,) * 5, (3,), seconds=1.0), speculative((1,) * 7, (2, 1, 0), seconds=1.0)],
        [greedy((1,) * 5, seconds=2.0), greedy((1,) * 7, seconds=3.0)],
    )
    assert figures.acceptance_length == 2.5
    assert figures.accepted_share == (0.75, 0.5, 0.25)
    assert (figures.num_prompts, figures.num_rounds, figures.num_tokens) == (2, 4, 12)
    assert figures.tokens_per_pass == 12 / 6
    assert figures.speedup == 2.5


def test_no_rounds_at_all() -> None:
    figures = summarize([speculative((1,))], [greedy((1,))])
    assert figures.acceptance_length is None
    assert figures.accepted_share == ()
