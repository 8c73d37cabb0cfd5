"""Cut and pack documents into rows. Pure functions of numbers; P pieces, R rows."""

import bisect
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LOOKAHEAD_PIECES", "Piece", "RowPlans", "pack_documents"]

# Pieces that may overtake each other. A few hundred leave under 1 % of the rows empty on documents of mixed length, and
# still keep documents close to where the permutation put them.
LOOKAHEAD_PIECES = 256

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Tokens start to stop of a document, given by its ordinal in the cache."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlans:
    """What goes into each row, as flat arrays: millions of documents cost megabytes.

    Attributes:
      documents, starts, stops: Of each piece, in row order; int64 [P].
      row_ends: Index after each row's last piece; int64 [R].
      row_tokens: Tokens that a row can hold.
    """

    documents: IntArray
    starts: IntArray
    stops: IntArray
    row_ends: IntArray
    row_tokens: int

    def __len__(self) -> int:
        return len(self.row_ends)

    def row(self, number: int) -> tuple[Piece, ...]:
        """Return the pieces of a row, 0-based."""
        first = int(self.row_ends[number - 1]) if number else 0
        return tuple(
            Piece(int(self.documents[i]), int(self.starts[i]), int(self.stops[i]))
            for i in range(first, int(self.row_ends[number]))
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int((self.stops - self.starts).sum())

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that is used, in [0, 1]."""
        return self.num_tokens / (len(self) * self.row_tokens) if len(self) else 0.0


def pack_documents(
    documents: IntArray, lengths: IntArray, *, row_tokens: int, lookahead: int = LOOKAHEAD_PIECES
) -> RowPlans:
    """Pack documents, in the given order, into rows of at most ``row_tokens`` tokens.

    A row begins with the oldest piece that waits, then takes the longest one that still fits among the next
    ``lookahead`` (best fit), until none fits. A document longer than a row is cut into row-sized pieces, which know
    their place in it. Every token of every document is in exactly one row.

    Args:
      documents: Ordinals in the cache, in training order.
      lengths: Tokens of every document of the cache, indexed by ordinal.
      row_tokens: Capacity of a row.
      lookahead: Pieces that are considered at a time.
    """
    waiting = _Window(_pieces(documents, lengths, row_tokens), lookahead)
    packed, row_ends = array("q"), array("q")
    while (first := waiting.take_oldest()) is not None:
        packed.extend(first)
        space = row_tokens - _length(first)
        while space and (piece := waiting.take_longest(space)) is not None:
            packed.extend(piece)
            space -= _length(piece)
        row_ends.append(len(packed) // 3)
    columns = np.array(packed, dtype=np.int64).reshape(-1, 3)
    return RowPlans(columns[:, 0], columns[:, 1], columns[:, 2], np.array(row_ends, dtype=np.int64), row_tokens)


def _pieces(documents: IntArray, lengths: IntArray, row_tokens: int) -> Iterator[tuple[int, int, int]]:
    for document in documents.tolist():
        length = int(lengths[document])
        for start in range(0, length, row_tokens):
            yield document, start, min(start + row_tokens, length)


class _Window:
    """The next pieces, findable by age and by length; pieces arrive as others leave."""

    def __init__(self, pieces: Iterator[tuple[int, int, int]], size: int) -> None:
        self._pieces = enumerate(pieces)
        self._size = size
        self._by_age: deque[int] = deque()
        self._waiting: dict[int, tuple[int, int, int]] = {}
        # (length, -arrival), ascending: the last entry that fits is the longest, and the oldest of that length.
        self._by_length: list[tuple[int, int]] = []

    def take_oldest(self) -> tuple[int, int, int] | None:
        self._refill()
        while self._by_age:
            arrival = self._by_age.popleft()
            if arrival in self._waiting:
                key = (_length(self._waiting[arrival]), -arrival)
                return self._take(bisect.bisect_left(self._by_length, key))
        return None

    def take_longest(self, space: int) -> tuple[int, int, int] | None:
        self._refill()
        index = bisect.bisect_right(self._by_length, (space, 0)) - 1
        return self._take(index) if index >= 0 else None

    def _take(self, index: int) -> tuple[int, int, int]:
        _, negative_arrival = self._by_length.pop(index)
        return self._waiting.pop(-negative_arrival)

    def _refill(self) -> None:
        while len(self._waiting) < self._size:
            arrived = next(self._pieces, None)
            if arrived is None:
                return
            arrival, piece = arrived
            self._by_age.append(arrival)
            self._waiting[arrival] = piece
            bisect.insort(self._by_length, (_length(piece), -arrival))


def _length(piece: tuple[int, int, int]) -> int:
    return piece[2] - piece[1]
