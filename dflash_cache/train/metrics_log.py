"""The figures of a run, appended to ``metrics.jsonl`` and shown to TensorBoard."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from dflash_cache.errors import CheckpointError
from dflash_cache.train.events import EvaluationDone, StepDone
from dflash_cache.train.run_folder import RunFolder
from dflash_cache.train.state import Progress

__all__ = ["MetricsLog", "truncate_metrics"]

# Laid out for people: one chart a name. The lines of metrics.jsonl have everything.
_STEP_CHARTS = (
    "loss",
    "accuracy",
    "streak",
    "eal",
    "lr",
    "grad_norm",
    "coverage",
    "fill",
    "tokens_per_second",
    "data_wait_share",
)
_EVALUATION_CHARTS = ("loss", "accuracy", "streak", "eal")


class MetricsLog:
    """Writes figures as they come. Use as a context manager."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        """Continue the log of a run, or begin one.

        Args:
          folder: The run's.
          progress: Where the run goes on; figures of later steps, from a part that was lost, are removed.
        """
        truncate_metrics(folder.metrics, progress)
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._charts = SummaryWriter(str(folder.tensorboard), purge_step=progress.step + 1 if progress.step else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._charts.close()

    def step(self, event: StepDone) -> None:
        """Record a step."""
        self._append(event.as_record(), "train", _STEP_CHARTS)

    def evaluation(self, event: EvaluationDone) -> None:
        """Record an evaluation."""
        self._append(event.as_record(), "held_out", _EVALUATION_CHARTS)

    def sync(self) -> None:
        """Make what was recorded durable, before a checkpoint counts on it."""
        os.fsync(self._file.fileno())
        self._charts.flush()

    def _append(self, record: dict[str, Any], group: str, charts: tuple[str, ...]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name in charts:
            if record[name] is not None:
                self._charts.add_scalar(f"{group}/{name}", record[name], record["step"])
        for slot, accuracy in enumerate(record["accuracy_by_slot"], start=1) if group == "held_out" else ():
            if accuracy is not None:
                self._charts.add_scalar(f"held_out_accuracy_by_slot/{slot:02d}", accuracy, record["step"])


def truncate_metrics(path: Path, progress: Progress) -> None:
    """Cut a log back to where its run goes on, so that no step is in it twice.

    Raises:
      CheckpointError: If a line before that point is not a record.
    """
    if not path.is_file():
        return
    kept = b"".join(_kept_lines(path, progress))
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _kept_lines(path: Path, progress: Progress) -> Iterator[bytes]:
    latest = {"step": progress.step, "evaluation": progress.evaluated_step}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # cut off by a kill; a checkpoint is only written after whole lines
            try:
                record = json.loads(line)
                keep = record["step"] <= latest[record["kind"]]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(
                    f"{path}, line {number}: not a record of this run ({error!r}); move the file away to resume"
                ) from error
            if keep:
                yield line
