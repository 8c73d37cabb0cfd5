"""The whole course of training as numbers: epochs, steps, rows. A place in it is two plain integers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_cache.stream.order import epoch_order
from dflash_cache.stream.packing import Piece, RowPlans, pack_documents

__all__ = ["StepPlan", "StreamPosition", "TrainingPlan"]


@dataclass(frozen=True)
class StreamPosition:
    """The next row to be trained on: a 0-based epoch and a 0-based row in it."""

    epoch: int
    row: int


@dataclass(frozen=True)
class StepPlan:
    """The rows of one optimizer step.

    Attributes:
      start: Where the step begins.
      rows: The pieces of each of its rows.
      next: Where the next step begins.
    """

    start: StreamPosition
    rows: tuple[tuple[Piece, ...], ...]
    next: StreamPosition


class TrainingPlan:
    """Rows of every epoch, as a pure function of document lengths, seed and row size.

    A step never spans two epochs: the last one of an epoch may have fewer rows.
    """

    def __init__(
        self,
        documents: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        *,
        seed: int,
        row_tokens: int,
        rows_per_step: int,
    ) -> None:
        """Describe a course of training.

        Args:
          documents: Ordinals of the training documents; at least one.
          lengths: Tokens of every document of the cache, indexed by ordinal.
          seed: Of the run.
          row_tokens: Capacity of a row.
          rows_per_step: Rows of one optimizer step.
        """
        if not len(documents):
            raise ValueError("a training plan needs at least one document")
        self._documents = documents
        self._lengths = lengths
        self._seed = seed
        self._row_tokens = row_tokens
        self._rows_per_step = rows_per_step
        # Reading ahead crosses into the next epoch while the last rows of this one are trained on.
        self.epoch = lru_cache(maxsize=2)(self._pack_epoch)

    def num_steps(self, *, epochs: int, max_steps: int | None) -> int:
        """Count optimizer steps: of so many epochs, at most ``max_steps``.

        Each epoch is packed for it, since another order packs into a slightly different number of rows.
        """
        steps = 0
        for epoch in range(epochs):
            steps += -(-len(self.epoch(epoch)) // self._rows_per_step)
            if max_steps is not None and steps >= max_steps:
                return max_steps
        return steps

    def steps(self, position: StreamPosition) -> Iterator[StepPlan]:
        """Yield steps from a position on, without end; nothing before it is computed."""
        epoch, row = position.epoch, position.row
        while True:
            rows = self.epoch(epoch)
            stop = min(row + self._rows_per_step, len(rows))
            following = StreamPosition(epoch, stop) if stop < len(rows) else StreamPosition(epoch + 1, 0)
            if stop > row:
                yield StepPlan(StreamPosition(epoch, row), tuple(rows.row(i) for i in range(row, stop)), following)
            epoch, row = following.epoch, following.row

    def _pack_epoch(self, epoch: int) -> RowPlans:
        order = epoch_order(self._documents, seed=self._seed, epoch=epoch)
        return pack_documents(order, self._lengths, row_tokens=self._row_tokens)
