"""The learning rate over a run."""

import itertools
import math

import pytest

from dflash_cache.config import OptimizerConfig
from dflash_cache.train.schedule import learning_rate


def rates(total, **settings):
    config = OptimizerConfig(lr=1.0, **settings)
    return [learning_rate(step, total, config) for step in range(total)]


def test_rises_linearly_to_the_peak_then_falls():
    values = rates(100, warmup_ratio=0.1)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[9] == values[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(values[10:]))


def test_fall_is_a_half_cosine():
    values = rates(100, warmup_ratio=0.0)
    assert values == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 100)) for step in range(100)])
    assert values[50] == pytest.approx(0.5)


def test_floor_is_approached_and_no_step_is_wasted():
    assert rates(1000, warmup_ratio=0.04, min_lr_ratio=0.1)[-1] == pytest.approx(0.1, abs=1e-4)
    assert min(rates(50, warmup_ratio=0.04)) > 0
    assert rates(1, warmup_ratio=0.04) == [1.0]


def test_steps_outside_the_run_are_refused():
    with pytest.raises(ValueError, match=r"step must be in \[0, 10\)"):
        learning_rate(10, 10, OptimizerConfig())
