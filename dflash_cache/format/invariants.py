"""What must hold of stored numbers, whoever wrote them: every row finite and not all zero, positions restarting."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["bfloat16_to_float32", "expected_positions", "float32_to_bfloat16", "nonfinite_rows", "zero_rows"]

_EXPONENT = np.uint16(0x7F80)
_MAGNITUDE = np.uint16(0x7FFF)

Bits = npt.NDArray[np.uint16]


def nonfinite_rows(bits: Bits) -> npt.NDArray[np.bool_]:
    """Find rows with a NaN or an infinity.

    Args:
      bits: [..., H] bfloat16 as uint16.

    Returns:
      [...] bool.
    """
    return np.asarray(((bits & _EXPONENT) == _EXPONENT).any(axis=-1))


def zero_rows(bits: Bits) -> npt.NDArray[np.bool_]:
    """Find rows in which every number is zero of either sign: the mark of states that were never written.

    Args:
      bits: [..., H] bfloat16 as uint16.

    Returns:
      [...] bool.
    """
    return ~np.asarray(((bits & _MAGNITUDE) != 0).any(axis=-1))


def expected_positions(doc_lengths: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the positions of documents laid end to end: 0, 1, ... restarting in each."""
    lengths = doc_lengths.astype(np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.arange(int(lengths.sum())) - starts).astype(np.int32)


def bfloat16_to_float32(bits: Bits) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to bfloat16, ties to even; NaN stays NaN (quiet), an overflow becomes infinite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
