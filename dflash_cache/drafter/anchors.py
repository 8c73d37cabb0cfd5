"""Where blocks start: eligible anchors, fair sampling, and what each slot of a block stands for.

Shape letters: T tokens of a row, D documents of a row, A anchors, K slots of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.errors import ConfigError

__all__ = [
    "AnchorCoverage",
    "Anchors",
    "BlockSlots",
    "all_anchors",
    "block_slots",
    "eligible_anchors",
    "sample_anchors",
]


@dataclass(frozen=True)
class AnchorCoverage:
    """How much of a row its anchors use, per document in row order.

    Attributes:
      eligible: Positions that could be anchors.
      used: Positions that are.
    """

    eligible: tuple[int, ...]
    used: tuple[int, ...]

    @property
    def num_eligible(self) -> int:
        """Eligible positions of the whole row."""
        return sum(self.eligible)

    @property
    def num_used(self) -> int:
        """Valid anchors of the whole row."""
        return sum(self.used)


@dataclass(frozen=True)
class Anchors:
    """The tokens that blocks start from.

    Attributes:
      positions: Indices into the row, not positions within a document; ascending, then 0 for padding; int64 [A].
      valid: Whether each is an anchor rather than padding; bool [A].
    """

    positions: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "Anchors":
        """Copy to a device."""
        return Anchors(self.positions.to(device, non_blocking=True), self.valid.to(device, non_blocking=True))

    def chunks(self, size: int) -> Iterator["Anchors"]:
        """Yield the anchors in order, ``size`` at a time, the last ones padded: every chunk has the same shape.

        Raises:
          ConfigError: If size is not positive.
        """
        if size < 1:
            raise ConfigError(f"anchors are taken in chunks of at least 1, got {size}")
        for start in range(0, len(self.positions), size):
            part = slice(start, start + size)
            yield _padded(self.positions[part], self.valid[part], size)

    def coverage(self, loss_mask_T: Tensor, doc_ids_T: Tensor, block_size: int) -> AnchorCoverage:
        """Count, per document, the eligible positions and those in use."""
        eligible_T = eligible_anchors(loss_mask_T, doc_ids_T, block_size)
        used_T = torch.zeros_like(eligible_T)
        used_T[self.positions[self.valid].to(used_T.device)] = True
        num_docs = int(doc_ids_T.max()) + 1 if doc_ids_T.numel() else 0
        per_document = [
            torch.bincount(doc_ids_T[chosen & (doc_ids_T >= 0)], minlength=num_docs).tolist()
            for chosen in (eligible_T, used_T)
        ]
        return AnchorCoverage(eligible=tuple(per_document[0]), used=tuple(per_document[1]))


@dataclass(frozen=True)
class BlockSlots:
    """What the slots of each block stand for.

    Attributes:
      token_index: Row index of each slot's token, anchor + slot, held inside the row; int64 [A, K].
      supervised: Slots with a target: not slot 0, of a valid anchor, in the anchor's own document, and marked in the
        loss mask; bool [A, K].
    """

    token_index: Tensor
    supervised: Tensor


def block_slots(anchors: Anchors, loss_mask_T: Tensor, doc_ids_T: Tensor, block_size: int) -> BlockSlots:
    """Lay a block of K slots over the row at each anchor.

    A slot past the end of the anchor's document is never supervised (dflash.md section 0); one behind a hole in the
    loss mask is, as in speculators and SpecForge (section 2).

    Args:
      anchors: A anchors on the row's device.
      loss_mask_T: Tokens that count as targets; bool [T].
      doc_ids_T: Document of each token, -1 for padding; int64 [T].
      block_size: K.
    """
    slot_K = torch.arange(block_size, device=anchors.positions.device)
    raw_AK = anchors.positions[:, None] + slot_K
    index_AK = raw_AK.clamp(max=len(loss_mask_T) - 1)
    anchor_doc_A1 = doc_ids_T[anchors.positions][:, None]
    own_document_AK = (raw_AK == index_AK) & (doc_ids_T[index_AK] == anchor_doc_A1) & (anchor_doc_A1 >= 0)
    supervised_AK = loss_mask_T[index_AK].bool() & own_document_AK & (slot_K >= 1) & anchors.valid[:, None]
    return BlockSlots(token_index=index_AK, supervised=supervised_AK)


def eligible_anchors(loss_mask_T: Tensor, doc_ids_T: Tensor, block_size: int) -> Tensor:
    """Mark the tokens that may be anchors: supervised, with a supervised slot 1..K-1 in the same document.

    Args:
      loss_mask_T: Bool [T].
      doc_ids_T: Int64 [T], -1 for padding; a document's tokens are contiguous.
      block_size: K.

    Returns:
      Bool [T].
    """
    num_tokens = len(loss_mask_T)
    mask_T = loss_mask_T.bool()
    _, run_T, run_lengths = torch.unique_consecutive(doc_ids_T, return_inverse=True, return_counts=True)
    doc_end_T = run_lengths.cumsum(0)[run_T]
    token_T = torch.arange(num_tokens, device=mask_T.device)
    block_end_T = torch.minimum(token_T + block_size, doc_end_T)
    before = torch.zeros(num_tokens + 1, dtype=torch.int64, device=mask_T.device)
    before[1:] = mask_T.cumsum(0)
    return mask_T & (doc_ids_T >= 0) & (before[block_end_T] > before[token_T + 1])


def all_anchors(loss_mask_T: Tensor, doc_ids_T: Tensor, block_size: int) -> Anchors:
    """Take every eligible position, for evaluation without chance; see :func:`eligible_anchors`."""
    positions = eligible_anchors(loss_mask_T, doc_ids_T, block_size).nonzero()[:, 0]
    return Anchors(positions, torch.ones_like(positions, dtype=torch.bool))


def sample_anchors(
    loss_mask_T: Tensor, doc_ids_T: Tensor, *, block_size: int, num_anchors: int, generator: torch.Generator
) -> Anchors:
    """Draw anchors without replacement, the row's budget shared fairly by its documents.

    Every document gets the same share; what a short one cannot use goes to the others, and what does not divide goes to
    documents chosen by lot. Within a document each eligible position is equally likely.

    Args:
      loss_mask_T: Bool [T].
      doc_ids_T: Int64 [T], -1 for padding; a document's tokens are contiguous.
      block_size: K.
      num_anchors: A, the row's budget and the length of the result.
      generator: A CPU generator, the only source of chance: its state before the call decides the anchors.

    Returns:
      Anchors on the CPU, ascending, padded to exactly A.

    Raises:
      ConfigError: If num_anchors is not positive.
    """
    if num_anchors < 1:
        raise ConfigError(f"num_anchors must be at least 1, got {num_anchors}")
    doc_ids_T = doc_ids_T.cpu()
    candidates = eligible_anchors(loss_mask_T.cpu(), doc_ids_T, block_size).nonzero()[:, 0]
    _, document, available_D = torch.unique_consecutive(doc_ids_T[candidates], return_inverse=True, return_counts=True)
    quota_D = _fair_shares(available_D, num_anchors, generator)
    # Shuffle all candidates, then bring documents together again without disturbing the order inside each.
    shuffled = torch.randperm(len(candidates), generator=generator)
    by_document = shuffled[document[shuffled].argsort(stable=True)]
    first_D = available_D.cumsum(0) - available_D
    sorted_document = document[by_document]
    rank = torch.arange(len(candidates)) - first_D[sorted_document]
    chosen = candidates[by_document[rank < quota_D[sorted_document]]].sort().values
    return _padded(chosen, torch.ones_like(chosen, dtype=torch.bool), num_anchors)


def _fair_shares(available_D: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    """Split a budget by water-filling; int64 [D], each at most what is available, summing to the lesser of the two."""
    if int(available_D.sum()) <= budget:
        return available_D
    ascending = available_D.sort().values
    num_docs = len(ascending)
    # filled[i]: the budget needed to give every document as much as the i-th smallest can use.
    others = torch.arange(num_docs, 0, -1)
    filled = ascending.cumsum(0) - ascending + ascending * others
    num_full = int((filled <= budget).sum())
    spent_on_full = int(ascending[:num_full].sum())
    level = (budget - spent_on_full) // (num_docs - num_full)
    share_D = available_D.clamp(max=level)
    wants_more = (available_D > level).nonzero()[:, 0]
    lot = torch.randperm(len(wants_more), generator=generator)[: budget - int(share_D.sum())]
    share_D[wants_more[lot]] += 1
    return share_D


def _padded(positions: Tensor, valid: Tensor, size: int) -> Anchors:
    padding = (0, size - len(positions))
    return Anchors(torch.nn.functional.pad(positions, padding), torch.nn.functional.pad(valid, padding, value=False))
