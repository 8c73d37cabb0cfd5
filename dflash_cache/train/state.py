"""All that a run consists of between two steps, with one pair to save and load it."""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW

from dflash_cache.drafter.metrics import Metrics
from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import CheckpointError, DiskSpaceError
from dflash_cache.spec import FrozenModel
from dflash_cache.stream.plan import StreamPosition
from dflash_cache.train.generators import Generators
from dflash_cache.train.optimizer import optimizer_tensors, restore_optimizer

__all__ = ["STATE_FILES", "Figures", "Progress", "TrainState"]

_DRAFTER_FILE = "drafter.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_GENERATORS_FILE = "generators.safetensors"
STATE_FILES = (_DRAFTER_FILE, _OPTIMIZER_FILE, _GENERATORS_FILE)


class Figures(FrozenModel):
    """The headline figures of a step; None where nothing was supervised."""

    step: int
    loss: float | None
    accuracy: float | None
    streak: float | None
    eal: float | None

    @classmethod
    def of(cls, step: int, metrics: Metrics) -> "Figures":
        """Pick them from finished metrics."""
        return cls(step=step, loss=metrics.loss, accuracy=metrics.accuracy, streak=metrics.streak, eal=metrics.eal)


class Progress(FrozenModel):
    """How far a run has come, in plain numbers.

    Attributes:
      step: Optimizer steps taken; also the schedule's position.
      epoch, row: The next row to be trained on.
      evaluated_step: Step of the latest evaluation; 0 when there was none.
      tokens: Tokens streamed, each epoch anew.
      slots: Supervised slots trained.
      training: Figures of the latest step.
      held_out: Figures of the latest evaluation.
      best: Figures of the evaluation with the greatest EAL.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    evaluated_step: int = 0
    tokens: int = 0
    slots: int = 0
    training: Figures | None = None
    held_out: Figures | None = None
    best: Figures | None = None

    @property
    def position(self) -> StreamPosition:
        """Where the stream goes on."""
        return StreamPosition(self.epoch, self.row)

    def with_evaluation(self, figures: Figures) -> "Progress":
        """Record an evaluation; ties keep the earlier best."""
        best = self.best
        if figures.eal is not None and (best is None or best.eal is None or figures.eal > best.eal):
            best = figures
        return self.model_copy(update={"evaluated_step": figures.step, "held_out": figures, "best": best})


@dataclass
class TrainState:
    """A run between two steps.

    Attributes:
      drafter: Float32 weights, on the training device.
      optimizer: Over exactly those weights.
      generators: Of anchors and noise.
      progress: Everything countable.
    """

    drafter: Drafter
    optimizer: AdamW
    generators: Generators
    progress: Progress

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and generators, exactly, as safetensors that are durable on return.

        Raises:
          DiskSpaceError: If the disk is full.
        """
        _write(folder / _DRAFTER_FILE, self.drafter.state_dict())
        _write(folder / _OPTIMIZER_FILE, optimizer_tensors(self.drafter, self.optimizer))
        _write(folder / _GENERATORS_FILE, self.generators.state_tensors())

    def load(self, folder: Path, progress: Progress) -> None:
        """Become what :meth:`save` wrote; the drafter has the geometry that was saved.

        Raises:
          CheckpointError: Naming the file and what does not fit.
        """
        try:
            self.drafter.load_state_dict(_read(folder / _DRAFTER_FILE), strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{folder / _DRAFTER_FILE} does not fit the drafter: {error}") from error
        restore_optimizer(self.drafter, self.optimizer, _read(folder / _OPTIMIZER_FILE))
        self.generators.restore(_read(folder / _GENERATORS_FILE))
        self.progress = progress


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and f"os error {errno.ENOSPC}" not in str(error):
            raise
        needed = sum(tensor.nbytes for tensor in on_cpu.values())
        raise DiskSpaceError(
            f"the disk is full while writing {path} ({needed:,} bytes needed, {shutil.disk_usage(path.parent).free:,} "
            "free). The checkpoints before it are intact; make room and run the same command with --resume."
        ) from error


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Delete this checkpoint folder to resume from the one before it."
        ) from error
