"""What a run leaves on disk, and who may write there.

run.json             resolved settings, cache identity, drafter geometry
metrics.jsonl        one JSON object a line: steps and evaluations
tensorboard/         the same figures for TensorBoard
checkpoints/         step-000500/, ...: newest few, everything that an exact resume needs
final/               the trained drafter, as servers load it
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from dflash_cache.errors import CheckpointError, DiskSpaceError, OutputExistsError
from dflash_cache.train.checkpoint import checkpoint_folders, write_durably
from dflash_cache.train.contract import RunRecord

__all__ = ["RunFolder"]

_LOCK = ".lock"
_RUN_FILE = "run.json"
_FOLDERS = ("tensorboard", "checkpoints", "final")
_FILES = ("metrics.jsonl",)
# Left by a run that was killed, or had no disk, before it was one.
_LEFTOVERS = (_LOCK, f".{_RUN_FILE}.tmp")


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        """Name a folder; nothing is made or read yet."""
        self.path = path
        self.run_file = path / _RUN_FILE
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"

    def refuse_others(self, *, resume: bool, overwrite: bool) -> None:
        """Check, without touching anything, that this command may write here.

        Raises:
          OutputExistsError: If the folder holds something else, or a run that is neither resumed nor overwritten.
          CheckpointError: If a run is to be resumed and there is none.
        """
        if self.path.exists() and not self.path.is_dir():
            raise OutputExistsError(f"{self.path} is a file; name a folder for the run with --out")
        has_run = self.run_file.is_file()
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in _LEFTOVERS) if self.path.is_dir() else []
        if foreign and not has_run:
            raise OutputExistsError(
                f"{self.path} is not empty and holds no run (found {', '.join(foreign[:3])}"
                f"{', ...' if len(foreign) > 3 else ''}); name an empty or new folder with --out"
            )
        if resume and not has_run:
            raise CheckpointError(
                f"there is no run to resume in {self.path}: it has no {_RUN_FILE}. Name the run's folder with --out, "
                "or leave out --resume to begin one."
            )
        if has_run and not (resume or overwrite):
            steps = [folder.name for folder in checkpoint_folders(self.checkpoints)]
            raise OutputExistsError(
                f"{self.path} holds a run ({'latest checkpoint ' + steps[-1] if steps else 'no checkpoint yet'}); "
                "continue it with --resume, delete it with --overwrite, or choose another --out"
            )

    @contextmanager
    def claim(self, *, overwrite: bool) -> Iterator[None]:
        """Make the folder this process' own for as long as the context lasts.

        Args:
          overwrite: Delete the run in it first, and nothing that is not a run's.

        Raises:
          OutputExistsError: If another process is training there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputExistsError(
                    f"another process is training in {self.path}; wait for it, stop it, or choose another --out"
                ) from error
            if overwrite:
                self._delete_run()
            yield
        finally:
            os.close(handle)

    def write_record(self, record: RunRecord) -> None:
        """Write ``run.json``; from then on the folder holds a run."""
        write_durably(self.run_file, record)

    def read_record(self) -> RunRecord:
        """Read ``run.json``.

        Raises:
          CheckpointError: If it is not a run's record.
        """
        try:
            return RunRecord.model_validate_json(self.run_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise CheckpointError(
                f"{self.run_file} cannot be read as the record of a run: {error}. Restore it from a copy, or start "
                "over with --overwrite."
            ) from error

    def require_space(self, needed: int, *, overwrite: bool) -> None:
        """Refuse to begin when what the run is about to write does not fit.

        Args:
          needed: Bytes.
          overwrite: Whether the run that is there will be deleted first.

        Raises:
          DiskSpaceError: Naming what is needed and what is free.
        """
        existing = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free + (self._run_bytes() if overwrite else 0)
        if free < needed:
            raise DiskSpaceError(
                f"{self.path} has {free:,} bytes free; checkpoints and the final drafter need {needed:,}. Make room, "
                "or choose another --out."
            )

    def _run_bytes(self) -> int:
        """Bytes that deleting the run would free."""
        inside = (path for name in _FOLDERS for path in (self.path / name).rglob("*"))
        return sum(path.stat().st_size for path in inside if path.is_file())

    def _delete_run(self) -> None:
        """Delete the record last: after a killed deletion the folder still counts as a run, to be deleted again."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
        self.run_file.unlink(missing_ok=True)
