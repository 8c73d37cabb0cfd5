"""One packed row, checked once when it is made.

Shape letters: T tokens of the row, L fc layers, H hidden size.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

__all__ = ["PackedBatch"]


@dataclass(frozen=True)
class PackedBatch:
    """The documents of a row, one after another. Build it on the CPU and call :meth:`check` once.

    Attributes:
      input_ids: Int64 [T].
      positions: Index of each token within its document; int64 [T].
      doc_ids: Document number within the row, 0.., then -1 for padding; int64 [T].
      loss_mask: Supervised tokens; bool [T].
      fc_features: Bfloat16 [T, L, H].
      last_hidden_states: Before the final norm; bfloat16 [T, H].
      corpus_ids: For each document number, its document's index in the corpus.
    """

    input_ids: Tensor
    positions: Tensor
    doc_ids: Tensor
    loss_mask: Tensor
    fc_features: Tensor
    last_hidden_states: Tensor
    corpus_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    def check(self, *, vocab_size: int) -> Self:
        """Check shapes, dtypes and values.

        Args:
          vocab_size: Ids lie in [0, vocab_size).

        Returns:
          The batch itself.

        Raises:
          ValueError: Naming the field, what it is and what it should be.
        """
        self._check_layout()
        self._check_documents()
        if len(self) and not 0 <= int(self.input_ids.min()) <= int(self.input_ids.max()) < vocab_size:
            low, high = int(self.input_ids.min()), int(self.input_ids.max())
            raise ValueError(f"input_ids lie in [{low}, {high}], expected [0, {vocab_size - 1}] in {self.describe()}")
        return self

    def to(self, device: torch.device) -> "PackedBatch":
        """Copy to a device, without waiting when the memory is pinned."""
        return replace(
            self,
            **{
                name: getattr(self, name).to(device, non_blocking=True)
                for name in (
                    "input_ids",
                    "positions",
                    "doc_ids",
                    "loss_mask",
                    "fc_features",
                    "last_hidden_states",
                )
            },
        )

    def with_fc_features(self, fc_features_TLH: Tensor) -> "PackedBatch":
        """Replace the fc features, and nothing else."""
        return replace(self, fc_features=fc_features_TLH)

    def describe(self) -> str:
        """Name the row's documents for an error message."""
        shown = ", ".join(str(corpus_id) for corpus_id in self.corpus_ids[:8])
        more = f" and {len(self.corpus_ids) - 8} more" if len(self.corpus_ids) > 8 else ""
        return f"corpus document{'s' if len(self.corpus_ids) != 1 else ''} {shown}{more}"

    def _check_layout(self) -> None:
        num_tokens = self.input_ids.numel()
        for name, dtype, ndim in (
            ("input_ids", torch.int64, 1),
            ("positions", torch.int64, 1),
            ("doc_ids", torch.int64, 1),
            ("loss_mask", torch.bool, 1),
            ("fc_features", torch.bfloat16, 3),
            ("last_hidden_states", torch.bfloat16, 2),
        ):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.ndim != ndim or len(tensor) != num_tokens:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} of {ndim} dimensions, the first "
                    f"of {num_tokens} tokens, in {self.describe()}"
                )
        if self.fc_features.shape[2] != self.last_hidden_states.shape[1]:
            raise ValueError(
                f"fc_features are {self.fc_features.shape[2]} wide, last_hidden_states "
                f"{self.last_hidden_states.shape[1]}, expected one hidden size, in {self.describe()}"
            )

    def _check_documents(self) -> None:
        numbers, counts = torch.unique_consecutive(self.doc_ids, return_counts=True)
        expected = list(range(len(self.corpus_ids)))
        found = numbers.tolist()
        if found not in (expected, [*expected, -1]):
            raise ValueError(
                f"doc_ids run through {found}, expected {expected} and at most -1 behind them, in {self.describe()}"
            )
        start = 0
        for number, count in zip(found, counts.tolist(), strict=True):
            positions = self.positions[start : start + count]
            start += count
            if number < 0:
                if bool(self.loss_mask[start - count :].any()):
                    raise ValueError(f"padding is marked as supervised in {self.describe()}")
            elif int(positions[0]) < 0 or not bool((positions.diff() == 1).all()):
                raise ValueError(
                    f"positions of corpus document {self.corpus_ids[number]} do not count up one by one from its first "
                    "token"
                )
