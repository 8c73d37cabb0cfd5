"""The drafter network, in z-lab's architecture and weight names (dflash.md section 1).

Shape letters: T context tokens, L fc layers, H hidden size, A anchors, K slots of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_cache.drafter.anchors import Anchors
from dflash_cache.drafter.attention import BlockPlacement, SlidingWindow, visibility
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.layers import DraftLayer, RMSNorm, as_weight, linear, rotary_tables

__all__ = ["DraftContext", "Drafter"]


@dataclass(frozen=True)
class DraftContext:
    """What the drafter knows of a row.

    Attributes:
      fc_features: Target states of every token; [T, L, H], L in the order of ``target_layer_ids``.
      positions: Index of each token within its document; int64 [T].
      doc_ids: Document of each token, -1 for padding; int64 [T].
    """

    fc_features: Tensor
    positions: Tensor
    doc_ids: Tensor


class Drafter(nn.Module):
    """A few layers that draft a whole block at once from the target's states before it.

    A new drafter holds NaN matrices: load weights or call :meth:`initialize`. Embedding and lm_head are the target's
    and no part of it: it takes embedded blocks and returns hidden states ready for lm_head.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw matrices from normal(0, initializer_range) and set gains to 1.

        Args:
          generator: On the parameters' device; drawn on the CPU, weights do not depend on the GPU.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)

    def forward(self, context: DraftContext, anchors: Anchors, block_embeddings_AKH: Tensor) -> Tensor:
        """Draft a block at every anchor of a packed row, independently of each other.

        Args:
          context: The row; only what lies before an anchor in its own document reaches that anchor's block.
          anchors: A anchors on the row's device; blocks of invalid ones are computed without context.
          block_embeddings_AKH: The target's embeddings of each anchor's token and K - 1 mask tokens.

        Returns:
          [A, K, H], after the last norm.
        """
        anchor_doc_A = context.doc_ids[anchors.positions].masked_fill(~anchors.valid, -1)
        placement = BlockPlacement(anchors.positions, anchor_doc_A, context.doc_ids, self.config.block_size)
        block_positions_A = context.positions[anchors.positions]
        return self._draft(
            self.encode_context(context.fc_features),
            context.positions,
            placement,
            block_positions_A,
            block_embeddings_AKH,
        )

    def draft_block(self, context_TH: Tensor, block_embeddings_KH: Tensor) -> Tensor:
        """Draft the one block that follows a context, as in decoding.

        Args:
          context_TH: :meth:`encode_context` of the T tokens of one document before the anchor, positions 0..T-1.
          block_embeddings_KH: Embeddings of the anchor, at position T, and of K - 1 mask tokens.

        Returns:
          [K, H], after the last norm.
        """
        device = context_TH.device
        num_context = torch.tensor([len(context_TH)], device=device)
        placement = BlockPlacement(
            anchor_index=num_context,
            anchor_doc=torch.zeros_like(num_context),
            doc_ids=torch.zeros(len(context_TH), dtype=torch.int64, device=device),
            block_size=self.config.block_size,
        )
        positions_T = torch.arange(len(context_TH), device=device)
        return self._draft(context_TH, positions_T, placement, num_context, block_embeddings_KH[None])[0]

    def encode_context(self, fc_features_TLH: Tensor) -> Tensor:
        """Merge the fc features of each token into the context that all layers share; [T, H]."""
        merged_TH = self.fc(as_weight(fc_features_TLH.flatten(1), self.fc.weight))
        context_TH: Tensor = self.hidden_norm(merged_TH)
        return context_TH

    def _draft(
        self,
        context_TH: Tensor,
        context_positions_T: Tensor,
        placement: BlockPlacement,
        block_positions_A: Tensor,
        block_embeddings_AKH: Tensor,
    ) -> Tensor:
        num_blocks, block_size, _ = block_embeddings_AKH.shape
        slot_K = torch.arange(block_size, device=block_positions_A.device)
        positions = torch.cat([context_positions_T, (block_positions_A[:, None] + slot_K).flatten()])
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        # One mask for each kind of layer, not one for each layer: it is the largest tensor here.
        visible = {kind: visibility(placement, self._window(kind)) for kind in set(self.config.layer_types)}
        # The residual stream keeps the weights' precision, under autocast too.
        block_QH = block_embeddings_AKH.flatten(0, 1).to(self.fc.weight.dtype)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            block_QH = layer(block_QH, context_TH, tables, visible[kind])
        drafted_QH: Tensor = self.norm(block_QH)
        return drafted_QH.view(num_blocks, block_size, self.config.hidden_size)

    def _window(self, kind: str) -> SlidingWindow | None:
        if kind == "full_attention" or self.config.sliding_window is None:
            return None
        return SlidingWindow(self.config.sliding_window, self.config.sliding_window_rule)
