"""Bring captured rows to the host while the target goes on, and notice rows that cannot be right.

Shapes: R rows of a batch, P planes, H hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["HostRows", "PendingRows", "RowTransfer"]


@dataclass(frozen=True)
class HostRows:
    """Captured rows on the host.

    Attributes:
      rows: [R, P, H] bfloat16 as uint16.
      finite: [R, P] bool; whether every number of the row is finite.
      nonzero: [R, P] bool; whether any number of the row differs from zero.
    """

    rows: npt.NDArray[np.uint16]
    finite: npt.NDArray[np.bool_]
    nonzero: npt.NDArray[np.bool_]


class PendingRows(Protocol):
    """Rows on their way."""

    def wait(self) -> HostRows:
        """Wait until they are there. What is returned is valid until the second next submission."""


class RowTransfer:
    """Copies batches of rows off the device, in order.

    On a GPU the copy runs on a stream of its own into one of two pinned buffers, while the default stream goes on with
    the next batch.
    """

    def __init__(self, device: torch.device, max_rows: int, row_shape: tuple[int, int]) -> None:
        """Prepare buffers.

        Args:
          device: Where the rows come from.
          max_rows: Most rows of a batch.
          row_shape: (P, H).
        """
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            shape = (max_rows, *row_shape)
            self._pinned = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
            flags = (max_rows, 2, row_shape[0])
            self._pinned_flags = [torch.empty(flags, dtype=torch.bool, pin_memory=True) for _ in range(2)]

    @torch.inference_mode()
    def submit(self, rows_RPH: Tensor) -> PendingRows:
        """Start to copy rows.

        Args:
          rows_RPH: bfloat16 on the device; not used again by the caller.
        """
        finite_RP = torch.isfinite(rows_RPH).all(dim=-1)
        nonzero_RP = (rows_RPH != 0).any(dim=-1)
        if self._device.type != "cuda":
            return _Arrived(_as_host(rows_RPH, finite_RP, nonzero_RP))
        flags = torch.stack([finite_RP, nonzero_RP], dim=1)
        turn, self._turn = self._turn, 1 - self._turn
        count = len(rows_RPH)
        host, host_flags = self._pinned[turn][:count], self._pinned_flags[turn][:count]
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(rows_RPH, non_blocking=True)
            host_flags.copy_(flags, non_blocking=True)
            arrived.record(self._stream)
        for tensor in (rows_RPH, flags):  # keeps the allocator from reusing them before the copy has read them
            tensor.record_stream(self._stream)
        return _Copying(arrived, host, host_flags)


@dataclass(frozen=True)
class _Arrived:
    rows: HostRows

    def wait(self) -> HostRows:
        return self.rows


@dataclass(frozen=True)
class _Copying:
    arrived: torch.cuda.Event
    host: Tensor
    flags: Tensor

    def wait(self) -> HostRows:
        self.arrived.synchronize()
        return _as_host(self.host, self.flags[:, 0], self.flags[:, 1])


def _as_host(rows_RPH: Tensor, finite_RP: Tensor, nonzero_RP: Tensor) -> HostRows:
    # numpy has no bfloat16: the bits are carried as uint16.
    bits: npt.NDArray[np.int16] = rows_RPH.view(torch.int16).numpy()
    return HostRows(bits.view(np.uint16), finite_RP.numpy(), nonzero_RP.numpy())
