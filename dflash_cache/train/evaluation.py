"""Held-out evaluation without chance: every eligible anchor, no noise, no training generator touched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dflash_cache.drafter.anchors import all_anchors
from dflash_cache.drafter.metrics import Metrics, MetricSums
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import Objective
from dflash_cache.stream.batch import PackedBatch
from dflash_cache.stream.loader import RowPrefetcher, RowReader
from dflash_cache.stream.packing import RowPlans
from dflash_cache.train.step import autocast, explain_out_of_memory, no_sums

__all__ = ["Evaluator", "evaluate_row"]


@dataclass(frozen=True)
class Evaluator:
    """Measures a drafter on some rows.

    Attributes:
      objective: How it is judged; the same as in training.
      reader: Where rows come from.
      rows: What is in them.
      device: Where the drafter is.
      anchors_at_once: Anchors of one forward pass; bounds memory, changes no figure beyond rounding.
    """

    objective: Objective
    reader: RowReader
    rows: RowPlans
    device: torch.device
    anchors_at_once: int

    def __call__(self, drafter: Drafter, on_row: Callable[[int], bool] = lambda rows_done: True) -> Metrics | None:
        """Draft a block at every eligible position of every row.

        Args:
          drafter: Left in the mode that it was in.
          on_row: Told how many rows are done after each; False stops.

        Returns:
          Figures over all blocks; None if stopped.
        """
        sums = no_sums(self.objective, self.device)
        plans = (self.rows.row(number) for number in range(len(self.rows)))
        with _evaluating(drafter), RowPrefetcher(self.reader, plans) as rows:
            for rows_done, row in enumerate(rows, start=1):
                sums = sums + evaluate_row(self.objective, drafter, row.to(self.device), self.anchors_at_once)
                if not on_row(rows_done):
                    return None
        return sums.finalize(self.objective.loss)


def evaluate_row(objective: Objective, drafter: Drafter, row: PackedBatch, anchors_at_once: int) -> MetricSums:
    """Score every eligible anchor of one row, which lies on the drafter's device."""
    sums = no_sums(objective, row.input_ids.device)
    anchors = all_anchors(row.loss_mask, row.doc_ids, objective.config.block_size)
    with torch.no_grad(), autocast(row.input_ids.device), explain_out_of_memory():
        for some in anchors.chunks(anchors_at_once):
            sums = sums + objective(drafter, row, some).sums
    return sums


@contextmanager
def _evaluating(drafter: Drafter) -> Iterator[None]:
    was_training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(was_training)
