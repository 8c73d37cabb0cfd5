"""Noise: bounds, shape of the distribution, repeatability (dflash.md section 6, trap 20)."""

import pytest
import torch

from dflash_cache.train.noise import add_feature_noise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_is_uniform_within_its_half_width():
    noise = add_feature_noise(torch.zeros(200, 5, 64), half_width=0.05, generator=generator())
    assert noise.min() >= -0.05 and noise.max() < 0.05
    assert noise.min() < -0.0499 and noise.max() > 0.0499
    assert abs(noise.mean()) < 1e-3
    assert noise.std() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    quarters = torch.histc(noise, bins=4, min=-0.05, max=0.05) / noise.numel()
    assert (quarters - 0.25).abs().max() < 0.01


def test_upper_bound_is_open_in_float32():
    class Largest(torch.overrides.TorchFunctionMode):
        """Makes every draw the largest that torch.rand can return."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.rand:
                return torch.full(args[0], 1 - 2**-24)
            return func(*args, **(kwargs or {}))

    for half_width in (0.05, 0.1, 0.03, 1.0, 0.7):
        with Largest():
            noise = add_feature_noise(torch.zeros(1, 1, 1), half_width=half_width, generator=generator())
        assert float(noise) < torch.tensor(half_width)


def test_sum_is_taken_in_float32_and_returned_in_the_stored_dtype():
    features = torch.randn(20, 3, 32, generator=generator(1)).to(torch.bfloat16)
    exact = add_feature_noise(features.float(), half_width=0.05, generator=generator(2))
    rounded = add_feature_noise(features, half_width=0.05, generator=generator(2))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_input_is_not_changed_and_zero_returns_it():
    features = torch.randn(4, 2, 8, generator=generator()).to(torch.bfloat16)
    before = features.clone()
    assert not torch.equal(add_feature_noise(features, half_width=0.5, generator=generator()), before)
    assert torch.equal(features, before)
    assert add_feature_noise(features, half_width=0.0, generator=generator()) is features


def test_generator_alone_decides():
    features = torch.zeros(4, 2, 8)
    first = generator()
    draws = [add_feature_noise(features, half_width=1.0, generator=first) for _ in range(2)]
    torch.manual_seed(99)
    assert torch.equal(draws[0], add_feature_noise(features, half_width=1.0, generator=generator()))
    assert not torch.equal(draws[0], draws[1])


def test_negative_half_width_is_refused():
    with pytest.raises(ValueError, match="half_width must not be negative"):
        add_feature_noise(torch.zeros(1, 1, 1), half_width=-0.1, generator=generator())
