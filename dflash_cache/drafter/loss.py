"""Losses of single slots, their weights and their denominators (dflash.md section 5).

A loss is kept as numerator and denominator, so that sums over micro-batches and ranks are exact: add both up, then
divide once by :func:`effective_denominator`. Shape letters: R supervised slots, V vocabulary, A anchors, K slots.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_cache.config import LossConfig

__all__ = ["cross_entropy", "effective_denominator", "forward_kl", "loss_denominator", "slot_weights", "term_losses"]

_MASK_DENOMINATOR_EPS = 1e-5


def slot_weights(block_size: int, gamma: float | None, *, device: torch.device | str = "cpu") -> Tensor:
    """Weight of each slot: exp(-(slot - 1) / gamma), so 1 for the first drafted slot, and 0 for the anchor's.

    Args:
      block_size: K.
      gamma: Decay length in slots; None gives all drafted slots weight 1.
      device: Where the result lies.

    Returns:
      Float32 [K].
    """
    slot_K = torch.arange(block_size, dtype=torch.float32, device=device)
    weight_K = torch.ones_like(slot_K) if gamma is None else torch.exp(-(slot_K - 1) / gamma)
    weight_K[0] = 0.0
    return weight_K


def cross_entropy(logits_RV: Tensor, label_ids_R: Tensor) -> Tensor:
    """Hard cross-entropy of each row, in at least float32; [R]."""
    return functional.cross_entropy(_precise(logits_RV), label_ids_R, reduction="none")


def forward_kl(logits_RV: Tensor, target_logits_RV: Tensor, temperature: float) -> Tensor:
    """KL(target || drafter) of each row, in at least float32; [R].

    Both logits are divided by the temperature and the result is multiplied by its square, which keeps the size of the
    gradient, and so the meaning of a mixture's weights, independent of it (Hinton et al. 2015, section 2).
    """
    target_log_probs = functional.log_softmax(_precise(target_logits_RV) / temperature, dim=-1)
    log_probs = functional.log_softmax(_precise(logits_RV) / temperature, dim=-1)
    divergence_R = functional.kl_div(log_probs, target_log_probs, reduction="none", log_target=True).sum(-1)
    return divergence_R * temperature**2


def term_losses(
    loss: LossConfig, logits_RV: Tensor, label_ids_R: Tensor, target_logits_RV: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute each term of a loss for each row, unweighted, in the order of ``loss.terms``.

    Args:
      loss: Which terms.
      logits_RV: The drafter's.
      label_ids_R: Id that each slot should predict.
      target_logits_RV: The target's; may be None if there is no ``kl_div`` term.
    """
    losses = []
    for term in loss.terms:
        if term == "ce":
            losses.append(cross_entropy(logits_RV, label_ids_R))
        else:
            assert target_logits_RV is not None
            losses.append(forward_kl(logits_RV, target_logits_RV, loss.temperature))
    return tuple(losses)


def loss_denominator(supervised_AK: Tensor, loss: LossConfig) -> Tensor:
    """Count supervised slots, or sum their weights; a float64 scalar to be added up over micro-batches and ranks.

    It depends on anchors and masks only, so it is known before any forward pass.
    """
    if loss.denominator == "mask":
        return supervised_AK.sum().to(torch.float64)
    weight_K = slot_weights(supervised_AK.shape[1], loss.gamma, device=supervised_AK.device)
    return (supervised_AK * weight_K.to(torch.float64)).sum()


def effective_denominator(denominator: Tensor, loss: LossConfig) -> Tensor:
    """What the sum of numerators is divided by, given the sum of denominators over everything in the step.

    speculators adds 1e-5 to the number of slots. A sum of weights is taken as it is; when nothing at all is supervised
    the numerator is 0 and so is the loss.
    """
    if loss.denominator == "mask":
        return denominator + _MASK_DENOMINATOR_EPS
    return denominator.clamp(min=torch.finfo(torch.float32).tiny)


def _precise(logits: Tensor) -> Tensor:
    """At least float32: log-sum-exp over a quarter of a million bfloat16 logits loses the gradient near convergence."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
