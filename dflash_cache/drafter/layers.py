"""The drafter's building blocks: norm, rotary embedding, attention over context and block, MLP.

Shape letters: T context tokens, Q slots of all blocks, H hidden size, N heads, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_cache.drafter.attention import attend
from dflash_cache.drafter.config import DrafterConfig

__all__ = ["DraftLayer", "RMSNorm", "RotaryTables", "apply_rotary", "as_weight", "rotary_tables"]


class RMSNorm(nn.Module):
    """Root-mean-square norm with gain w, computed in at least float32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normed = functional.rms_norm(hidden.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return normed.to(hidden.dtype)


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines of some positions; float32 [positions, E]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> RotaryTables:
    """Angles position * theta^(-2i/E), for both halves of a head (Su et al. 2021, in the half-split layout of Qwen3).

    Frequencies are computed here in float32 rather than kept as a buffer, which a cast of the module to bfloat16 would
    round: at position 30000 that moves angles by whole turns.

    Args:
      positions: Token indices within their documents; int64, any length.
      head_dim: E.
      theta: Base.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    inv_freq = 1.0 / (theta**exponent)
    with torch.autocast(positions.device.type, enabled=False):
        half = positions[:, None].to(torch.float32) * inv_freq
    angles = torch.cat([half, half], dim=-1)
    return RotaryTables(angles.cos(), angles.sin())


def apply_rotary(heads_NQE: Tensor, tables: RotaryTables) -> Tensor:
    """Turn each pair (i, i + E/2) by its angle; same shape and dtype."""
    first, second = heads_NQE.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads_NQE * tables.cos + turned * tables.sin).to(heads_NQE.dtype)


def as_weight(hidden: Tensor, weight: Tensor) -> Tensor:
    """Cast an input to its weight's dtype, unless autocast is about to choose one for both."""
    if torch.is_autocast_enabled(hidden.device.type):
        return hidden
    return hidden.to(weight.dtype)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A bias-free linear map whose weight is NaN until it is loaded or initialised, so that neither is forgotten.

    Built without storage first: no chance is spent on weights that are about to be replaced.
    """
    layer = nn.Linear(in_features, out_features, bias=False, device="meta")
    layer.to_empty(device=torch.get_default_device())
    nn.init.constant_(layer.weight, float("nan"))
    return layer


class DraftAttention(nn.Module):
    """Attention of block slots over the shared context and their own block; context tokens have no queries."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = linear(hidden, config.num_attention_heads * head_dim)
        self.k_proj = linear(hidden, config.num_key_value_heads * head_dim)
        self.v_proj = linear(hidden, config.num_key_value_heads * head_dim)
        self.o_proj = linear(config.num_attention_heads * head_dim, hidden)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, block_QH: Tensor, context_TH: Tensor, tables: RotaryTables, visible: Tensor) -> Tensor:
        """Mix context and block into each slot.

        Args:
          block_QH: Normed block stream.
          context_TH: The context as ``hidden_norm`` left it; this layer norms it no further, keys apart.
          tables: Angles of the T context tokens, then of the Q slots.
          visible: Bool [Q, T + Q].
        """
        num_context = len(context_TH)
        query_NQE = self.q_norm(self._heads(self.q_proj(block_QH)))
        key_NSE = self.k_norm(self._heads(torch.cat([self.k_proj(context_TH), self.k_proj(block_QH)])))
        value_NSE = self._heads(torch.cat([self.v_proj(context_TH), self.v_proj(block_QH)]))
        slot_tables = RotaryTables(tables.cos[num_context:], tables.sin[num_context:])
        mixed_NQE = attend(apply_rotary(query_NQE, slot_tables), apply_rotary(key_NSE, tables), value_NSE, visible)
        attended: Tensor = self.o_proj(mixed_NQE.transpose(0, 1).flatten(1))
        return attended

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), flat.shape[-1] // self.head_dim, self.head_dim).transpose(0, 1)


class DraftMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply to the last dimension."""
        widened: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return widened


class DraftLayer(nn.Module):
    """One pre-norm layer of the block stream."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(self, block_QH: Tensor, context_TH: Tensor, tables: RotaryTables, visible: Tensor) -> Tensor:
        """Add attention and MLP to the block stream; see :meth:`DraftAttention.forward`."""
        block_QH = block_QH + self.self_attn(self.input_layernorm(block_QH), context_TH, tables, visible)
        mlp_QH: Tensor = self.mlp(self.post_attention_layernorm(block_QH))
        return block_QH + mlp_QH
