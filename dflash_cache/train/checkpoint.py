"""Checkpoints on disk: written beside their place, renamed into it when durable, the oldest removed."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import ValidationError

from dflash_cache import __version__
from dflash_cache.errors import CheckpointError
from dflash_cache.format.manifest import FileEntry, file_digest, fsync_folder
from dflash_cache.spec import FrozenModel
from dflash_cache.train.contract import RunContract, refuse_changes
from dflash_cache.train.state import STATE_FILES, Progress, TrainState

__all__ = [
    "CHECKPOINT_FILE",
    "CheckpointRecord",
    "checkpoint_folders",
    "checkpoint_name",
    "latest_checkpoint",
    "load_checkpoint",
    "read_checkpoint_record",
    "save_checkpoint",
    "write_durably",
]

CHECKPOINT_FILE = "checkpoint.json"
_NAME = re.compile(r"^step-(\d{6,})$")
# Neither name is a checkpoint's: what a killed run leaves under them is swept away.
_WRITING, _DELETING = ".writing-", ".deleting-"


class CheckpointRecord(FrozenModel):
    """The contents of ``checkpoint.json``, beside the tensors.

    Attributes:
      format, format_version: What kind of file this is.
      written_by: Program and version.
      progress: How far the run had come.
      contract: The run's resolved settings, recipe and cache identity.
      files: Size and digest of each tensor file.
      digest: xxh3-128 of the rest; a step or a row that was altered would give another run, silently.
    """

    format: Literal["dflash-cache-checkpoint"] = "dflash-cache-checkpoint"
    format_version: Literal[1] = 1
    written_by: str
    progress: Progress
    contract: RunContract
    files: dict[str, FileEntry]
    digest: str = ""

    def digest_of_the_rest(self) -> str:
        """Digest everything but the digest itself."""
        return xxhash.xxh3_128_hexdigest(self.model_dump_json(exclude={"digest"}).encode("utf-8"))


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after so many steps."""
    return f"step-{step:06d}"


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """List the finished checkpoints, oldest first; half-written ones are not among them."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.match(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest finished checkpoint."""
    folders = checkpoint_folders(checkpoints)
    return folders[-1] if folders else None


def save_checkpoint(checkpoints: Path, state: TrainState, contract: RunContract, *, keep: int) -> Path:
    """Write a checkpoint atomically and remove the oldest.

    Args:
      checkpoints: The folder of checkpoints.
      state: The run, between two steps.
      contract: Its settings.
      keep: Checkpoints left afterwards, this one included.

    Returns:
      The checkpoint's folder. One of the same step that is already there is left as it is.

    Raises:
      DiskSpaceError: If the disk is full; earlier checkpoints are intact.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    _sweep(checkpoints)
    final = checkpoints / checkpoint_name(state.progress.step)
    if not final.exists():
        writing = checkpoints / f"{_WRITING}{final.name}"
        writing.mkdir()
        try:
            state.save(writing)
            record = CheckpointRecord(
                written_by=f"dflash-cache {__version__}",
                progress=state.progress,
                contract=contract,
                files={name: file_digest(writing / name) for name in STATE_FILES},
            )
            sealed = record.model_copy(update={"digest": record.digest_of_the_rest()})
            write_durably(writing / CHECKPOINT_FILE, sealed)
            fsync_folder(writing)
            writing.rename(final)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        fsync_folder(checkpoints)
    for folder in checkpoint_folders(checkpoints)[:-keep]:
        deleting = checkpoints / f"{_DELETING}{folder.name}"
        folder.rename(deleting)
        shutil.rmtree(deleting)
    return final


def load_checkpoint(folder: Path, state: TrainState, contract: RunContract) -> None:
    """Put a run back where a checkpoint found it.

    Args:
      folder: The checkpoint.
      state: A new run of the same contract; changed in place.
      contract: Of this command.

    Raises:
      CheckpointError: If the checkpoint is not whole.
      IdentityMismatchError: If it belongs to a run of other settings; lists every difference.
    """
    record = read_checkpoint_record(folder)
    refuse_changes(record.contract, contract, folder)
    for name, entry in record.files.items():
        path = folder / name
        if not path.is_file() or file_digest(path) != entry:
            raise CheckpointError(
                f"{path} is missing or not the file that was saved ({entry.bytes} bytes). Delete {folder} to resume "
                "from the checkpoint before it."
            )
    state.load(folder, record.progress)


def read_checkpoint_record(folder: Path) -> CheckpointRecord:
    """Read what a checkpoint says of itself.

    Raises:
      CheckpointError: If it cannot be read.
    """
    path = folder / CHECKPOINT_FILE
    try:
        record = CheckpointRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {error}. Delete {folder} to resume from the checkpoint before it."
        ) from error
    if record.digest != record.digest_of_the_rest():
        raise CheckpointError(
            f"{path} was edited or damaged: its digest is {record.digest!r}, its contents give "
            f"{record.digest_of_the_rest()!r}. Delete {folder} to resume from the checkpoint before it."
        )
    return record


def write_durably(path: Path, model: FrozenModel) -> None:
    """Replace a JSON file atomically and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(model.model_dump(mode="json"), file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def _sweep(checkpoints: Path) -> None:
    for path in checkpoints.iterdir():
        if path.name.startswith((_WRITING, _DELETING)):
            shutil.rmtree(path)


def _step_of(folder: Path) -> int:
    match = _NAME.match(folder.name)
    assert match is not None
    return int(match.group(1))
