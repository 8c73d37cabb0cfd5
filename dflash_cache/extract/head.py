"""Find the target's embedding, final norm and lm_head by trying them out, not by their names.

Shapes: V vocabulary, H hidden size, N probe rows.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_cache.errors import TargetError
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.taps import hidden_states_of
from dflash_cache.spec import FinalNormSpec, NormKind
from dflash_cache.target_head import HeadSpec, TargetHead

__all__ = ["FoundHead", "find_head", "identify_norm"]

_PROBE_TOKENS = 8
_PROBE_ROWS = 16
_NORM_TOLERANCE = 1e-3
_SCALE_TOLERANCE = 0.02


@dataclass(frozen=True)
class FoundHead:
    """The head, and the module that is the final norm.

    Attributes:
      head: What travels with the cache; shares the target's memory.
      final_norm: The target's own module.
    """

    head: TargetHead
    final_norm: nn.Module


@dataclass
class _ProbeRecord:
    """What a short forward pass showed: inputs and outputs of the decoder's parts."""

    first_layer_input: Tensor | None
    last_layer_output: Tensor | None
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    decoder_output: Tensor


def find_head(target: LoadedTarget) -> FoundHead:
    """Find the pieces around the decoder's layers.

    A forward pass over a few tokens shows which module turns the last layer's output into the decoder's; random
    vectors through that module show what kind of norm it is.

    Raises:
      TargetError: If a piece is not found or does not behave as expected, listing what there is.
    """
    embedding_VH = _find_matrix(target, "embedding", nn.Embedding)[0]
    lm_head_VH, lm_head_bias = _find_matrix(target, "lm_head", nn.Linear)
    record, input_ids = _probe(target, _probe_ids(target, embedding_VH))
    if not bool(torch.isfinite(record.decoder_output).all()):
        raise TargetError(
            f"{target.name}: its output for its own tokens is NaN or infinite: its weights are damaged, or too large "
            f"for {target.compute_dtype}; fetch the model again, or try another --dtype"
        )
    norm = _find_final_norm(target, record)
    tied = lm_head_VH.data_ptr() == embedding_VH.data_ptr()
    spec = HeadSpec(
        final_norm=identify_norm(norm, target.hidden_size, target.name),
        embedding_scale=_embedding_scale(target, embedding_VH, record, input_ids),
        tied=tied,
    )
    head = TargetHead(
        spec,
        embedding=embedding_VH,
        norm_weight=_tensor(norm, "weight"),
        norm_bias=_optional_tensor(norm, "bias"),
        lm_head_weight=embedding_VH if tied else lm_head_VH,
        lm_head_bias=lm_head_bias,
    )
    _refuse_non_finite(target, head)
    return FoundHead(head, norm)


def identify_norm(norm: nn.Module, hidden_size: int, name: str) -> FinalNormSpec:
    """Tell a norm's kind and eps from what it does to random vectors, in float32 on the CPU.

    Vectors of ordinary size tell the kind. Vectors so small that their mean square vanishes against eps tell eps:
    the norm is then x g / sqrt(eps).

    Args:
      norm: A module with a weight [H].
      hidden_size: H.
      name: The target, for messages.

    Raises:
      TargetError: If it is none of the known kinds.
    """
    module = copy.deepcopy(norm).float().cpu()
    weight = _tensor(module, "weight").double()
    bias = _optional_tensor(module, "bias")
    generator = torch.Generator().manual_seed(0)
    # Off zero, so that a norm that removes the mean differs from one that does not.
    x_NH = torch.randn(_PROBE_ROWS, hidden_size, generator=generator) + 0.5
    unshifted = copy.deepcopy(module)
    if bias is not None:  # would drown the tiny vectors' outputs
        _tensor(unshifted, "bias").zero_()
    with torch.inference_mode():
        y_NH, tiny_NH = module(x_NH).double(), unshifted(x_NH * 1e-12).double()
    kinds: tuple[NormKind, ...] = ("rms", "rms_one_plus", "layer_norm")
    for kind in kinds:
        gain = weight + 1.0 if kind == "rms_one_plus" else weight
        shift = torch.zeros_like(gain) if kind != "layer_norm" or bias is None else bias.double()
        unit_NH = _unit_scale(x_NH.double(), kind)
        scale = ((unit_NH * gain) * (y_NH - shift)).sum() / ((unit_NH * gain) ** 2).sum()
        if not _close(scale * unit_NH * gain + shift, y_NH):
            continue
        centred_NH = x_NH.double() - x_NH.double().mean(-1, keepdim=True) if kind == "layer_norm" else x_NH.double()
        slope = ((centred_NH * gain) * tiny_NH).sum() / ((centred_NH * gain) ** 2).sum() / 1e-12
        eps = float(f"{float(slope) ** -2:.3g}") if slope > 0 else 0.0
        if 0 < eps < 1 and abs(float(scale) - 1.0) < _NORM_TOLERANCE:
            return FinalNormSpec(kind=kind, eps=eps)
    raise TargetError(
        f"{name}: its final norm {type(norm).__name__} is neither an RMS norm (gain w or 1 + w) nor a layer norm; "
        "this architecture is not supported"
    )


def _refuse_non_finite(target: LoadedTarget, head: TargetHead) -> None:
    """Refuse now what training would refuse after the whole extraction."""
    for name, tensor in head.named_buffers():
        if not bool(torch.isfinite(tensor).all()):
            raise TargetError(f"{target.name}: its {name} holds NaN or infinity; fetch the model again")


def _unit_scale(x_NH: Tensor, kind: NormKind) -> Tensor:
    centred_NH = x_NH - x_NH.mean(-1, keepdim=True) if kind == "layer_norm" else x_NH
    return centred_NH * torch.rsqrt(centred_NH.pow(2).mean(-1, keepdim=True))


def _close(predicted: Tensor, found: Tensor) -> bool:
    return bool((predicted - found).norm() <= _NORM_TOLERANCE * found.norm().clamp_min(1e-30))


def _probe_ids(target: LoadedTarget, embedding_VH: Tensor) -> Tensor:
    """Choose a few ids [1, N] whose rows say something: padding and unused rows are often zero."""
    telling = torch.isfinite(embedding_VH).all(dim=-1) & (embedding_VH != 0).any(dim=-1)
    ids = telling.nonzero().flatten()[:_PROBE_TOKENS]
    if len(ids) == 0:
        raise TargetError(f"{target.name}: every row of its embedding is zero or not finite; fetch the model again")
    return ids[None]


def _probe(target: LoadedTarget, input_ids: Tensor) -> tuple[_ProbeRecord, Tensor]:
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if isinstance(given, Tensor):
                inputs[name] = given.clone()
            produced = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(produced, Tensor):
                outputs[name] = produced.clone()

        return hook

    watched = {f"child {name}": child for name, child in target.decoder.named_children() if child is not target.layers}
    watched |= {"first layer": target.layers[0], "last layer": target.layers[-1]}
    try:
        for name, module in watched.items():
            handles.append(module.register_forward_hook(remember(name), with_kwargs=True))
        with torch.inference_mode():
            decoder_output = target.decode(input_ids)
    finally:
        for handle in handles:
            handle.remove()
    record = _ProbeRecord(
        first_layer_input=inputs.get("first layer"),
        last_layer_output=hidden_states_of(outputs.get("last layer"), target.hidden_size, "the last decoder layer"),
        inputs=inputs,
        outputs=outputs,
        decoder_output=decoder_output,
    )
    return record, input_ids


def _find_final_norm(target: LoadedTarget, record: _ProbeRecord) -> nn.Module:
    """Find the decoder's own child that maps the last layer's output to the decoder's output."""
    candidates = {
        name: child
        for name, child in target.decoder.named_children()
        if child is not target.layers
        and tuple(getattr(_optional_tensor(child, "weight"), "shape", ())) == (target.hidden_size,)
    }
    for name, child in candidates.items():
        before, after = record.inputs.get(f"child {name}"), record.outputs.get(f"child {name}")
        if before is None or after is None or record.last_layer_output is None:
            continue
        if torch.equal(before, record.last_layer_output) and torch.equal(after, record.decoder_output):
            return child
    children = ", ".join(f"{name} ({type(child).__name__})" for name, child in target.decoder.named_children())
    raise TargetError(
        f"{target.name}: no part of its decoder turns the last layer's output into the decoder's output with a weight "
        f"of [{target.hidden_size}]; fitting by shape: {', '.join(candidates) or 'none'}; all parts: {children}. "
        "This architecture is not supported"
    )


def _embedding_scale(target: LoadedTarget, embedding_VH: Tensor, record: _ProbeRecord, input_ids: Tensor) -> float:
    """Measure by what factor the embedding's rows reach the first layer.

    Targets that add something to the rows first (learned positions) have no such factor: their rows count as they are.
    """
    rows = F.embedding(input_ids, embedding_VH)
    found = record.first_layer_input
    if found is None or found.shape != rows.shape:
        raise TargetError(f"{target.name}: its first decoder layer is not given the embedded tokens; not supported")
    wide, found_wide = rows.double(), found.double()
    scale = float((wide * found_wide).sum() / (wide * wide).sum())
    if (found_wide - scale * wide).norm() > _SCALE_TOLERANCE * found_wide.norm() or scale <= 0:
        return 1.0
    if abs(scale - 1.0) < _NORM_TOLERANCE:
        return 1.0
    # Targets keep the factor in their own number format, or it is the root of H: what gives their very bits is meant.
    rounded = float(torch.tensor(scale, dtype=rows.dtype).item())
    candidates = [rounded, math.sqrt(target.hidden_size), float(f"{scale:.6g}")]
    return min(candidates, key=lambda candidate: int((rows * candidate != found).sum()))


def _find_matrix(target: LoadedTarget, what: str, kind: type[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Find the embedding or the lm_head: by the model's own answer, else the only module of that shape."""
    shape = (target.vocab_size, target.hidden_size)
    module = _ask_model(target.model, what)
    if module is None:
        fitting = {
            name: part
            for name, part in target.model.named_modules()
            if isinstance(part, kind) and tuple(getattr(part.weight, "shape", ())) == shape
        }
        module = next(iter(fitting.values())) if len(fitting) == 1 else None
    weight = None if module is None else _optional_tensor(module, "weight")
    if module is None or weight is None or tuple(weight.shape) != shape or not weight.is_floating_point():
        listed = [f"{name} {tuple(p.shape)}" for name, p in target.model.named_parameters() if shape[0] in p.shape]
        raise TargetError(
            f"{target.name}: no {what} of shape {list(shape)} in floating point was found in "
            f"{type(target.model).__name__}; parameters with {shape[0]} rows: {', '.join(listed[:6]) or 'none'}"
        )
    return weight, _optional_tensor(module, "bias")


def _ask_model(model: Any, what: str) -> nn.Module | None:
    getter = {"embedding": "get_input_embeddings", "lm_head": "get_output_embeddings"}[what]
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # the architecture does not say; it is looked for by shape
        return None
    return module if isinstance(module, nn.Module) else None


def _tensor(module: nn.Module, name: str) -> Tensor:
    value = _optional_tensor(module, name)
    if value is None:
        raise TargetError(f"{type(module).__name__} has no {name}")
    return value


def _optional_tensor(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value.detach() if isinstance(value, Tensor) else None
