"""Write a cache: begin or continue it, stage shards, seal them one after another, and declare it complete.

A shard is staged beside the cache, checked, renamed into place, and only then listed in the manifest. Whatever is
found that the manifest does not list is a leftover of a killed run and is removed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from dflash_cache import __version__
from dflash_cache.errors import CacheFormatError, IdentityMismatchError, OutputExistsError
from dflash_cache.format.manifest import (
    MANIFEST_NAME,
    AttachedName,
    CacheIdentity,
    CacheManifest,
    QuarantinedDocument,
    ShardEntry,
    differences,
    file_digest,
    fsync_folder,
    read_manifest,
    shard_name,
    write_manifest,
)
from dflash_cache.format.shard import ShardData, ShardReader, explain_disk_full, write_shard

__all__ = [
    "LOG_NAME",
    "CacheWriter",
    "FolderLock",
    "StagedShard",
    "check_identity",
    "delete_cache",
    "lock_folder",
    "prepare_folder",
]

LOG_NAME = "extract_log.jsonl"
"""What each run did, for people; no part of the cache's identity or bytes, and ignored by readers."""

_STAGING = ".staging"
_SCRATCH = ".scratch"
_LOCK = ".lock"
_OURS = (_STAGING, _SCRATCH, _LOCK, f".{MANIFEST_NAME}.tmp", LOG_NAME)


@dataclass(frozen=True)
class FolderLock:
    """The right to write in a cache's folder; see :func:`lock_folder`."""

    folder: Path

    def scratch_folder(self, name: str) -> Path:
        """Return a new path on the cache's disk for files that this run alone needs; removed when the lock ends."""
        scratch = self.folder / _SCRATCH
        with explain_disk_full(scratch):
            scratch.mkdir(exist_ok=True)
        return scratch / name


@contextmanager
def lock_folder(folder: Path) -> Iterator[FolderLock]:
    """Keep other processes from writing a cache; leftovers of a killed run are removed first.

    Args:
      folder: As checked by :func:`prepare_folder`.

    Raises:
      OutputExistsError: If another process is writing this cache.
    """
    handle = _acquire_lock(folder)
    try:
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
        yield FolderLock(folder)
    finally:
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
        os.close(handle)


@dataclass(frozen=True)
class StagedShard:
    """A shard that is written and durable but does not exist yet.

    Attributes:
      folder: Where it lies until it is sealed.
      entry: What the manifest will say of it.
    """

    folder: Path
    entry: ShardEntry


def prepare_folder(folder: Path, *, overwrite: bool) -> bool:
    """Check that a folder may become, or already is, a cache, before anything expensive begins.

    Args:
      folder: The cache's folder; made if it does not exist.
      overwrite: Delete an existing cache in it first; anything else is never deleted.

    Returns:
      Whether a cache is there to be continued.

    Raises:
      OutputExistsError: If the folder holds something other than a cache, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} is a file; name a folder for the cache with --out")
    with explain_disk_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
    if not (folder / MANIFEST_NAME).exists():
        if foreign:
            raise OutputExistsError(
                f"{folder} is not empty and holds no cache (found {', '.join(foreign[:3])}"
                f"{', ...' if len(foreign) > 3 else ''}); name an empty or new folder with --out"
            )
        return False
    if overwrite:
        with lock_folder(folder):
            delete_cache(folder)
        return False
    return True


def delete_cache(folder: Path) -> None:
    """Delete what a cache consists of, under its lock.

    The manifest goes last: after a killed deletion the folder still counts as a cache, one with shards missing.
    """
    for path in folder.iterdir():
        if path.name == _STAGING or (path.name.startswith("shard-") and path.suffix == ".zarr"):
            shutil.rmtree(path)
        elif path.name in (*get_args(AttachedName), LOG_NAME):
            path.unlink()
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


class CacheWriter:
    """The only way to make or continue a cache. Use as a context manager; one process at a time."""

    def __init__(
        self,
        folder: Path,
        identity: CacheIdentity,
        *,
        encoder_threads: int | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        """Begin a cache, or continue the one in the folder.

        Args:
          folder: As checked by :func:`prepare_folder`.
          identity: What this run would make.
          encoder_threads: Threads that compress; None uses the machine's cores, at most 16.
          lock: The folder's lock when the caller holds it; None takes it for as long as this writer lives.

        Raises:
          IdentityMismatchError: If the cache in the folder was made otherwise; lists every difference.
          OutputExistsError: If another process is writing this cache.
        """
        self.folder = folder
        with ExitStack() as stack:
            if lock is None:
                stack.enter_context(lock_folder(folder))
            self.manifest = self._begin_or_continue(identity)
            self._held = stack.pop_all()
        threads = encoder_threads or min(16, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()
        shutil.rmtree(self.folder / _STAGING, ignore_errors=True)
        self._held.close()

    def attach(self, name: AttachedName, source: Path) -> None:
        """Move a file into the cache and list it; the target's head and tokenizer travel with the cache."""
        with explain_disk_full(self.folder), source.open("rb") as file:
            os.fsync(file.fileno())
        entry = file_digest(source)
        source.replace(self.folder / name)
        self._commit(attached={**self.manifest.attached, name: entry})

    def staging_folder(self) -> Path:
        """Return a folder on the cache's disk for files that are not sealed; emptied when the writer ends."""
        folder = self.folder / _STAGING
        folder.mkdir(exist_ok=True)
        return folder

    def stage(self, number: int, first_document: int, data: ShardData) -> StagedShard:
        """Write a shard where it can be checked before it is sealed.

        Args:
          number: Its 0-based number.
          first_document: Ordinal of its first document that is not quarantined.
          data: Its contents.

        Raises:
          DiskSpaceError: If the disk is full; nothing sealed is affected.
        """
        folder = self.staging_folder() / shard_name(number)
        identity = self.manifest.identity
        arrays = write_shard(folder, data, identity.features, identity.settings.codec, self._executor)
        entry = ShardEntry(
            name=shard_name(number),
            first_document=first_document,
            num_documents=len(data.doc_lengths),
            num_tokens=len(data.input_ids),
            supervised_tokens=int(data.loss_mask.sum()),
            arrays=arrays,
        )
        return StagedShard(folder, entry)

    def open_staged(self, staged: StagedShard) -> ShardReader:
        """Open a staged shard for checking what was really stored."""
        identity = self.manifest.identity
        return ShardReader.staged(staged.folder, staged.entry, identity.features, identity.settings.codec)

    def seal(self, staged: StagedShard, quarantined: tuple[QuarantinedDocument, ...] = ()) -> None:
        """Make a staged shard exist. It must be the next one in order.

        Args:
          staged: The shard.
          quarantined: Documents among and around its own that are in no shard; listed in the same commit.
        """
        if staged.entry.name != shard_name(len(self.manifest.shards)):
            raise ValueError(f"{staged.entry.name} sealed out of order, after {len(self.manifest.shards)} shards")
        final = self.folder / staged.entry.name
        with explain_disk_full(self.folder):
            if final.exists():  # left by a run killed between the rename and the manifest
                shutil.rmtree(final)
            staged.folder.rename(final)
            fsync_folder(self.folder)
            self._commit(
                shards=(*self.manifest.shards, staged.entry), quarantined=(*self.manifest.quarantined, *quarantined)
            )

    def quarantine(self, documents: tuple[QuarantinedDocument, ...]) -> None:
        """List the next documents of the corpus as being in no shard, where a shard would have held no others."""
        self._commit(quarantined=(*self.manifest.quarantined, *documents))

    def finish(self) -> None:
        """Declare that every document of the corpus is in a sealed shard or quarantined."""
        self._commit(complete=True)

    def _begin_or_continue(self, identity: CacheIdentity) -> CacheManifest:
        shutil.rmtree(self.folder / _STAGING, ignore_errors=True)
        try:
            manifest = read_manifest(self.folder)
        except CacheFormatError:
            if (self.folder / MANIFEST_NAME).exists():
                raise
            manifest = CacheManifest(written_by=f"dflash-cache {__version__}", identity=identity)
            with explain_disk_full(self.folder):
                write_manifest(self.folder, manifest)
        check_identity(self.folder, manifest.identity, identity)
        return manifest

    def _commit(self, **changes: object) -> None:
        # model_copy does not validate; the round trip does, before anything is replaced on disk.
        manifest = CacheManifest.model_validate(self.manifest.model_copy(update=changes).model_dump())
        with explain_disk_full(self.folder):
            write_manifest(self.folder, manifest)
        self.manifest = manifest


def check_identity(folder: Path, stored: CacheIdentity, asked: CacheIdentity) -> None:
    """Refuse to continue a cache that was made otherwise.

    Raises:
      IdentityMismatchError: Listing every difference, old and new.
    """
    changed = differences(stored, asked)
    if changed:
        listed = "\n".join(f"  {difference}" for difference in changed)
        raise IdentityMismatchError(
            f"{folder} was made with other settings (field: in the cache -> asked for):\n{listed}\n"
            "Run with the settings of the cache, choose another --out, or start over with --overwrite."
        )


def _acquire_lock(folder: Path) -> int:
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OutputExistsError(
            f"another process is writing the cache in {folder}; wait for it, stop it, or choose another --out"
        ) from error
    return handle
