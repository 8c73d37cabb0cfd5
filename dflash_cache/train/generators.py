"""Every source of chance in training but the document order, which is a pure function: three named generators."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.errors import CheckpointError

__all__ = ["Generators"]

_NAMES = ("weights", "anchors", "noise")


@dataclass(frozen=True)
class Generators:
    """Independent streams, all from the one seed of a run.

    Attributes:
      weights: Draws the first weights; on the CPU, so that they do not depend on the device.
      anchors: Draws anchors; on the CPU.
      noise: Draws feature noise; on the training device.
    """

    weights: torch.Generator
    anchors: torch.Generator
    noise: torch.Generator

    @classmethod
    def from_seed(cls, seed: int, device: torch.device) -> "Generators":
        """Spawn the streams of a new run."""
        children = np.random.SeedSequence(seed).spawn(len(_NAMES))
        seeds = [int(child.generate_state(1, np.uint64)[0]) for child in children]
        devices = (torch.device("cpu"), torch.device("cpu"), device)
        weights, anchors, noise = (
            torch.Generator(where).manual_seed(value) for where, value in zip(devices, seeds, strict=True)
        )
        return cls(weights, anchors, noise)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return each stream's state by name; uint8, on the CPU."""
        return {name: getattr(self, name).get_state() for name in _NAMES}

    def restore(self, states: dict[str, Tensor]) -> None:
        """Continue each stream where :meth:`state_tensors` found it.

        Raises:
          CheckpointError: If a stream is missing, or was saved on another kind of device.
        """
        if set(states) != set(_NAMES):
            raise CheckpointError(f"the checkpoint has generators {sorted(states)}, expected {sorted(_NAMES)}")
        for name in _NAMES:
            try:
                getattr(self, name).set_state(states[name])
            except RuntimeError as error:
                raise CheckpointError(
                    f"the checkpoint's generator {name!r} does not fit this device ({error}); resume on the kind of "
                    "device that the run was begun on"
                ) from error
