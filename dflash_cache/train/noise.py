"""The one augmentation: noise on the fc features.

Shape letters: T packed tokens, L fc layers, H hidden size.
"""

import torch
from torch import Tensor

__all__ = ["add_feature_noise"]


def add_feature_noise(fc_features_TLH: Tensor, *, half_width: float, generator: torch.Generator) -> Tensor:
    """Add uniform noise to the fc features, and to nothing else.

    Args:
      fc_features_TLH: Cached target states; bfloat16.
      half_width: Noise lies in [-half_width, half_width), in units of the hidden states; 0 returns the input unchanged.
      generator: Randomness on the same device, so that a resumed run repeats.

    Returns:
      A new tensor of the same shape and dtype; the sum is taken in float32.

    Raises:
      ValueError: If half_width is negative.
    """
    if half_width < 0:
        raise ValueError(f"half_width must not be negative, got {half_width}")
    if half_width == 0:
        return fc_features_TLH
    noise_TLH = torch.rand(
        fc_features_TLH.shape, generator=generator, device=fc_features_TLH.device, dtype=torch.float32
    )
    # In this order the upper bound stays open in float32: (2r - 1) is exact and at most 1 - 2^-23.
    noise_TLH.mul_(2.0).sub_(1.0).mul_(half_width).add_(fc_features_TLH)
    return noise_TLH.to(fc_features_TLH.dtype)
