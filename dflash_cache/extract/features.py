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

    No attention mask goes with it: a causal model's real tokens never look at what follows them, so padding on the
    right changes nothing (proved for each family in tests/e2e/test_extract_families.py, and in each run by its
    self-check), while a mask would cost the fast attention kernels and a wait for the GPU.

    Attributes:
      input_ids: [B, S] int64.
      keep: [R] int64; places of the real tokens in the flattened batch, document after document; None when all are.
    """

    input_ids: Tensor
    keep: Tensor | None

    @classmethod
    def of(cls, documents: Sequence[npt.NDArray[np.int32]], pad_id: int) -> "PaddedBatch":
        """Pad documents to the longest of them."""
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        width = int(lengths.max())
        input_ids = np.full((len(documents), width), pad_id, dtype=np.int64)
        for row, ids in zip(input_ids, documents, strict=True):
            row[: len(ids)] = ids
        keep = None
        if int(lengths.min()) < width:
            keep = torch.from_numpy(np.flatnonzero(np.arange(width) < lengths[:, None]))
        return cls(torch.from_numpy(input_ids), keep)

    @property
    def num_real(self) -> int:
        """R, tokens that are no padding."""
        return self.input_ids.numel() if self.keep is None else len(self.keep)

    def to(self, device: torch.device) -> "PaddedBatch":
        """Copy to a device without waiting for the work that is queued there."""
        return PaddedBatch(_upload(self.input_ids, device), None if self.keep is None else _upload(self.keep, device))


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait until the GPU has finished the batch before, and leave it idle then.
    return tensor.pin_memory().to(device, non_blocking=True)


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
            uploaded = batch.to(device)
            self._taps.begin(uploaded.num_real, device, uploaded.keep)
            self.target.decode(uploaded.input_ids)
            return self._taps.finish()
        except torch.OutOfMemoryError as error:
            rows, width = batch.input_ids.shape
            raise ConfigError(
                f"a batch of {rows} documents padded to {width} tokens does not fit into the memory of {device}; "
                f"use a smaller --batch-tokens (it is part of a cache's identity), or a smaller --max-length if one "
                "document alone is too long"
            ) from error
