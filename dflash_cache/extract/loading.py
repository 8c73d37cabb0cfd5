"""Load a target's weights, and find its decoder, its layers and its matrices."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from dflash_cache.errors import TargetError
from dflash_cache.extract.target import LOAD_ERRORS, TargetFiles, explain_load_error

__all__ = ["LoadedTarget", "load_target"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTarget:
    """A target with its weights, frozen.

    Attributes:
      name: What to call it in messages.
      model: The whole model.
      decoder: Its text decoder, which ends in the final norm.
      layers: The decoder's layers, in order.
      device: Where it is.
      compute_dtype: Number format in which it runs.
      hidden_size: H.
      vocab_size: V.
    """

    name: str
    model: nn.Module
    decoder: nn.Module
    layers: nn.ModuleList
    device: torch.device
    compute_dtype: torch.dtype
    hidden_size: int
    vocab_size: int

    def decode(self, input_ids: Tensor) -> Tensor:
        """Run the decoder alone, without lm_head and without a cache.

        Args:
          input_ids: [B, S] int64, right-padded; every token only sees those before it.

        Returns:
          Its output [B, S, H]: last hidden states after the final norm.
        """
        output = self.decoder(input_ids=input_ids, use_cache=False, return_dict=True)
        hidden: Tensor = output.last_hidden_state
        return hidden


def load_target(files: TargetFiles, attention: str) -> LoadedTarget:
    """Load the weights in the compute dtype and onto the device.

    Args:
      files: The target.
      attention: Attention implementation.

    Raises:
      TargetError: If the weights do not load completely, or the model is not laid out as a decoder of layers.
    """
    model = _load_model(files, attention)
    model.eval().requires_grad_(False)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module):
        raise TargetError(f"{files.name.location}: {type(model).__name__} has no text decoder; a causal LM is needed")
    return LoadedTarget(
        name=files.name.location,
        model=model,
        decoder=decoder,
        layers=_find_layers(files, decoder),
        device=files.device,
        compute_dtype=files.compute_dtype,
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
    )


def _load_model(files: TargetFiles, attention: str) -> Any:
    """Load with the first class whose parameters the checkpoint fills completely."""
    missing: dict[str, list[str]] = {}
    for auto_class in _auto_classes(files):
        model, absent = _from_pretrained(files, attention, auto_class)
        if not absent:
            return model
        missing[type(model).__name__] = absent
    listed = "; ".join(f"{kind}: {', '.join(names[:4])} ({len(names)} in all)" for kind, names in missing.items())
    raise TargetError(
        f"{files.name.location}: its weights lack tensors that the model needs ({listed}); fetch the model completely, "
        "or use the config that belongs to these weights"
    )


def _auto_classes(files: TargetFiles) -> list[Any]:
    config: PreTrainedConfig = files.config
    shipped = getattr(config, "auto_map", None) or {}
    known = [
        auto_class
        for auto_class, mapping, key in (
            (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, "AutoModelForCausalLM"),
            (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "AutoModelForImageTextToText"),
        )
        if type(config) in mapping or (files.trust_remote_code and key in shipped)
    ]
    if known:
        return known
    if shipped:
        raise TargetError(
            f"{files.name.location} needs code that it ships itself; read that code, and if you trust it, "
            "add --trust-remote-code"
        )
    raise TargetError(
        f"{files.name.location} is a {config.model_type!r} model, which the installed transformers does not know as a "
        "causal language model; update transformers, or choose another target"
    )


def _from_pretrained(files: TargetFiles, attention: str, auto_class: Any) -> tuple[Any, list[str]]:
    options: dict[str, Any] = {
        "dtype": files.compute_dtype,
        "attn_implementation": attention,
        "trust_remote_code": files.trust_remote_code,
        "output_loading_info": True,
    }
    if files.commit is not None:
        options["revision"] = files.commit
    # With accelerate the weights go straight to the GPU; without, through the host's memory.
    direct = files.device.type != "cpu" and find_spec("accelerate") is not None
    if direct:
        options["device_map"] = {"": files.device}
    try:
        with _no_foreign_bars():
            model, info = auto_class.from_pretrained(files.name.location, **options)
        if not direct:
            model = model.to(files.device)
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"{files.name.location} does not fit into the memory of {files.device} as {files.compute_dtype}; use a "
            "larger GPU, or --device cpu"
        ) from error
    except (*LOAD_ERRORS, SafetensorError) as error:
        if "attn_implementation" in str(error) or "scaled_dot_product" in str(error):
            raise TargetError(
                f"{files.name.location} cannot run with {attention} attention; use --attention eager"
            ) from error
        raise explain_load_error(files.name, "weights", error) from error
    return model, sorted(info["missing_keys"])


@contextmanager
def _no_foreign_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own across the caller's."""
    bars: Any = transformers_logging  # without types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _find_layers(files: TargetFiles, decoder: nn.Module) -> nn.ModuleList:
    lists = {name: child for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    fitting = [child for child in lists.values() if len(child) == files.num_layers]
    if len(fitting) != 1:
        found = ", ".join(f"{name} of {len(child)}" for name, child in lists.items()) or "none"
        raise TargetError(
            f"{files.name.location}: its decoder {type(decoder).__name__} should hold one list of {files.num_layers} "
            f"layers, as its config says; found lists: {found}. This architecture is not supported"
        )
    return fitting[0]
