"""Encode and decode one array file: a zarr v3 ``sharding_indexed`` object, written and read directly.

Written whole, once, chunks in order; read by byte range. zarr-python, zarrs and tensorstore read the same bytes
(docs/format.md). Reading through zarr-python's own pipeline takes two to six times as long (docs/benchmarks.md).
"""

import itertools
import os
import struct
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, BinaryIO

import crc32c
import numcodecs.blosc
import numpy as np
import numpy.typing as npt
import xxhash

from dflash_cache.errors import CacheDamagedError
from dflash_cache.format.layout import BLOSC_BLOCK_BYTES, ArrayLayout

__all__ = ["ArrayReader", "write_array"]

# Blosc's own threads finish blocks in any order and so make different bytes from the same values.
numcodecs.blosc.use_threads = False

_INDEX_ENTRY = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")
_CHUNKS_IN_FLIGHT = 16

Array = npt.NDArray[Any]


def write_array(file: BinaryIO, layout: ArrayLayout, values: Array, executor: Executor) -> str:
    """Write an array's data file.

    Args:
      file: Open for writing, empty.
      layout: The array's layout; values has its shape and in-memory dtype.
      values: The numbers; bfloat16 as uint16.
      executor: Threads that compress.

    Returns:
      The xxh3-128 hex digest of the bytes written.
    """
    if values.shape != layout.shape or values.dtype != np.dtype(layout.memory_dtype):
        raise ValueError(
            f"{layout.name}: got {values.dtype} {values.shape}, expected {layout.memory_dtype} {layout.shape}"
        )
    hasher = xxhash.xxh3_128()
    index = bytearray()
    offset = 0
    for encoded in _encoded_chunks(layout, values, executor):
        file.write(encoded)
        hasher.update(encoded)
        index += _INDEX_ENTRY.pack(offset, len(encoded))
        offset += len(encoded)
    index += _CHECKSUM.pack(crc32c.crc32c(bytes(index)))
    file.write(index)
    hasher.update(index)
    return hasher.hexdigest()


def _encoded_chunks(layout: ArrayLayout, values: Array, executor: Executor) -> Iterator[bytes]:
    """Encode in threads, in order, with a bounded number of chunks in memory."""
    starts = iter(range(0, layout.num_chunks * layout.chunk_items, layout.chunk_items))
    while group := list(itertools.islice(starts, _CHUNKS_IN_FLIGHT)):
        yield from executor.map(lambda start: _encode_chunk(layout, values[start : start + layout.chunk_items]), group)


def _encode_chunk(layout: ArrayLayout, rows: Array) -> bytes:
    if len(rows) < layout.chunk_items:  # zarr chunks are always whole: the last one is padded
        padded = np.full(layout.chunk_shape, layout.fill_value, dtype=layout.memory_dtype)
        padded[: len(rows)] = rows
        rows = padded
    if layout.layer_major:
        rows = rows.transpose(1, 0, 2)
    rows = np.ascontiguousarray(rows)
    if layout.compressed:
        shuffle = numcodecs.blosc.SHUFFLE if rows.itemsize > 1 else numcodecs.blosc.NOSHUFFLE
        payload = bytes(numcodecs.blosc.compress(rows, b"zstd", 1, shuffle, BLOSC_BLOCK_BYTES))
    else:
        payload = rows.tobytes()
    return payload + _CHECKSUM.pack(crc32c.crc32c(payload))


class ArrayReader:
    """Read row ranges of one array file, each chunk checked against its checksum.

    Safe to use from several threads at once. A missing, cut or altered chunk raises; it never reads as zeros.
    """

    def __init__(self, path: Path, layout: ArrayLayout) -> None:
        """Open the file and check its chunk index.

        Raises:
          CacheDamagedError: If the file is missing, cut short, or its index is not intact.
        """
        self.path = path
        self.layout = layout
        try:
            self._file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise _damaged(path, "the file is missing") from error
        try:
            self._offsets, self._sizes = self._read_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Read rows start to stop of the first axis.

        Args:
          start, stop: 0 <= start <= stop <= shape[0].
          out: Where to put them, [stop - start, ...] of the layout's in-memory dtype; None allocates.

        Returns:
          The rows.

        Raises:
          CacheDamagedError: Naming the file and the chunk.
        """
        layout = self.layout
        if not 0 <= start <= stop <= layout.shape[0]:
            raise ValueError(f"{layout.name}: rows {start} to {stop} of {layout.shape[0]}")
        if out is None:
            out = np.empty((stop - start, *layout.shape[1:]), dtype=layout.memory_dtype)
        step = layout.chunk_items
        for chunk in range(start // step, -(-stop // step)):
            rows = self._read_chunk(chunk)
            lo, hi = max(start, chunk * step), min(stop, (chunk + 1) * step)
            out[lo - start : hi - start] = rows[lo - chunk * step : hi - chunk * step]
        return out

    def _read_index(self) -> tuple[list[int], list[int]]:
        count = self.layout.num_chunks
        index_bytes = count * _INDEX_ENTRY.size + _CHECKSUM.size
        size = os.fstat(self._file).st_size
        if size < index_bytes:
            raise _damaged(self.path, f"it has {size} bytes, fewer than its index of {index_bytes}")
        index = os.pread(self._file, index_bytes, size - index_bytes)
        entries = index[: -_CHECKSUM.size]
        if crc32c.crc32c(entries) != _CHECKSUM.unpack(index[-_CHECKSUM.size :])[0]:
            raise _damaged(self.path, "the checksum of its chunk index does not match")
        offsets, sizes = zip(*_INDEX_ENTRY.iter_unpack(entries), strict=True)
        for chunk, (offset, nbytes) in enumerate(zip(offsets, sizes, strict=True)):
            if offset + nbytes > size - index_bytes:  # also catches zarr's mark for a missing chunk, 2^64 - 1
                raise _damaged(self.path, f"chunk {chunk} of {count} is missing or lies outside the file")
        return list(offsets), list(sizes)

    def _read_chunk(self, chunk: int) -> Array:
        layout = self.layout
        nbytes = self._sizes[chunk]
        encoded = os.pread(self._file, nbytes, self._offsets[chunk])
        if len(encoded) != nbytes or nbytes < _CHECKSUM.size:
            raise _damaged(self.path, f"chunk {chunk} has {len(encoded)} bytes, expected {nbytes}")
        payload = memoryview(encoded)[: -_CHECKSUM.size]
        if crc32c.crc32c(payload) != _CHECKSUM.unpack(encoded[-_CHECKSUM.size :])[0]:
            raise _damaged(self.path, f"the checksum of chunk {chunk} does not match")
        stored_shape = layout.chunk_shape
        if layout.layer_major:
            stored_shape = (stored_shape[1], stored_shape[0], stored_shape[2])
        raw: Any = payload
        if layout.compressed:
            try:
                raw = numcodecs.blosc.decompress(payload)
            except (RuntimeError, ValueError) as error:
                raise _damaged(self.path, f"chunk {chunk} cannot be decompressed: {error}") from error
        expected = int(np.prod(stored_shape)) * np.dtype(layout.memory_dtype).itemsize
        if len(raw) != expected:
            raise _damaged(self.path, f"chunk {chunk} decodes to {len(raw)} bytes, expected {expected}")
        rows = np.frombuffer(raw, dtype=layout.memory_dtype).reshape(stored_shape)
        return rows.transpose(1, 0, 2) if layout.layer_major else rows


def _damaged(path: Path, what: str) -> CacheDamagedError:
    return CacheDamagedError(
        f"{path}: damaged: {what}. Run `dflash-cache inspect cache --verify` for the full list; restore this shard "
        "from a copy, or delete the cache and run extract again."
    )
