"""One shard: a zarr v3 group of seven arrays. Written once into a staging folder, read by rows afterwards."""

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_cache.config import Codec
from dflash_cache.errors import CacheDamagedError, DiskSpaceError
from dflash_cache.format.codec import ArrayReader, write_array
from dflash_cache.format.layout import ARRAY_NAMES, ArrayLayout, shard_layout
from dflash_cache.format.manifest import CacheManifest, FileEntry, ShardEntry, fsync_folder
from dflash_cache.spec import FeatureSpec

__all__ = ["ShardData", "ShardReader", "explain_disk_full", "write_shard"]

_GROUP_METADATA: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ShardData:
    """The contents of a shard. T tokens, D documents, L fc layers, H hidden size.

    Attributes:
      input_ids: [T] int32.
      loss_mask: [T] bool; True where the token is supervised.
      positions: [T] int32; token index within its document.
      doc_lengths: [D] int32; their sum is T.
      doc_ids: [D] int64; the document's index in the corpus, with gaps where documents were dropped.
      fc_features: [T, L, H] bfloat16 as uint16.
      last_hidden_states: [T, H] bfloat16 as uint16; before the final norm.
    """

    input_ids: IntArray
    loss_mask: npt.NDArray[np.bool_]
    positions: IntArray
    doc_lengths: IntArray
    doc_ids: npt.NDArray[np.int64]
    fc_features: npt.NDArray[np.uint16]
    last_hidden_states: npt.NDArray[np.uint16]


def write_shard(
    folder: Path, data: ShardData, features: FeatureSpec, codec: Codec, executor: Executor
) -> dict[str, FileEntry]:
    """Write a shard into a new folder and make it durable there; sealing it is the caller's.

    Returns:
      Size and digest of each array's data file.

    Raises:
      DiskSpaceError: If the disk is full.
    """
    layout = shard_layout(len(data.input_ids), len(data.doc_lengths), features, codec)
    with explain_disk_full(folder):
        folder.mkdir(parents=True)
        _write_json(folder / "zarr.json", _GROUP_METADATA)
        entries = {
            name: _write_array_folder(folder / name, layout[name], getattr(data, name), executor) for name in layout
        }
        fsync_folder(folder)
    return entries


@contextmanager
def explain_disk_full(path: Path) -> Iterator[None]:
    """Turn the system's error for a full disk or quota into one that says what to do.

    Raises:
      DiskSpaceError: In place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskSpaceError(
            f"the disk is full while writing {path}. Every sealed shard is intact; make room and run the same command "
            "again: it continues where it stopped."
        ) from error


def _write_array_folder(folder: Path, layout: ArrayLayout, values: npt.NDArray[Any], executor: Executor) -> FileEntry:
    folder.mkdir()
    _write_json(folder / "zarr.json", layout.zarr_metadata())
    with (folder / layout.file_name).open("wb") as file:
        digest = write_array(file, layout, values, executor)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(folder)
    return FileEntry(bytes=size, digest=digest)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


class ShardReader:
    """Read documents of one sealed shard. Safe to use from several threads at once."""

    def __init__(self, cache: Path, manifest: CacheManifest, number: int) -> None:
        """Open a shard and check its structure against the manifest.

        Args:
          cache: The cache's folder.
          manifest: Its manifest.
          number: The shard's 0-based number.

        Raises:
          CacheDamagedError: If an array is missing, cut short, of another shape, or at odds with the manifest.
        """
        identity = manifest.identity
        self.entry: ShardEntry = manifest.shards[number]
        self._initialize(cache / self.entry.name, self.entry, identity.features, identity.settings.codec)

    @classmethod
    def staged(cls, folder: Path, entry: ShardEntry, features: FeatureSpec, codec: Codec) -> "ShardReader":
        """Open a shard that is written but not yet sealed."""
        reader = cls.__new__(cls)
        reader.entry = entry
        reader._initialize(folder, entry, features, codec)
        return reader

    def _initialize(self, folder: Path, entry: ShardEntry, features: FeatureSpec, codec: Codec) -> None:
        self.folder = folder
        self._check_metadata(folder / "zarr.json", _GROUP_METADATA)
        self.layout = shard_layout(entry.num_tokens, entry.num_documents, features, codec)
        self.arrays = {name: self._open_array(name) for name in ARRAY_NAMES}
        self.doc_lengths: IntArray = self.arrays["doc_lengths"].read(0, entry.num_documents)
        self.doc_ids: npt.NDArray[np.int64] = self.arrays["doc_ids"].read(0, entry.num_documents)
        if self.doc_lengths.min() < 1 or int(self.doc_lengths.sum()) != entry.num_tokens:
            raise CacheDamagedError(
                f"{self.folder}: damaged: its documents add up to {int(self.doc_lengths.sum())} tokens, the manifest "
                f"says {entry.num_tokens}. Restore this shard from a copy, or delete the cache and run extract again."
            )

    def close(self) -> None:
        """Close the shard's files."""
        for array in self.arrays.values():
            array.close()

    def _open_array(self, name: str) -> ArrayReader:
        layout, entry = self.layout[name], self.entry.arrays[name]
        folder = self.folder / name
        self._check_metadata(folder / "zarr.json", layout.zarr_metadata())
        path = folder / layout.file_name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CacheDamagedError(
                f"{path}: damaged: it {found}, the manifest says {entry.bytes} bytes. Restore this shard from a copy, "
                "or delete the cache and run extract again."
            )
        return ArrayReader(path, layout)

    def _check_metadata(self, path: Path, expected: dict[str, Any]) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CacheDamagedError(f"{path}: damaged: the zarr metadata cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise CacheDamagedError(f"{path}: damaged: expected a JSON object, found {type(found).__name__}")
        for field in sorted(set(expected) | set(found)):
            if found.get(field) != expected.get(field):
                raise CacheDamagedError(
                    f"{path}: damaged: {field} is {found.get(field)!r}, the manifest implies {expected.get(field)!r}. "
                    "Restore this shard from a copy, or delete the cache and run extract again."
                )
