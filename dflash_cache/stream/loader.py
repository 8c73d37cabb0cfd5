"""Read rows from a cache, a few ahead of whoever uses them.

Rows are read straight into the memory that is handed out: torch sees the stored bfloat16 bits through a view, and on a
GPU machine that memory is pinned. Shape letters: n tokens of a piece, T tokens of a row, L fc layers, H hidden size.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_cache.errors import CacheDamagedError, NonFiniteError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.shard import ShardReader
from dflash_cache.stream.batch import PackedBatch
from dflash_cache.stream.packing import Piece

__all__ = ["PREFETCH_ROWS", "RowPrefetcher", "RowReader"]

# One row in use and up to three being read bound the memory; two threads decompress while a third row waits.
PREFETCH_ROWS = 3
_READER_THREADS = 2

_MAGNITUDE_BITS = np.uint16(0x7FFF)
_INFINITY_BITS = 0x7F80
# States are checked a few hundred kilobytes at a time, while they are still in the processor's cache.
_CHECK_BYTES = 1 << 18

Array = npt.NDArray[Any]


class RowReader:
    """Builds packed rows from a cache. Safe to use from several threads at once."""

    def __init__(self, cache: FeatureCache, *, pin_memory: bool = False) -> None:
        """Read from an open cache.

        Args:
          cache: The cache; its index is read now.
          pin_memory: Whether rows lie in page-locked memory, for copies to a GPU that do not block.
        """
        self._cache = cache
        self._pin_memory = pin_memory
        self._index = cache.index

    def read(self, pieces: tuple[Piece, ...]) -> PackedBatch:
        """Read and check one row.

        Args:
          pieces: What the row consists of, in order.

        Raises:
          CacheDamagedError: If stored bytes are missing or altered, naming file and document.
          NonFiniteError: If a feature is NaN, infinite, or a whole state is zero, naming shard, document and token.
        """
        features = self._cache.manifest.identity.features
        lengths = [piece.stop - piece.start for piece in pieces]
        num_tokens, hidden = sum(lengths), features.hidden_size
        fc_features = self._empty((num_tokens, len(features.fc_layers), hidden), torch.bfloat16)
        last_hidden_states = self._empty((num_tokens, hidden), torch.bfloat16)
        input_ids = self._empty((num_tokens,), torch.int32)
        positions = self._empty((num_tokens,), torch.int32)
        loss_mask = self._empty((num_tokens,), torch.bool)
        planes = {
            "input_ids": input_ids.numpy(),
            "positions": positions.numpy(),
            "loss_mask": loss_mask.numpy(),
            "fc_features": fc_features.view(torch.uint16).numpy(),
            "last_hidden_states": last_hidden_states.view(torch.uint16).numpy(),
        }
        start = 0
        for piece, length in zip(pieces, lengths, strict=True):
            rows = slice(start, start + length)
            self._read_piece(piece, {name: plane[rows] for name, plane in planes.items()})
            start += length
        doc_ids = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor(lengths))
        batch = PackedBatch(
            input_ids=input_ids.to(torch.int64),
            positions=positions.to(torch.int64),
            doc_ids=doc_ids,
            loss_mask=loss_mask,
            fc_features=fc_features,
            last_hidden_states=last_hidden_states,
            corpus_ids=tuple(int(self._index.doc_id[piece.document]) for piece in pieces),
        )
        try:
            return batch.check(vocab_size=self._cache.manifest.identity.target.vocab_size)
        except ValueError as error:
            raise CacheDamagedError(
                f"{self._cache.folder}: {error}. Run `dflash-cache inspect cache --verify` to find out what is damaged."
            ) from error

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)

    def _read_piece(self, piece: Piece, planes: dict[str, Array]) -> None:
        document = piece.document
        try:
            shard = self._cache.shard(int(self._index.shard[document]))
            first = int(self._index.start[document])
            for name, plane in planes.items():
                shard.arrays[name].read(first + piece.start, first + piece.stop, out=plane)
        except CacheDamagedError as error:
            raise CacheDamagedError(
                f"corpus document {int(self._index.doc_id[document])} of the cache {self._cache.folder} cannot be "
                f"read: {error}"
            ) from error
        if not np.array_equal(planes["positions"], np.arange(piece.start, piece.stop, dtype=np.int32)):
            raise CacheDamagedError(
                f"{self._where(shard, document)}: damaged: its rows are not its positions {piece.start} to "
                f"{piece.stop}. Restore this shard from a copy, or delete the cache and run extract again."
            )
        for name in ("fc_features", "last_hidden_states"):
            self._check_states(planes[name], name, shard, piece)

    def _check_states(self, states: Array, name: str, shard: ShardReader, piece: Piece) -> None:
        """Refuse states that are not finite, or all zero: both train without an error and ruin the drafter."""
        row_bytes = states[0].nbytes
        step = max(1, _CHECK_BYTES // row_bytes)
        for start in range(0, len(states), step):
            largest = (states[start : start + step] & _MAGNITUDE_BITS).max(axis=-1)
            if int(largest.min()) > 0 and int(largest.max()) < _INFINITY_BITS:
                continue
            bad = np.argwhere((largest == 0) | (largest >= _INFINITY_BITS))[0]
            layers = self._cache.manifest.identity.features
            layer = layers.fc_layer_indices[bad[1]] if name == "fc_features" else layers.last_layer.index
            zero = largest[tuple(bad)] == 0
            raise NonFiniteError(
                f"{self._where(shard, piece.document)}: {name} of layer {layer} at position "
                f"{piece.start + start + int(bad[0])} {'are all zero' if zero else 'hold NaN or infinity'}; the target "
                "cannot have computed that. Nothing was trained on it. Extract this cache again, with "
                "--dtype float32 or bfloat16 if the target ran in float16."
            )

    def _where(self, shard: ShardReader, document: int) -> str:
        doc_id = int(self._index.doc_id[document])
        return f"{self._cache.folder}, {shard.entry.name}, corpus document {doc_id}"


class RowPrefetcher(Iterator[PackedBatch]):
    """Delivers rows in order while the next ones are read in threads. Use as a context manager.

    An error of a reading thread is raised where the row would have been delivered.

    Attributes:
      waited_seconds: Time that the consumer has spent waiting for rows.
    """

    def __init__(self, reader: RowReader, rows: Iterable[tuple[Piece, ...]], *, depth: int = PREFETCH_ROWS) -> None:
        """Begin reading when the first row is asked for.

        Args:
          reader: Where rows come from.
          rows: The pieces of each, consumed in the caller's thread, ``depth`` rows ahead.
          depth: Rows read ahead.
        """
        self.waited_seconds = 0.0
        self._reader = reader
        self._rows = iter(rows)
        self._depth = depth
        self._pending: deque[Future[PackedBatch]] = deque()
        self._executor = ThreadPoolExecutor(min(depth, _READER_THREADS), thread_name_prefix="read-rows")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> PackedBatch:
        self._read_ahead()
        if not self._pending:
            raise StopIteration
        future = self._pending.popleft()
        began = time.perf_counter()
        try:
            batch = future.result()
        finally:
            self.waited_seconds += time.perf_counter() - began
        self._read_ahead()
        return batch

    def close(self) -> None:
        """Stop reading and wait for the threads to end; rows not yet delivered are dropped."""
        self._rows = iter(())
        self._pending.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self) -> None:
        while len(self._pending) < self._depth:
            pieces = next(self._rows, None)
            if pieces is None:
                return
            self._pending.append(self._executor.submit(self._reader.read, pieces))
