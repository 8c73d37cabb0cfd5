"""Who may look at whom: the drafter's attention mask (dflash.md section 3).

Queries are the A*K slots of all blocks, block after block; keys are the row's T context tokens, then the same A*K
slots. Shape letters: T tokens of a row, A anchors, K slots of a block, N heads, Q queries, S keys, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dflash_cache.drafter.config import WindowRule

__all__ = ["BlockPlacement", "SlidingWindow", "attend", "visibility"]


@dataclass(frozen=True)
class SlidingWindow:
    """How far back a sliding layer looks.

    Attributes:
      size: W, in tokens.
      rule: Whether W counts from the query or from the anchor.
    """

    size: int
    rule: WindowRule


@dataclass(frozen=True)
class BlockPlacement:
    """Where blocks stand in the context.

    Attributes:
      anchor_index: Row index of each anchor; T when the block follows the whole context; int64 [A].
      anchor_doc: Document of each anchor, -1 for one that sees no context (padding); int64 [A].
      doc_ids: Document of each context token, -1 for padding; int64 [T].
      block_size: K.
    """

    anchor_index: Tensor
    anchor_doc: Tensor
    doc_ids: Tensor
    block_size: int


def visibility(placement: BlockPlacement, window: SlidingWindow | None) -> Tensor:
    """Build the mask of one kind of layer.

    A slot sees the context strictly before its anchor and inside the anchor's document: the target has not yet read
    the anchor when it is drafted from. It sees its own block, and no other: all of it on full layers, itself and
    earlier slots on sliding ones. Windows are measured in row indices, which differ inside a document as positions do.
    Every slot sees at least itself, padding too, so that no softmax is empty.

    Args:
      placement: Blocks and context.
      window: The sliding layers' window; None for full layers.

    Returns:
      Bool [A*K, T + A*K], True where the query (row) may look at the key (column).
    """
    visible_AKT = _context_visible(placement, window)
    visible_AKAK = _block_visible(placement, causal=window is not None)
    num_queries = visible_AKAK.shape[0] * placement.block_size
    return torch.cat([visible_AKT.flatten(0, 1), visible_AKAK.reshape(num_queries, num_queries)], dim=1)


def _context_visible(placement: BlockPlacement, window: SlidingWindow | None) -> Tensor:
    """Which context tokens each slot sees; bool [A, K, T]."""
    device = placement.doc_ids.device
    key_T = torch.arange(len(placement.doc_ids), device=device)
    slot_K = torch.arange(placement.block_size, device=device)
    anchor_A1, anchor_doc_A1 = placement.anchor_index[:, None], placement.anchor_doc[:, None]
    visible_AT = (key_T < anchor_A1) & (placement.doc_ids == anchor_doc_A1) & (anchor_doc_A1 >= 0)
    if window is None:
        return visible_AT[:, None].expand(-1, placement.block_size, -1)
    if window.rule == "anchor":
        oldest_AK = (anchor_A1 - window.size).expand(-1, placement.block_size)
    else:
        oldest_AK = anchor_A1 + slot_K - window.size + 1
    return visible_AT[:, None] & (key_T >= oldest_AK[..., None])


def _block_visible(placement: BlockPlacement, *, causal: bool) -> Tensor:
    """Which slots each slot sees; bool [A, K, A, K]. Blocks are told apart by their place, not by their tokens."""
    num_blocks, block_size = len(placement.anchor_index), placement.block_size
    device = placement.doc_ids.device
    same_block_AA = torch.eye(num_blocks, dtype=torch.bool, device=device)
    inside_KK = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if causal:
        inside_KK = inside_KK.tril()
    return same_block_AA[:, None, :, None] & inside_KK[None, :, None, :]


def attend(query_NQE: Tensor, key_NSE: Tensor, value_NSE: Tensor, visible_QS: Tensor) -> Tensor:
    """Masked softmax attention, scaled by 1 / sqrt(head size).

    Args:
      query_NQE: One row's queries, N query heads.
      key_NSE, value_NSE: Keys and values, their heads a divisor of N.
      visible_QS: Boolean, True where a query may look; a mask of any other type would be *added* to the scores.

    Returns:
      [N, Q, E], in the queries' dtype.
    """
    assert visible_QS.dtype == torch.bool
    # Shared heads are copied out: not every memory-saving kernel takes a mask together with grouped heads.
    group = query_NQE.shape[0] // key_NSE.shape[0]
    key_NSE = key_NSE.repeat_interleave(group, dim=0)
    value_NSE = value_NSE.repeat_interleave(group, dim=0)
    return functional.scaled_dot_product_attention(
        query_NQE[None], key_NSE[None], value_NSE[None], attn_mask=visible_QS[None, None]
    )[0]
