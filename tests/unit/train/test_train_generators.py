"""Named sources of chance."""

import pytest
import torch

from dflash_cache.errors import CheckpointError
from dflash_cache.train.generators import Generators

CPU = torch.device("cpu")


def draws(generators):
    return [torch.rand(4, generator=getattr(generators, name)).tolist() for name in ("weights", "anchors", "noise")]


def test_streams_differ_from_each_other_and_by_seed_and_repeat():
    first, again, other = (draws(Generators.from_seed(seed, CPU)) for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(draw) for draw in first + other}) == 6


def test_restored_streams_go_on_where_they_were():
    generators = Generators.from_seed(3, CPU)
    draws(generators)
    states = generators.state_tensors()
    expected = draws(generators)
    restored = Generators.from_seed(99, CPU)
    restored.restore(states)
    assert draws(restored) == expected


def test_missing_or_foreign_states_are_refused():
    generators = Generators.from_seed(0, CPU)
    states = generators.state_tensors()
    with pytest.raises(CheckpointError, match=r"has generators \['anchors', 'noise'\]"):
        generators.restore({name: states[name] for name in ("anchors", "noise")})
    with pytest.raises(CheckpointError, match="'noise' does not fit this device"):
        generators.restore({**states, "noise": states["noise"][:16]})  # a CUDA state has 16 bytes
