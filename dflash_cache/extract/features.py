"""One batch of documents through the target: right-padded in, captured rows of the real tokens out.

Shapes: B documents, S padded length, R real tokens of the batch, P planes (the fc layers, then the
last), H hidden size.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_cache.errors import ConfigError
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.taps import LayerTaps
from dflash_cache.spec import FeatureSpec

__all__ = ["FeatureExtractor", "PaddedBatch", "plane_layers", "plane_name"]


def plane_layers(features: FeatureSpec) -> tuple[int, ...]:
    """Return the layer of each plane: the fc layers in stored order, then the last layer."""
    return (*features.fc_layer_indices, features.last_layer.index)


def plane_name(features: FeatureSpec, plane: int) -> str:
    """Name a plane in messages."""
    layers = plane_layers(features)
    role = "last hidden states" if plane == len(layers) - 1 else "fc features"
    return f"{role} of layer {layers[plane]}"


@dataclass(frozen=True)
class PaddedBatch:
    """Documents side by side, one a row, padding on the right.

    Attributes:
      input_ids: [B, S] int64.
      attention_mask: [B, S] int64; 1 on real tokens.
      keep: [R] int64; places of the real tokens in the flattened batch, document after document.
    """

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[npt.NDArray[np.int32]], pad_id: int) -> "PaddedBatch":
        """Pad documents to the longest of them."""
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        width = int(lengths.max())
        input_ids = np.full((len(documents), width), pad_id, dtype=np.int64)
        for row, ids in zip(input_ids, documents, strict=True):
            row[: len(ids)] = ids
        mask = np.arange(width) < lengths[:, None]
        return cls(input_ids, mask.astype(np.int64), np.flatnonzero(mask).astype(np.int64))


class FeatureExtractor(AbstractContextManager["FeatureExtractor"]):
    """Runs the decoder, never lm_head, and captures the planes. Used from one thread."""

    def __init__(self, target: LoadedTarget, features: FeatureSpec, pad_id: int) -> None:
        """Prepare the taps; they are in place between enter and exit.

        Args:
          target: The target.
          features: What is captured.
          pad_id: Any id of the embedding; it stands on masked places alone.
        """
        self.target = target
        self.features = features
        self._pad_id = pad_id
        self._taps = LayerTaps(target.layers, plane_layers(features), features.hidden_size)

    def __enter__(self) -> "FeatureExtractor":
        self._taps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._taps.__exit__(None, None, None)

    @torch.inference_mode()
    def run(self, documents: Sequence[npt.NDArray[np.int32]]) -> Tensor:
        """Run one batch.

        Args:
          documents: Token ids of each.

        Returns:
          [R, P, H] bfloat16 on the target's device: the documents' rows one after another.

        Raises:
          ConfigError: If the batch does not fit into the GPU's memory.
        """
        batch = PaddedBatch.of(documents, self._pad_id)
        device = self.target.device
        try:
            self._taps.begin(torch.from_numpy(batch.keep).to(device))
            self.target.decode(
                torch.from_numpy(batch.input_ids).to(device), torch.from_numpy(batch.attention_mask).to(device)
            )
            return self._taps.finish()
        except torch.OutOfMemoryError as error:
            rows, width = batch.input_ids.shape
            raise ConfigError(
                f"a batch of {rows} documents padded to {width} tokens does not fit into the memory of {device}; "
                f"use a smaller --batch-tokens (it is part of a cache's identity), or a smaller --max-length if one "
                "document alone is too long"
            ) from error
