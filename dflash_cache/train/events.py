"""What a caller sees of a run while it goes on, and what it gets in the end. Plain frozen data, nothing displayed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_cache.drafter.metrics import Metrics
from dflash_cache.train.state import Figures

__all__ = [
    "CheckpointSaved",
    "EvaluationDone",
    "EvaluationProgress",
    "Exported",
    "OnEvent",
    "RunStarted",
    "StepDone",
    "TrainEvent",
    "TrainReport",
    "Warned",
]


@dataclass(frozen=True)
class RunStarted:
    """Everything is open and checked; the next event is a step's, unless evaluation was due.

    Attributes:
      out: The run's folder.
      device: Where it trains.
      total_steps: Optimizer steps of the whole run.
      first_step: Steps already taken; 0 for a new run.
      num_epochs: Passes over the training documents, the last perhaps cut short.
      num_train_documents, num_held_out_documents: Of the split.
      num_train_tokens: Tokens of one epoch.
      num_parameters: Of the drafter.
      rows_per_epoch: Packed rows of the first epoch.
      fill: Share of those rows' capacity in use.
    """

    out: Path
    device: str
    total_steps: int
    first_step: int
    num_epochs: int
    num_train_documents: int
    num_held_out_documents: int
    num_train_tokens: int
    num_parameters: int
    rows_per_epoch: int
    fill: float


@dataclass(frozen=True)
class Warned:
    """Something that does not stop a run and should not go unread."""

    message: str


@dataclass(frozen=True)
class StepDone:
    """One optimizer step.

    Attributes:
      step: Steps taken so far, this one included.
      epoch: Of its rows, 0-based.
      metrics: Over its blocks.
      lr: Learning rate used.
      grad_norm: Before clipping; None when nothing was supervised and the weights were left alone.
      coverage: Share of the eligible anchors that were used; None when there were none.
      fill: Share of its rows' capacity that holds tokens.
      num_tokens: Tokens of its rows.
      seconds: Wall time.
      data_wait_seconds: Of it, waiting for rows.
    """

    step: int
    epoch: int
    metrics: Metrics
    lr: float
    grad_norm: float | None
    coverage: float | None
    fill: float
    num_tokens: int
    seconds: float
    data_wait_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of this step."""
        return self.num_tokens / self.seconds

    @property
    def data_wait_share(self) -> float:
        """Share of the step spent waiting for rows."""
        return self.data_wait_seconds / self.seconds

    def as_record(self) -> dict[str, Any]:
        """Lay it out as a line of ``metrics.jsonl``."""
        own = asdict(self)
        metrics = own.pop("metrics")
        rates = {"tokens_per_second": self.tokens_per_second, "data_wait_share": self.data_wait_share}
        return {"kind": "step", "step": self.step, **metrics, **own, **rates}


@dataclass(frozen=True)
class EvaluationProgress:
    """Rows of held-out documents done so far."""

    step: int
    rows_done: int
    num_rows: int


@dataclass(frozen=True)
class EvaluationDone:
    """One pass over the held-out documents, every eligible anchor, no noise.

    Attributes:
      step: Steps taken before it.
      metrics: Over all their blocks.
      is_best: Whether no earlier evaluation had as great an EAL.
      seconds: Wall time.
    """

    step: int
    metrics: Metrics
    is_best: bool
    seconds: float

    def as_record(self) -> dict[str, Any]:
        """Lay it out as a line of ``metrics.jsonl``."""
        own = asdict(self)
        metrics = own.pop("metrics")
        return {"kind": "evaluation", "step": self.step, **metrics, **own}


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on disk, durably."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Exported:
    """The trained drafter is on disk, as servers load it."""

    folder: Path


TrainEvent = RunStarted | Warned | StepDone | EvaluationProgress | EvaluationDone | CheckpointSaved | Exported
OnEvent = Callable[[TrainEvent], None]


@dataclass(frozen=True)
class TrainReport:
    """How a run, or this part of it, ended.

    Attributes:
      out: The run's folder.
      step, total_steps: Steps taken, and of the whole run.
      interrupted: Whether it stopped early on request.
      checkpoint: The latest checkpoint.
      final: Folder of the exported drafter; None when interrupted.
      training: Figures of the last step.
      held_out: Figures of the last evaluation; None without held-out documents.
      best: Figures of the best evaluation.
      how_to_continue: What to type to go on; None when finished.
    """

    out: Path
    step: int
    total_steps: int
    interrupted: bool
    checkpoint: Path
    final: Path | None
    training: Figures | None
    held_out: Figures | None
    best: Figures | None
    how_to_continue: str | None
