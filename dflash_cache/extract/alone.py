"""One document through the whole target, unbatched and unpadded: what the self-check compares stored states with.

Shapes: n tokens of a document, m compared positions, P planes, H hidden size, V vocabulary.
"""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.extract.features import plane_layers
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.taps import hidden_states_of
from dflash_cache.spec import FeatureSpec

__all__ = ["OwnStates", "run_alone"]

_POSITIONS = 512


@dataclass(frozen=True)
class OwnStates:
    """A document through the target alone.

    Attributes:
      planes: One [n, H] float32, rounded to bfloat16, a plane.
      neighbours: For each plane, outputs [m, H] of the layers beside it, by layer; -1 is what enters the first.
      normed: [n, H] float32; what the final norm gave.
      positions: [m] int64.
      logits: [m, V] float32.
    """

    planes: tuple[Tensor, ...]
    neighbours: tuple[dict[int, Tensor], ...]
    normed: Tensor
    positions: Tensor
    logits: Tensor


def run_alone(target: LoadedTarget, final_norm: nn.Module, features: FeatureSpec, input_ids: Tensor) -> OwnStates:
    """Run one document through the whole target.

    The states are taken where they enter the next module, not where they leave their own.

    Args:
      target: The target.
      final_norm: Its final norm.
      features: Which layers are planes.
      input_ids: [n] int64, on the target's device.

    Raises:
      TargetError: If a module is not given hidden states.
    """
    layers = plane_layers(features)
    last = len(target.layers) - 1
    beside = {layer: [near for near in (layer - 1, layer + 1) if near <= last] for layer in layers}
    entered: dict[int, Tensor] = {}
    sampled: dict[int, Tensor] = {}
    normed: list[Tensor] = []
    handles = []
    positions = torch.linspace(0, len(input_ids) - 1, min(len(input_ids), _POSITIONS)).round().long().to(target.device)

    def remember(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            hidden = hidden_states_of(given, target.hidden_size, f"the module after decoder layer {layer}")[0]
            sampled[layer] = hidden[positions].to(torch.bfloat16).float()
            if layer in beside:
                entered[layer] = hidden.to(torch.bfloat16).float()

        return hook

    options: dict[str, Any] = {"use_cache": False, "return_dict": True}
    # Logits of every position of a long document would not fit beside a large target.
    selective = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    if selective:
        options["logits_to_keep"] = positions
    try:
        for layer in {*layers, *itertools.chain.from_iterable(beside.values())}:
            module = final_norm if layer == last else target.layers[layer + 1]
            handles.append(module.register_forward_pre_hook(remember(layer), with_kwargs=True))
        handles.append(final_norm.register_forward_hook(lambda module, args, output: normed.append(output[0].float())))
        logits: Tensor = target.model(input_ids=input_ids[None], **options).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return OwnStates(
        planes=tuple(entered[layer] for layer in layers),
        neighbours=tuple({near: sampled[near] for near in beside[layer]} for layer in layers),
        normed=normed[0],
        positions=positions,
        logits=logits if selective else logits[positions],
    )
