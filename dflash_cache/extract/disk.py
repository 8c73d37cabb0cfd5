"""How large a cache will be, and whether that much room is left."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from dflash_cache.config import Codec
from dflash_cache.errors import DiskSpaceError
from dflash_cache.spec import FeatureSpec

__all__ = ["STORED_SHARE", "SizeEstimate", "check_disk_space", "estimate_size", "format_bytes"]

# Measured 0.70 to 0.72 on real activations (docs/format.md); the rest is caution.
STORED_SHARE: dict[Codec, float] = {"compact": 0.8, "fast": 1.0}
_SCALAR_BYTES = 4 + 4 + 1  # input_ids, positions, loss_mask


@dataclass(frozen=True)
class SizeEstimate:
    """Bytes of what is still to be written.

    Attributes:
      raw_bytes: Hidden states, uncompressed.
      expected_bytes: What the files will need, estimated with caution.
    """

    raw_bytes: int
    expected_bytes: int


def estimate_size(
    num_tokens: int, features: FeatureSpec, codec: Codec, *, vocab_size: int, bytes_per_weight: int
) -> SizeEstimate:
    """Estimate what will be written for some tokens, with the target's head.

    Args:
      num_tokens: Tokens that are not sealed yet.
      features: What is stored of each.
      codec: How.
      vocab_size: Rows of embedding and lm_head; 0 when the head is there already.
      bytes_per_weight: Of the head's numbers.
    """
    raw = num_tokens * features.bytes_per_token
    head = 2 * vocab_size * features.hidden_size * bytes_per_weight
    return SizeEstimate(raw, int(raw * STORED_SHARE[codec]) + num_tokens * _SCALAR_BYTES + head)


def check_disk_space(folder: Path, estimate: SizeEstimate, *, freed_bytes: int = 0) -> None:
    """Refuse to begin what will not fit.

    Args:
      folder: The cache's folder.
      estimate: What is still to be written.
      freed_bytes: What this run deletes first.

    Raises:
      DiskSpaceError: Naming what is needed and what is free.
    """
    free = shutil.disk_usage(folder).free + freed_bytes
    if estimate.expected_bytes > free:
        raise DiskSpaceError(
            f"{folder}: about {format_bytes(estimate.expected_bytes)} are needed for what is still missing "
            f"({format_bytes(estimate.raw_bytes)} of raw hidden states), and {format_bytes(free)} are free; make room, "
            "choose another --out, or use fewer documents or a smaller --max-length"
        )


def format_bytes(count: int) -> str:
    """Write a number of bytes in decimal units, as disks are sold."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
