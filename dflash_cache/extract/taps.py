"""Copy the outputs of chosen decoder layers while the target runs.

Shapes: B documents of a batch, S padded length, R rows kept (real tokens), P planes, H hidden size.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dflash_cache.errors import TargetError

__all__ = ["LayerTaps", "hidden_states_of"]


class LayerTaps:
    """Forward hooks on decoder layers; a context manager, inside which :meth:`begin` and :meth:`finish` alternate.

    Each output is reduced to the wanted rows and copied the moment it appears, so that a later layer that works in
    place cannot change it, and nothing but the planes outlives the pass. The hooks return nothing: a returned value
    would replace the layer's output.
    """

    def __init__(self, layers: nn.ModuleList, planes: Sequence[int], hidden_size: int) -> None:
        """Choose what is captured; nothing is hooked yet.

        Args:
          layers: The decoder's layers, in order.
          planes: 0-based layer of each plane; a layer may occur in two planes and is then copied twice.
          hidden_size: H.
        """
        self._layers = layers
        self._planes = tuple(planes)
        self._hidden_size = hidden_size
        self._handles: list[RemovableHandle] = []
        self._keep_R: Tensor | None = None
        self._rows_RPH: Tensor | None = None
        self._captured: list[int] = []

    def __enter__(self) -> Self:
        for index in sorted(set(self._planes)):
            self._handles.append(self._layers[index].register_forward_hook(self._make_hook(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._keep_R = self._rows_RPH = None

    def begin(self, num_rows: int, device: torch.device, keep_R: Tensor | None = None) -> None:
        """Prepare for one forward pass.

        Args:
          num_rows: R.
          device: The target's.
          keep_R: int64; which rows of the flattened [B * S] batch are kept, in this order; on the target's device.
            None keeps all of them.
        """
        self._keep_R = keep_R
        self._captured = []
        shape = (num_rows, len(self._planes), self._hidden_size)
        self._rows_RPH = torch.empty(shape, dtype=torch.bfloat16, device=device)

    def finish(self) -> Tensor:
        """Return what the pass left: [R, P, H] bfloat16, on the target's device.

        Raises:
          TargetError: If a layer did not run exactly once.
        """
        rows_RPH, self._rows_RPH, self._keep_R = self._rows_RPH, None, None
        wanted = sorted(set(self._planes))
        if rows_RPH is None or sorted(self._captured) != wanted:
            raise TargetError(
                f"the decoder layers {wanted} should each run once in a forward pass, but these ran: "
                f"{sorted(self._captured)}; this architecture is not supported"
            )
        return rows_RPH

    def _make_hook(self, index: int) -> Any:
        def copy_rows(module: nn.Module, args: Any, output: Any) -> None:
            if self._rows_RPH is None:
                return
            hidden_BSH = hidden_states_of(output, self._hidden_size, f"decoder layer {index}")
            self._captured.append(index)
            rows_RH = hidden_BSH.flatten(0, 1)
            if self._keep_R is not None:
                rows_RH = rows_RH.index_select(0, self._keep_R)
            for plane, layer in enumerate(self._planes):
                if layer == index:
                    # copy_ rounds to nearest even.
                    self._rows_RPH[:, plane].copy_(rows_RH)

        return copy_rows


def hidden_states_of(output: Any, hidden_size: int, what: str) -> Tensor:
    """Take the hidden states [B, S, H] out of what a module returned: a tensor, or a tuple that begins with it.

    Raises:
      TargetError: If there are none.
    """
    hidden = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[-1] != hidden_size:
        found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise TargetError(
            f"{what} should give hidden states of shape [batch, tokens, {hidden_size}], got {found}; this architecture "
            "is not supported"
        )
    return hidden
