"""How far stored states are from the target's own, and how much of it rounding explains.

Experts make this delicate. A router takes the best few of many; where two are almost equally good, another order of
summation takes the other one, and from there on that token has another, equally valid, state. Such a row may be as far
from the target's own as half its size and more, but it is still that token's: it deviates from the document's mean the
way the target's own row does. Rows that were swapped or shifted do not.

Shapes: n tokens of a document, m of them, a rows astray, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_cache.extract.loading import LoadedTarget

__all__ = ["PlaneDifference", "Tolerance", "compare_plane", "nearer_layer", "tolerance_for"]

# Cosine of a stored row's and its own row's deviation from the mean; about 0 when they are of different tokens.
_RECOGNISED = 0.4


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains.

    Attributes:
      plane: Of a whole plane.
      row: Of a row; beyond it the row is astray.
      astray: Share of a document's rows that may be astray, if each is recognised; if any may, one always may.
    """

    plane: float
    row: float
    astray: float


# float32: both sides round to bfloat16, so few numbers differ, by one step. bfloat16: attention over padding sums in
# another order, and the differences grow through the layers (up to 0.2 was seen on single rows).
_DENSE = {torch.float32: Tolerance(0.01, 0.05, 0.0), torch.bfloat16: Tolerance(0.1, 0.5, 0.0)}
# Where every layer of a small target was disturbed by one rounding, up to 4% of the rows went beyond 0.5. Even in
# float32 a router now and then decides by the last bit.
_EXPERTS = {torch.float32: Tolerance(0.01, 0.05, 0.01), torch.bfloat16: Tolerance(0.1, 0.5, 0.1)}


def tolerance_for(target: LoadedTarget) -> Tolerance:
    """Choose by the number format in which the target runs, and whether it has experts."""
    return (_EXPERTS if _has_experts(target) else _DENSE)[target.compute_dtype]


def _has_experts(target: LoadedTarget) -> bool:
    """Whether a router chooses parts of the target: the config then counts experts, under one of several names."""
    config = getattr(target.decoder, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return False
    counts = [value for field, value in config.to_dict().items() if "expert" in field]
    return any(isinstance(count, int) and count > 1 for count in counts)


@dataclass(frozen=True)
class PlaneDifference:
    """What comparing a stored plane with the target's own gave.

    Attributes:
      error: Median over channels of (RMS error / RMS value): a few channels hold most of the energy, and a plain norm
        would look at nothing else. With experts the median row's error.
      row_error: The worst row's median over channels of |error| / RMS value.
      astray: [a] int64; rows beyond the tolerance.
      unrecognised: Those of them that do not look like their token's row; all of them when there are too many.
    """

    error: float
    row_error: float
    astray: Tensor
    unrecognised: int

    def within(self, tolerance: Tolerance) -> bool:
        """Whether rounding explains it."""
        return self.unrecognised == 0 and self.error <= tolerance.plane


def compare_plane(stored_nH: Tensor, own_nH: Tensor, tolerance: Tolerance) -> PlaneDifference:
    """Compare the stored rows of one document and one plane with the target's own, both float32."""
    rms_H = own_nH.pow(2).mean(dim=0).sqrt().clamp_min(1e-30)
    error_nH = stored_nH - own_nH
    row_n = (error_nH.abs() / rms_H).median(dim=-1).values
    astray = (row_n > tolerance.row).nonzero().flatten()
    allowed = max(1, int(tolerance.astray * len(own_nH))) if tolerance.astray else 0
    if len(astray) > allowed:
        unrecognised = len(astray)
    else:
        unrecognised = sum(not _is_own_row(stored_nH[row], own_nH, int(row)) for row in astray)
    # With experts the typical row counts, which the few that went another way do not move.
    error = row_n.median() if tolerance.astray else (error_nH.pow(2).mean(dim=0).sqrt() / rms_H).median()
    return PlaneDifference(float(error), float(row_n.max()), astray, unrecognised)


def _is_own_row(stored_H: Tensor, own_nH: Tensor, row: int) -> bool:
    """Tell whether a stored row deviates from the document's mean the way the target's own row does."""
    mean_H = own_nH.mean(dim=0)
    spread_H = (own_nH - mean_H).pow(2).mean(dim=0).sqrt().clamp_min(1e-30)
    # Clamped: in a channel that varies by outliers alone, one number would decide.
    stored_H, own_H = (((x_H - mean_H) / spread_H).clamp(-3, 3) for x_H in (stored_H, own_nH[row]))
    return bool(torch.cosine_similarity(stored_H, own_H, dim=0) > _RECOGNISED)


def nearer_layer(stored_mH: Tensor, own_mH: Tensor, neighbours: Mapping[int, Tensor]) -> int | None:
    """Find a neighbouring layer whose output the stored rows resemble more than that of their own layer.

    In a deep target one layer adds little, so a plane captured one layer off can be within the tolerance.

    Args:
      stored_mH: Some rows, float32.
      own_mH: The target's own, of the layer that they should be of.
      neighbours: The same rows of other layers [m, H], by layer.

    Returns:
      The layer; None when there is none.
    """
    rms_H = own_mH.pow(2).mean(dim=0).sqrt().clamp_min(1e-30)

    def distance(other_mH: Tensor) -> float:
        return float(((stored_mH - other_mH).abs() / rms_H).mean(dim=-1).median())

    best, own = None, distance(own_mH)
    for layer, rows_mH in neighbours.items():
        if (found := distance(rows_mH)) < own:
            best, own = layer, found
    return best
