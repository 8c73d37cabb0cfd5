"""Make a folder appear whole or not at all."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_cache.errors import DiskSpaceError, OutputExistsError
from dflash_cache.format.manifest import fsync_folder

__all__ = ["whole_folder"]


@contextlib.contextmanager
def whole_folder(folder: Path, replaceable: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Yield a temporary sibling that becomes ``folder`` in one rename, or vanishes on an error.

    Args:
      folder: Where the result is to stand; parents are made.
      replaceable: Says whether what already stands there may be replaced. An empty folder always may.

    Raises:
      OutputExistsError: If something stands there that may not be replaced.
      DiskSpaceError: If the disk fills up.
    """
    _refuse_others(folder, replaceable)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    unfinished = _sibling(folder)
    unfinished.mkdir()
    lock = _try_lock(unfinished)
    try:
        yield unfinished
        _make_durable(unfinished)
        _put_in_place(unfinished, folder, replaceable)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskSpaceError(
            f"the disk is full while writing {folder}; nothing there was changed. Make room and run it again."
        ) from error
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(unfinished, ignore_errors=True)


def _sibling(folder: Path) -> Path:
    return folder.parent / f".{folder.name}-{secrets.token_hex(4)}"


def _try_lock(folder: Path) -> int | None:
    """Return a handle that locks a folder until it is closed; None if another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of this folder; those still writing hold a lock."""
    for leftover in folder.parent.glob(f".{folder.name}-????????"):
        lock = _try_lock(leftover) if leftover.is_dir() else None
        if lock is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


def _refuse_others(folder: Path, replaceable: Callable[[Path], bool]) -> None:
    if folder.is_dir():
        if not any(folder.iterdir()) or replaceable(folder):
            return
        raise OutputExistsError(f"{folder} is not empty; choose another folder, or move what is there away")
    if folder.exists() or folder.is_symlink():
        raise OutputExistsError(f"{folder} exists and is not a folder; choose another name")


def _make_durable(folder: Path) -> None:
    """Bring everything to disk, readable by whoever may read the folder."""
    # safetensors makes its files private to the user; a finished checkpoint is often served by another one.
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_folder(path)
            continue
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def _put_in_place(unfinished: Path, folder: Path, replaceable: Callable[[Path], bool]) -> None:
    # Something may have come there meanwhile.
    _refuse_others(folder, replaceable)
    if folder.is_dir() and any(folder.iterdir()):
        old = _sibling(folder)
        folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old)
    else:
        unfinished.rename(folder)
    fsync_folder(folder.parent)
