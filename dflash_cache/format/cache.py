"""Read a cache: any document, any range of its tokens, from any thread."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_cache.errors import CacheDamagedError, CacheFormatError
from dflash_cache.format.manifest import CacheManifest, file_digest, read_manifest
from dflash_cache.format.shard import ShardReader

__all__ = ["DocumentIndex", "DocumentSlice", "FeatureCache"]

# Seven files each: well below the usual limit of 1024 open files.
_OPEN_SHARDS = 32


@dataclass(frozen=True)
class DocumentIndex:
    """Where each document lies. D documents, in corpus order.

    Attributes:
      shard: [D] int32; number of its shard.
      start: [D] int64; row of its first token in the shard.
      length: [D] int64; tokens.
      doc_id: [D] int64; its index in the corpus.
    """

    shard: npt.NDArray[np.int32]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    doc_id: npt.NDArray[np.int64]


@dataclass(frozen=True)
class DocumentSlice:
    """Some consecutive tokens of one document. n tokens, L fc layers, H hidden size.

    Attributes:
      input_ids, positions: [n] int32.
      loss_mask: [n] bool.
      fc_features: [n, L, H] bfloat16 as uint16.
      last_hidden_states: [n, H] bfloat16 as uint16; before the final norm.
    """

    input_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    fc_features: npt.NDArray[np.uint16]
    last_hidden_states: npt.NDArray[np.uint16]


class FeatureCache:
    """A cache opened for reading. Opening reads the manifest alone; memory does not grow with the cache."""

    def __init__(self, folder: Path, manifest: CacheManifest) -> None:
        """Use :meth:`open`."""
        self.folder = folder
        self.manifest = manifest
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "FeatureCache":
        """Open a cache, finished or not.

        Raises:
          CacheFormatError: If the folder is not a cache of a readable version, or holds no shard yet.
          CacheDamagedError: If the manifest was cut short or edited.
        """
        manifest = read_manifest(folder)
        if not manifest.shards:
            raise CacheFormatError(
                f"{folder}: the cache has no sealed shard yet; run the extract command that began it again to continue"
            )
        return cls(folder, manifest)

    @cached_property
    def index(self) -> DocumentIndex:
        """Where each document lies; read from every shard on first use."""
        readers = [self.shard(number) for number in range(len(self.manifest.shards))]
        lengths = [reader.doc_lengths.astype(np.int64) for reader in readers]
        return DocumentIndex(
            shard=np.repeat(np.arange(len(readers), dtype=np.int32), [len(part) for part in lengths]),
            start=np.concatenate([np.cumsum(part) - part for part in lengths]),
            length=np.concatenate(lengths),
            doc_id=np.concatenate([reader.doc_ids for reader in readers]),
        )

    def shard(self, number: int) -> ShardReader:
        """Open a shard by number; the most recently used stay open.

        Raises:
          CacheDamagedError: If its structure is not what the manifest says.
        """
        with self._lock:
            reader = self._readers.pop(number, None)
            if reader is None:
                reader = ShardReader(self.folder, self.manifest, number)
            self._readers[number] = reader
            if len(self._readers) > _OPEN_SHARDS:
                # Not closed here: another thread may be reading it. Its files close with its last user.
                self._readers.popitem(last=False)
            return reader

    def read(self, document: int, start: int = 0, stop: int | None = None) -> DocumentSlice:
        """Read tokens start to stop of a document.

        Args:
          document: Its ordinal in this cache, 0-based.
          start, stop: Token range in the document; None reads to its end.

        Raises:
          CacheDamagedError: If a chunk is missing or altered, or the positions are not those of the document.
        """
        length = int(self.index.length[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"document {document} has {length} tokens, asked for {start} to {stop}")
        reader = self.shard(int(self.index.shard[document]))
        first = int(self.index.start[document])
        lo, hi = first + start, first + stop
        arrays = reader.arrays
        positions = arrays["positions"].read(lo, hi)
        if not np.array_equal(positions, np.arange(start, stop, dtype=np.int32)):
            raise CacheDamagedError(
                f"{arrays['positions'].path}: damaged: rows {lo} to {hi} are not positions {start} to {stop} of "
                f"document {document}. Restore this shard from a copy, or delete the cache and run extract again."
            )
        return DocumentSlice(
            input_ids=arrays["input_ids"].read(lo, hi),
            positions=positions,
            loss_mask=arrays["loss_mask"].read(lo, hi),
            fc_features=arrays["fc_features"].read(lo, hi),
            last_hidden_states=arrays["last_hidden_states"].read(lo, hi),
        )

    def attached(self, name: str) -> Path:
        """Return the path of a file that travels with the cache, after checking its digest.

        Raises:
          CacheDamagedError: If it is missing or altered.
        """
        path = self.folder / name
        entry = {str(key): value for key, value in self.manifest.attached.items()}.get(name)
        if entry is None:
            raise CacheDamagedError(
                f"{self.folder}: the manifest lists no {name}; run the extract command that began this cache again"
            )
        if not path.is_file() or file_digest(path) != entry:
            raise CacheDamagedError(
                f"{path}: damaged: it is missing or not the file that was sealed ({entry.bytes} bytes). Restore it "
                "from a copy, or delete the cache and run extract again."
            )
        return path
