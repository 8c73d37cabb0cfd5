"""Group documents of like length under a token budget. Pure: numbers in, numbers out."""

import numpy as np
import numpy.typing as npt

__all__ = ["length_batches"]


def length_batches(lengths: npt.NDArray[np.int64], batch_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Cut documents into batches whose right-padded size stays within a budget, longest documents first.

    Documents of equal length keep their order, so the result depends on nothing but the arguments. The longest comes
    first so that a batch too large for the device's memory fails at once.

    Args:
      lengths: Tokens of each document [D], each at least 1.
      batch_tokens: Most tokens of a batch, padding included; a single document longer than that is a batch alone.

    Returns:
      Batches of indices into ``lengths`` (int64); each index is in exactly one.

    Raises:
      ValueError: If batch_tokens or a length is below 1.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has {int(lengths.min())} tokens, expected at least 1")
    order = np.argsort(-lengths, kind="stable").astype(np.int64, copy=False)
    batches = []
    start = 0
    while start < len(order):
        # Sorted from the longest, so the first document of a batch sets its padded width.
        count = max(1, batch_tokens // int(lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches
