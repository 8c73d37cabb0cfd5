"""Faster pieces for a loaded target on a GPU: the same arithmetic in fewer passes over memory.

A stock forward spends a fifth of its time outside matrix products, reading and writing the same activations again and
again. The pieces here belong to one loaded model: instance attributes on its modules, nothing patched globally. They
give the stock results up to the rounding of bfloat16, which the self-check holds them to like everything else.

Norms and activations are compiled by torch; gated delta nets need flash-linear-attention's kernels. On the CPU the
target runs as transformers runs it. Shape letters: B documents, S padded length, N rows, H hidden size.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_cache.errors import TargetError
from dflash_cache.extract.head import identify_norm
from dflash_cache.extract.loading import LoadedTarget

__all__ = ["Fusion", "can_fuse", "fuse_target"]

_GATED_DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_SLOW_DELTA_NETS = (
    "this target's linear attention runs several times slower than it could: pip install flash-linear-attention"
)


@dataclass(frozen=True)
class Fusion:
    """What was made faster.

    Attributes:
      norms, mlps, delta_nets: Modules of each kind that now run fused.
      missing: What would make the target faster and how to get it; None if nothing is missing.
    """

    norms: int = 0
    mlps: int = 0
    delta_nets: int = 0
    missing: str | None = None


def can_fuse(device: torch.device) -> bool:
    """Tell whether a target on this device is fused at all; known before its weights are loaded."""
    return device.type == "cuda"


def fuse_target(target: LoadedTarget) -> Fusion:
    """Fuse what is known how to fuse, in place.

    Merged weights replace the parts they were made of, which become views: memory does not grow. The final norm is left
    alone, since the head is read off it.

    Args:
      target: A loaded target; on a GPU, or nothing happens.
    """
    if not can_fuse(target.device):
        return Fusion()
    has_delta_nets = any(type(module).__name__ in _GATED_DELTA_NETS for module in target.layers.modules())
    has_kernels = importlib.util.find_spec("fla") is not None
    return Fusion(
        norms=_fuse_all(target, _fuse_norm),
        mlps=_fuse_all(target, _fuse_mlp),
        delta_nets=_fuse_all(target, _fuse_delta_net) if has_kernels else 0,
        missing=_SLOW_DELTA_NETS if has_delta_nets and not has_kernels else None,
    )


@torch.compile
def _compiled_rms_norm(rows_NH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    wide_NH = rows_NH.float()
    return (wide_NH * torch.rsqrt(wide_NH.pow(2).mean(-1, keepdim=True) + eps) * gain_H).to(rows_NH.dtype)


@torch.compile
def _compiled_swiglu(both_NI: Tensor, width: int) -> Tensor:
    return F.silu(both_NI[:, :width]) * both_NI[:, width:]


@torch.compile
def _compiled_gated_norm(rows_NH: Tensor, gate_NH: Tensor, gain_H: Tensor, eps: float) -> Tensor:
    wide_NH = rows_NH.float()
    normed_NH = wide_NH * torch.rsqrt(wide_NH.pow(2).mean(-1, keepdim=True) + eps)
    scaled_NH = gain_H * normed_NH.to(rows_NH.dtype)
    return (scaled_NH * F.silu(gate_NH.float())).to(rows_NH.dtype)


def _fuse_all(target: LoadedTarget, fuse: Callable[[nn.Module], bool]) -> int:
    return sum(fuse(module) for layer in target.layers for module in layer.modules())


def _fuse_norm(module: nn.Module) -> bool:
    """Fuse an RMS norm over the last dimension, gain w or 1 + w, found by probing it."""
    weight = getattr(module, "weight", None)
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.ndim == 1
    if not is_norm or list(module.children()) or len(list(module.parameters())) != 1:
        return False
    assert isinstance(weight, Tensor)
    try:
        spec = identify_norm(module, len(weight), type(module).__name__)
    except TargetError:  # some other function under a norm's name: it keeps its own forward
        return False
    if spec.kind == "layer_norm":
        return False
    gain_H = weight.detach().float() + 1.0 if spec.kind == "rms_one_plus" else weight.detach()

    def forward(hidden_states: Tensor) -> Tensor:
        # Flat rows: only their number changes from batch to batch, and nothing is compiled again for it.
        rows_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _compiled_rms_norm(rows_NH, gain_H, spec.eps).view(hidden_states.shape)

    _replace_forward(module, forward)
    return True


def _fuse_mlp(module: nn.Module) -> bool:
    """Fuse a SwiGLU MLP: one matrix for gate and up, silu and product in one pass."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = parts
    activation = getattr(module, "act_fn", None)
    if not (_are_plain(gate, up, down) and _is_silu(activation)):
        return False
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    merged = _merge(gate, up)
    width = gate.out_features

    def forward(hidden_states: Tensor) -> Tensor:
        rows_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
        wide_NI = _compiled_swiglu(F.linear(rows_NH, merged), width)
        return F.linear(wide_NI, down.weight).view(hidden_states.shape)

    _replace_forward(module, forward)
    return True


def _fuse_delta_net(module: nn.Module) -> bool:
    """Fuse Qwen3.5's gated delta net: one input matrix, no transposes, heads shared and gates made in the kernel."""
    if type(module).__name__ not in _GATED_DELTA_NETS:
        return False
    net: Any = module
    inputs = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    if not _are_plain(*inputs, net.out_proj) or net.activation != "silu":
        return False
    merged = _merge(*inputs)
    sizes = [part.out_features for part in inputs]
    _replace_forward(module, partial(_delta_net_forward, net, merged, sizes))
    return True


def _delta_net_forward(net: Any, merged: Tensor, sizes: list[int], hidden_states: Tensor, **_: Any) -> Tensor:
    """Mix tokens by the gated delta rule (Yang et al. 2024), as Qwen3.5's layer does without a cache.

    Args:
      net: The stock module.
      merged: Its four input matrices, one below the other.
      sizes: Their rows.
      hidden_states: [B, S, H].
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch, length, _hidden = hidden_states.shape
    mixed, z, b, a = torch.split(F.linear(hidden_states, merged), sizes, dim=-1)
    convolved = causal_conv1d(mixed, net.conv1d.weight.squeeze(1), net.conv1d.bias, activation=net.activation)
    mixed = convolved[0] if isinstance(convolved, tuple) else convolved
    query, key, value = torch.split(mixed, [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    keys, values = (batch, length, net.num_k_heads, net.head_k_dim), (batch, length, net.num_v_heads, net.head_v_dim)
    output, _state = chunk_gated_delta_rule(
        query.reshape(keys),
        key.reshape(keys),
        value.reshape(values),
        g=a,
        beta=b.sigmoid(),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=net.A_log,
        dt_bias=net.dt_bias,
    )
    flat = (-1, net.head_v_dim)
    normed = _compiled_gated_norm(output.reshape(flat), z.reshape(flat), net.norm.weight, net.norm.variance_epsilon)
    mixed_back: Tensor = net.out_proj(normed.view(batch, length, -1))
    return mixed_back


def _are_plain(*modules: object) -> bool:
    """Whether all are ordinary bias-free linear maps of one number format; quantised ones are not."""
    plain = all(type(module) is nn.Linear and module.bias is None for module in modules)
    return plain and len({module.weight.dtype for module in modules if isinstance(module, nn.Linear)}) == 1


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU")


@torch.no_grad()
def _merge(*linears: nn.Linear) -> Tensor:
    """Put weights into one matrix, of which each becomes a view."""
    merged = torch.cat([linear.weight for linear in linears])
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight = nn.Parameter(merged[start:stop], requires_grad=False)
        start = stop
    return merged


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Give one module, not its class, another forward; its hooks go on working."""
    module.forward = forward
