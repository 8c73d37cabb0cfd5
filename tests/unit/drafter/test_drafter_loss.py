"""Losses of single slots, weights, denominators."""

import math

import pytest
import torch
from torch import Tensor

from dflash_cache.config import LossConfig
from dflash_cache.drafter.loss import (
    cross_entropy,
    effective_denominator,
    forward_kl,
    loss_denominator,
    slot_weights,
    term_losses,
)


def random_logits(rows: int, vocabulary: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def test_decay_starts_at_the_first_drafted_slot() -> None:
    weights = slot_weights(8, 4.0)
    assert weights[0] == 0
    assert weights[1] == 1
    assert weights.tolist()[2:] == pytest.approx([math.exp(-(slot - 1) / 4) for slot in range(2, 8)])
    assert slot_weights(4, None).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("block_size", "gamma", "ratio"), [(8, 4.0, 0.5336), (16, 7.0, 0.4420)])
def test_the_two_denominators_differ_by_the_mean_weight(block_size: int, gamma: float, ratio: float) -> None:
    supervised = torch.ones(5, block_size, dtype=torch.bool)
    supervised[:, 0] = False
    counted = loss_denominator(supervised, LossConfig(gamma=gamma, denominator="mask"))
    weighted = loss_denominator(supervised, LossConfig(gamma=gamma, denominator="mask_weight"))
    assert float(counted) == 5 * (block_size - 1)
    assert float(weighted / counted) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize("denominator", ["mask", "mask_weight"])
def test_nothing_supervised_is_a_loss_of_zero_not_nan(denominator: str) -> None:
    loss = LossConfig(denominator=denominator)
    total = effective_denominator(loss_denominator(torch.zeros(3, 4, dtype=torch.bool), loss), loss)
    assert float(torch.zeros(()) / total) == 0.0


def test_only_the_count_of_slots_has_an_epsilon() -> None:
    ten = torch.tensor(10.0, dtype=torch.float64)
    assert float(effective_denominator(ten, LossConfig(denominator="mask"))) == pytest.approx(10 + 1e-5, rel=1e-12)
    assert float(effective_denominator(ten, LossConfig(denominator="mask_weight"))) == 10.0


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    assert cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(math.log(1 + 2 * math.exp(-2)), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_forward_kl_by_hand(temperature: float) -> None:
    logits, target = random_logits(4, 7), random_logits(4, 7, seed=1)
    p, q = (target / temperature).softmax(-1), (logits / temperature).softmax(-1)
    expected = temperature**2 * (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(forward_kl(logits, target, temperature), expected)
    assert forward_kl(target, target, temperature).abs().max() < 1e-12


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    """For small differences the gradient is that of a squared distance, whatever the temperature."""
    sizes = []
    for temperature in (50.0, 100.0):
        logits = random_logits(1, 7, scale=0.5).requires_grad_()
        (gradient,) = torch.autograd.grad(
            forward_kl(logits, logits.detach() + random_logits(1, 7, seed=1), temperature).sum(), logits
        )
        sizes.append(gradient.norm().item())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_terms_keep_their_order_and_temperature_touches_kl_only() -> None:
    logits, target = random_logits(3, 7), random_logits(3, 7, seed=1)
    labels = target.argmax(-1)
    loss = LossConfig(terms={"kl_div": 0.7, "ce": 0.3}, temperature=2.0)
    kl, ce = term_losses(loss, logits, labels, target)
    torch.testing.assert_close(kl, forward_kl(logits, target, 2.0))
    torch.testing.assert_close(ce, cross_entropy(logits, labels))


@pytest.mark.parametrize("term", ["ce", "kl_div"])
def test_bfloat16_logits_keep_the_gradient_near_convergence(term: str) -> None:
    """Reductions in bfloat16 lost up to a third of the gradient here (speculators 788)."""
    target = random_logits(16, 4000).to(torch.bfloat16)
    rounded = (target.double() + random_logits(16, 4000, seed=1, scale=0.1)).to(torch.bfloat16)
    labels = target.argmax(-1)
    loss = LossConfig(terms={term: 1.0})
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        logits = rounded.to(dtype).requires_grad_()
        (values,) = term_losses(loss, logits, labels, target.to(dtype))
        assert values.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
        gradients.append(torch.autograd.grad(values.sum(), logits)[0].double())
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error.item() < 0.005
