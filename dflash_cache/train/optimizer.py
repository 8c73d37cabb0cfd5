"""AdamW over float32 weights: what is decayed, how gradients are scaled and clipped, and its state by weight name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from dflash_cache.config import OptimizerConfig
from dflash_cache.errors import CheckpointError

__all__ = [
    "MOMENTS",
    "build_optimizer",
    "clip_gradients",
    "divide_gradients",
    "optimizer_tensors",
    "restore_optimizer",
    "set_learning_rate",
]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(drafter: nn.Module, config: OptimizerConfig) -> AdamW:
    """Build AdamW over the drafter's own weights; matrices are decayed, gains are not.

    The weights are float32 and stay so: under autocast they are the master weights of the bfloat16 that the layers use.
    """
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    gains = [parameter for parameter in parameters if parameter.ndim < 2]
    return AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def divide_gradients(optimizer: AdamW, divisor: Tensor) -> None:
    """Divide every gradient by a scalar, in place."""
    for gradient in _gradients(optimizer):
        gradient.div_(divisor)


def clip_gradients(optimizer: AdamW, max_norm: float) -> Tensor:
    """Scale gradients down to a total norm; returns the norm before, a scalar that may not be finite."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def optimizer_tensors(drafter: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return the optimizer's state as ``<moment>.<weight>``, in float32; empty before the first step."""
    tensors = {}
    for name, parameter in drafter.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value
    return tensors


def restore_optimizer(drafter: nn.Module, optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Undo :func:`optimizer_tensors`.

    Raises:
      CheckpointError: Naming what is missing, unexpected, or of another shape.
    """
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    expected = {f"{moment}.{name}" for moment in MOMENTS for name in shapes} if tensors else set()
    if set(tensors) != expected:
        missing, unexpected = sorted(expected - set(tensors))[:3], sorted(set(tensors) - expected)[:3]
        raise CheckpointError(f"the checkpoint's optimizer state lacks {missing} and has unexpected {unexpected}")
    for name, parameter in drafter.named_parameters() if tensors else ():
        state = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
        for moment in MOMENTS[1:]:
            if state[moment].shape != parameter.shape:
                raise CheckpointError(
                    f"{moment}.{name} is {list(state[moment].shape)}, the drafter has {list(parameter.shape)}"
                )
        # Adam counts steps on the CPU; the moments lie with their weight.
        optimizer.state[parameter] = {
            "step": state["step"],
            "exp_avg": state["exp_avg"].to(parameter.device),
            "exp_avg_sq": state["exp_avg_sq"].to(parameter.device),
        }


def _gradients(optimizer: AdamW) -> list[Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
