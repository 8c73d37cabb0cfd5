"""Statistics of the stored hidden states, one line a layer."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dflash_cache.format.cache import DocumentSlice
from dflash_cache.format.invariants import bfloat16_to_float32, nonfinite_rows, zero_rows
from dflash_cache.spec import FeatureSpec

__all__ = ["LayerAccumulator", "LayerStats"]


@dataclass(frozen=True)
class LayerStats:
    """One stored layer.

    Attributes:
      layer: 0-based decoder layer whose output this is.
      role: ``fc`` feeds the drafter; ``last`` gives the targets.
      rms: Root mean square of its finite numbers.
      max_abs: Largest finite magnitude.
      nonfinite_rows, zero_rows: Tokens with a NaN or infinity; tokens whose numbers are all zero.
    """

    layer: int
    role: Literal["fc", "last"]
    rms: float
    max_abs: float
    nonfinite_rows: int
    zero_rows: int


class LayerAccumulator:
    """Add documents; ask for the statistics of all of them. Memory does not grow."""

    def __init__(self, features: FeatureSpec) -> None:
        """Start empty."""
        self._layers = [*features.fc_layer_indices, features.last_layer.index]
        count = len(self._layers)
        self._sum_squares = np.zeros(count)
        self._numbers = np.zeros(count)
        self._max_abs = np.zeros(count)
        self._nonfinite = np.zeros(count, dtype=np.int64)
        self._zero = np.zeros(count, dtype=np.int64)

    def add(self, tokens: DocumentSlice) -> None:
        """Add the tokens of a document."""
        for plane in range(tokens.fc_features.shape[1]):
            self._add_plane(plane, tokens.fc_features[:, plane])
        self._add_plane(len(self._layers) - 1, tokens.last_hidden_states)

    def stats(self) -> tuple[LayerStats, ...]:
        """Return one entry a layer: the fc layers in stored order, then the last."""
        mean_square = self._sum_squares / np.maximum(self._numbers, 1)
        return tuple(
            LayerStats(
                layer=layer,
                role="last" if i == len(self._layers) - 1 else "fc",
                rms=float(np.sqrt(mean_square[i])),
                max_abs=float(self._max_abs[i]),
                nonfinite_rows=int(self._nonfinite[i]),
                zero_rows=int(self._zero[i]),
            )
            for i, layer in enumerate(self._layers)
        )

    def _add_plane(self, plane: int, bits: npt.NDArray[np.uint16]) -> None:
        self._nonfinite[plane] += int(nonfinite_rows(bits).sum())
        self._zero[plane] += int(zero_rows(bits).sum())
        values = bfloat16_to_float32(np.ascontiguousarray(bits))
        finite = values[np.isfinite(values)]
        self._numbers[plane] += finite.size
        self._sum_squares[plane] += float(np.square(finite, dtype=np.float64).sum())
        if finite.size:
            self._max_abs[plane] = max(self._max_abs[plane], float(np.abs(finite).max()))
