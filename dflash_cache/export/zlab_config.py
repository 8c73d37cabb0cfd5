"""A drafter's configuration as z-lab's ``config.json``, both ways. Pure: dictionaries in and out, no torch, no files.

Layer ids are 0-based outputs of decoder layers in both, so they are copied as they are (dflash.md section 1.3).
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.errors import CheckpointError

__all__ = ["ARCHITECTURE", "WeightsDtype", "config_from_zlab", "config_to_zlab"]

ARCHITECTURE = "DFlashDraftModel"
_MODEL_TYPE = "qwen3"

WeightsDtype = Literal["bfloat16", "float32"]
"""Number formats of exported weights. Float16 is none of them: drafters of targets with large states overflow in it."""

_SAME_NAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "num_target_layers",
    "max_position_embeddings",
    "initializer_range",
    "layer_types",
)
# What every drafter of this architecture has; another value means another network.
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False}
# Sub-settings of dflash_config that this package writes or can check; any other is a feature that it does not have.
_KNOWN_DFLASH_KEYS = frozenset(
    {"target_layer_ids", "mask_token_id", "block_size", "causal", "use_swa", "swa_window_size", "projector_type"}
)
_JSON_KINDS: Mapping[type, str] = {dict: "object", list: "array"}
# Our own: the training-time window rule where it is not the one that servers run.
_WINDOW_RULE_KEY = "sliding_window_rule"


def config_to_zlab(config: DrafterConfig, dtype: WeightsDtype) -> dict[str, Any]:
    """Describe a drafter as vLLM, SGLang and z-lab's own code read it.

    Everything a reader looks at is either right or absent. Block size stands in both places that readers expect it in.
    There is no causal flag: it would hold for all layers alike, while without one sliding layers are causal inside a
    block and full ones see it both ways, as trained. Rotary settings stand in the old schema (``rope_theta``) and in
    the new (``rope_parameters``). No ``auto_map``: the checkpoint ships no code.

    Args:
      config: The drafter.
      dtype: Of the weights beside it.
    """
    described: dict[str, Any] = {name: getattr(config, name) for name in _SAME_NAME}
    described |= _FIXED
    described |= {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": dtype,
        "layer_types": list(config.layer_types),
        "model_type": _MODEL_TYPE,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": config.sliding_window is not None,
    }
    if config.sliding_window_rule != "query":
        described[_WINDOW_RULE_KEY] = config.sliding_window_rule
    return described


def config_from_zlab(described: Mapping[str, Any], where: str) -> DrafterConfig:
    """Understand a ``config.json`` of z-lab's format, older or newer, completely or not at all.

    Args:
      described: Its contents.
      where: Its path, for messages.

    Raises:
      CheckpointError: If it is of another architecture, lacks a field (none is ever guessed, the fc layers least of
        all), contradicts itself, or asks for a feature that this drafter does not have. Names the field.
    """
    _refuse_other_architectures(described, where)
    nested = _require(described, "dflash_config", where)
    for name, kind in (
        ("dflash_config", dict),
        ("layer_types", list),
        ("rope_parameters", dict),
        ("rope_scaling", dict),
    ):
        if not isinstance(described.get(name) or kind(), kind):
            raise CheckpointError(f"{where}: {name} should be a JSON {_JSON_KINDS[kind]}, got {described[name]!r}")
    unknown = sorted(set(nested) - _KNOWN_DFLASH_KEYS)
    if unknown:
        raise CheckpointError(
            f"{where}: dflash_config.{unknown[0]} is a feature that this version does not know; "
            f"known are {', '.join(sorted(_KNOWN_DFLASH_KEYS))}"
        )
    if nested.get("projector_type") not in (None, "dflash"):
        raise CheckpointError(f"{where}: dflash_config.projector_type {nested['projector_type']!r} is not supported")
    fields = {name: _require(described, name, where) for name in _SAME_NAME if name != "initializer_range"}
    if "initializer_range" in described:
        fields["initializer_range"] = described["initializer_range"]
    window = _sliding_window(described, where)
    _refuse_other_causality(described, nested, where)
    try:
        return DrafterConfig(
            **fields,
            rope_theta=_rope_theta(described, where),
            sliding_window=window,
            sliding_window_rule=described.get(_WINDOW_RULE_KEY, "query"),
            block_size=_block_size(described, nested, where),
            mask_token_id=_require(nested, "mask_token_id", where, "dflash_config."),
            target_layer_ids=_require(nested, "target_layer_ids", where, "dflash_config."),
        )
    except ValidationError as error:
        reasons = [
            f"{'.'.join(map(str, item['loc']))}: ".removeprefix(": ") + item["msg"].removeprefix("Value error, ")
            for item in error.errors(include_url=False)
        ]
        raise CheckpointError(f"{where} describes no valid drafter: {'; '.join(reasons)}") from error


def _require(described: Mapping[str, Any], name: str, where: str, prefix: str = "") -> Any:
    if described.get(name) is None:
        raise CheckpointError(
            f"{where}: {prefix}{name} is missing, and a guess would give a drafter that loads and accepts nothing; "
            "take it from the drafter's publisher or from the run that trained it"
        )
    return described[name]


def _refuse_other_architectures(described: Mapping[str, Any], where: str) -> None:
    architectures = described.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise CheckpointError(f"{where}: architectures is {architectures!r}, expected [{ARCHITECTURE!r}]")
    if described.get("model_type") != _MODEL_TYPE:
        raise CheckpointError(f"{where}: model_type is {described.get('model_type')!r}, expected {_MODEL_TYPE!r}")
    for name, expected in _FIXED.items():
        if described.get(name, expected) != expected:
            raise CheckpointError(f"{where}: {name} is {described[name]!r}; only {expected!r} is supported")


def _sliding_window(described: Mapping[str, Any], where: str) -> int | None:
    """Read the window, which readers honour only together with ``use_sliding_window`` and ``layer_types``."""
    slides = "sliding_attention" in described["layer_types"]
    flag = described.get("use_sliding_window", slides)
    nested = described["dflash_config"]
    if flag != slides or bool(nested.get("use_swa", slides)) != slides:
        raise CheckpointError(
            f"{where}: use_sliding_window (or dflash_config.use_swa) and layer_types disagree: servers differ in what "
            f"they would run. Flags {flag!r} and {nested.get('use_swa')!r}, layer_types {described['layer_types']}"
        )
    if not slides:
        return None
    window = _require(described, "sliding_window", where)
    if nested.get("swa_window_size", window) != window:
        raise CheckpointError(
            f"{where}: sliding_window is {window!r}, but dflash_config.swa_window_size {nested['swa_window_size']!r}"
        )
    return int(window)


def _refuse_other_causality(described: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
    """A causal flag overrides every layer; accept it only where it says what the layer types say."""
    for name, flag in (("is_causal", described.get("is_causal")), ("dflash_config.causal", nested.get("causal"))):
        kind = "sliding_attention" if flag else "full_attention"
        if flag is not None and set(described["layer_types"]) != {kind}:
            raise CheckpointError(
                f"{where}: {name} is {flag!r} with layer_types {described['layer_types']}. Here sliding layers are "
                "causal inside a block and full ones are not; other combinations are not supported"
            )


def _rope_theta(described: Mapping[str, Any], where: str) -> Any:
    """Read the rotary base from either schema; scaled, partial and multi-axis rotary embeddings are refused."""
    new = described.get("rope_parameters") or {}
    old = described.get("rope_scaling") or {}
    for schema, settings in (("rope_parameters", new), ("rope_scaling", old)):
        kind = settings.get("rope_type", settings.get("type", "default"))
        odd = sorted(set(settings) - {"rope_theta", "rope_type", "type"})
        if settings.get("partial_rotary_factor") == 1:
            odd.remove("partial_rotary_factor")
        if kind != "default" or odd:
            what = f"{schema}.{odd[0]}" if odd else f"{schema}.rope_type {kind!r}"
            raise CheckpointError(f"{where}: {what} is not supported; drafters here use the plain rotary embedding")
    if described.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"{where}: partial_rotary_factor {described['partial_rotary_factor']!r} is not supported")
    thetas = {theta for theta in (described.get("rope_theta"), new.get("rope_theta")) if theta is not None}
    if len(thetas) > 1:
        raise CheckpointError(f"{where}: rope_theta and rope_parameters.rope_theta disagree: {sorted(thetas)}")
    return thetas.pop() if thetas else _require(described, "rope_theta", where)


def _block_size(described: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> Any:
    """Read the block size, which older checkpoints have at the top level and newer ones inside ``dflash_config``."""
    outer, inner = described.get("block_size"), nested.get("block_size")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{where}: block_size is {outer!r}, but dflash_config.block_size {inner!r}")
    return inner if outer is None and inner is not None else _require(described, "block_size", where)
