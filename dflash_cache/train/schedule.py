"""The learning rate as a pure function of the step."""

import math

from dflash_cache.config import OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rise linearly from 0, then fall along a half cosine towards ``min_lr_ratio`` of the peak.

    The rise takes round(warmup_ratio * total_steps) steps, the last of which has the peak rate. The fall ends where
    the step after the last would be, so no step is spent at a rate of exactly 0.

    Args:
      step: The optimizer step about to be taken, 0-based.
      total_steps: Of the whole run.
      config: Peak, warmup and floor.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step must be in [0, {total_steps}), got {step}")
    warmup_steps = round(config.warmup_ratio * total_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
