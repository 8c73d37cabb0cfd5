"""The drafter's configuration, and how one is derived from a target. No torch."""

import math
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from dflash_cache.config import DrafterSettings
from dflash_cache.errors import ConfigError
from dflash_cache.spec import FeatureSpec, FrozenModel, TargetSpec, check_fc_layers

__all__ = ["DrafterConfig", "LayerType", "WindowRule", "derive_drafter_config"]

LayerType = Literal["sliding_attention", "full_attention"]
WindowRule = Literal["query", "anchor"]
"""Where a sliding window begins: W tokens before the query's own position (as servers run it), or before its anchor."""

_DEFAULT_NUM_LAYERS = 5
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_SLIDING_WINDOW = 2048
_DEFAULT_RMS_NORM_EPS = 1e-6
_QUERY_HEADS_PER_KV_HEAD = 4
_LEAST_HIDDEN_SIZE_FOR_WIDE_HEADS = 1024
_PUBLISHED_INTERMEDIATE_SIZES = {5120: 17408}
_MLP_WIDENING = 3.4  # 17408 / 5120, the published drafter's
_MLP_MULTIPLE = 64
# What transformers' Qwen3 configuration assumes when a key is missing. A drafter learns its own rotary geometry, so any
# base works as long as training and serving agree; with these two a server that drops the key still agrees.
_QWEN3_ROPE_THETA = 10_000.0
_QWEN3_MAX_POSITION_EMBEDDINGS = 32_768

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class DrafterConfig(FrozenModel):
    """Everything that the drafter's weights and masks depend on (dflash.md section 1).

    Attributes:
      hidden_size: H, equal to the target's.
      intermediate_size: Width of the SwiGLU MLP.
      num_hidden_layers: Decoder layers of the drafter.
      num_attention_heads, num_key_value_heads, head_dim: Attention geometry; the drafter's own, not the target's.
      vocab_size: Rows of the target's embedding and lm_head.
      rms_norm_eps: Eps of every norm.
      rope_theta: Base of the rotary embedding, applied to the whole head.
      layer_types: One per layer. Sliding layers are causal inside a block, full ones see the block both ways.
      sliding_window: Window of the sliding layers in tokens; None when there are none.
      sliding_window_rule: ``query`` hides keys W or more tokens before the query; ``anchor`` hides keys more than W
        tokens before the anchor, for every slot alike.
      block_size: K, slots in a block including the anchor.
      mask_token_id: Id that fills the unknown slots 1 to K-1.
      target_layer_ids: 0-based target layers whose outputs feed ``fc``, in this order.
      num_target_layers: Decoder layers of the target.
      max_position_embeddings: Longest position that a server may ask for.
      initializer_range: Standard deviation of the initial matrices.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    rms_norm_eps: PositiveFloat = _DEFAULT_RMS_NORM_EPS
    rope_theta: PositiveFloat
    layer_types: tuple[LayerType, ...]
    sliding_window: PositiveInt | None
    sliding_window_rule: WindowRule = "query"
    block_size: Annotated[int, Field(ge=2)]
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: tuple[int, ...]
    num_target_layers: PositiveInt
    max_position_embeddings: PositiveInt
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _check_heads(self) -> "DrafterConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> "DrafterConfig":
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name one kind for each of the {self.num_hidden_layers} layers, "
                f"got {len(self.layer_types)}: {', '.join(self.layer_types) or 'none'}"
            )
        slides = "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError("sliding_window is missing, and layer_types has sliding_attention layers; give it a size")
        if not slides and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, but no layer of layer_types is sliding_attention: some "
                "servers would then window every layer; leave it out, or make a layer sliding"
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window must be at least block_size ({self.block_size}), got {self.sliding_window}: a shorter "
                "one would hide a block's own slots"
            )
        return self

    @model_validator(mode="after")
    def _check_ids(self) -> "DrafterConfig":
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a row of the target's embedding, 0 to {self.vocab_size - 1}, "
                f"got {self.mask_token_id}"
            )
        check_fc_layers(self.target_layer_ids, self.num_target_layers)
        return self


def derive_drafter_config(target: TargetSpec, features: FeatureSpec, settings: DrafterSettings) -> DrafterConfig:
    """Choose a drafter for a target: what the user set, else what was published, scaled to the target's width.

    The defaults give the published drafter of Qwen3.6-27B (z-lab/Qwen3.6-27B-DFlash) for that target. The attention
    geometry never follows the target's, whose heads, rotary layout and head size serve another purpose.

    Args:
      target: The target that the cache was made with.
      features: What the cache holds; its fc layers become the drafter's, in the same order.
      settings: What the user set.

    Raises:
      ConfigError: If settings contradict each other or the target, or no mask token can be named.
    """
    layer_types = _layer_types(settings)
    heads, kv_heads, head_dim = _attention_geometry(target.hidden_size, settings)
    window = settings.sliding_window
    if window is None and "sliding_attention" in layer_types:
        window = _DEFAULT_SLIDING_WINDOW
    try:
        return DrafterConfig(
            hidden_size=target.hidden_size,
            intermediate_size=settings.intermediate_size or _intermediate_size(target),
            num_hidden_layers=len(layer_types),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            rms_norm_eps=settings.rms_norm_eps or _DEFAULT_RMS_NORM_EPS,
            rope_theta=settings.rope_theta or target.rope_theta or _QWEN3_ROPE_THETA,
            layer_types=layer_types,
            sliding_window=window,
            sliding_window_rule=settings.sliding_window_rule or "query",
            block_size=settings.block_size or _DEFAULT_BLOCK_SIZE,
            mask_token_id=_mask_token_id(target, settings),
            target_layer_ids=features.fc_layer_indices,
            num_target_layers=target.num_layers,
            max_position_embeddings=settings.max_position_embeddings
            or target.max_position_embeddings
            or _QWEN3_MAX_POSITION_EMBEDDINGS,
        )
    except ValidationError as error:
        raise ConfigError(f"no drafter can be built for {target.name}: {_reasons(error)}") from error


def _reasons(error: ValidationError) -> str:
    reasons = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        reasons.append(f"{field}: " * bool(field) + item["msg"].removeprefix("Value error, "))
    return "; ".join(reasons)


def _layer_types(settings: DrafterSettings) -> tuple[LayerType, ...]:
    """All layers slide but the last, as in the published drafters."""
    if settings.layer_types is None:
        num_layers = settings.num_layers or _DEFAULT_NUM_LAYERS
        sliding: list[LayerType] = ["sliding_attention" for _ in range(num_layers - 1)]
        return (*sliding, "full_attention")
    if settings.num_layers is not None and settings.num_layers != len(settings.layer_types):
        raise ConfigError(
            f"drafter.num_layers is {settings.num_layers}, but drafter.layer_types names {len(settings.layer_types)} "
            "layers; leave one of them out"
        )
    return settings.layer_types


def _attention_geometry(hidden_size: int, settings: DrafterSettings) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size.

    Four query heads share a key-value head, and the number of key-value heads is the power of two nearest (in ratio) to
    H / (5 head_dim): so the heads span about 0.8 H, as in the published 32 / 8 / 128 for H = 5120, and split evenly
    over GPUs. A target too narrow for four heads gets as many as fit, over one key-value head.
    """
    head_dim = settings.head_dim or (128 if hidden_size >= _LEAST_HIDDEN_SIZE_FOR_WIDE_HEADS else 64)
    heads, kv_heads = settings.num_attention_heads, settings.num_key_value_heads
    if heads is None and kv_heads is None:
        kv_heads = _nearest_power_of_two(hidden_size / (5 * head_dim))
        fitting = max(1, hidden_size // head_dim)
        heads = _QUERY_HEADS_PER_KV_HEAD * kv_heads if kv_heads > 1 else min(_QUERY_HEADS_PER_KV_HEAD, fitting)
    elif heads is None and kv_heads is not None:
        heads = _QUERY_HEADS_PER_KV_HEAD * kv_heads
    elif kv_heads is None and heads is not None:
        grouped = heads % _QUERY_HEADS_PER_KV_HEAD == 0
        kv_heads = heads // _QUERY_HEADS_PER_KV_HEAD if grouped else math.gcd(heads, 2)
    assert heads is not None and kv_heads is not None
    return heads, kv_heads, head_dim


def _nearest_power_of_two(value: float) -> int:
    return 1 << max(0, round(math.log2(value)))


def _intermediate_size(target: TargetSpec) -> int:
    published = _PUBLISHED_INTERMEDIATE_SIZES.get(target.hidden_size)
    if published is not None:
        return published
    if target.intermediate_size is not None:
        return target.intermediate_size
    return max(1, round(_MLP_WIDENING * target.hidden_size / _MLP_MULTIPLE)) * _MLP_MULTIPLE


def _mask_token_id(target: TargetSpec, settings: DrafterSettings) -> int:
    """The id of unknown slots: the user's, else the one that stage one found safe.

    Never the padding or end token by default: both occur in served text, and the drafter would learn them as "unknown".
    """
    mask_id = target.mask_token_id if settings.mask_token_id is None else settings.mask_token_id
    if mask_id is None:
        raise ConfigError(
            f"no mask token is known for {target.name} ({target.mask_token_reason}); set drafter.mask_token_id "
            f"to an id that no text contains: {_mask_token_suggestion(target)}"
        )
    if mask_id >= target.vocab_size:
        raise ConfigError(
            f"drafter.mask_token_id is {mask_id}, but the embedding of {target.name} has rows 0 to "
            f"{target.vocab_size - 1}; choose {_mask_token_suggestion(target)}"
        )
    for role, ids in (
        ("end", target.eos_token_ids),
        ("padding", (target.pad_token_id,)),
        ("begin", (target.bos_token_id,)),
    ):
        if mask_id in ids:
            raise ConfigError(
                f"drafter.mask_token_id is {mask_id}, which is the {role} token of {target.name} and occurs in text; "
                f"choose {_mask_token_suggestion(target)}"
            )
    return mask_id


def _mask_token_suggestion(target: TargetSpec) -> str:
    reserved = "a reserved or unused special token of the tokenizer"
    if target.vocab_size > target.tokenizer_vocab_size:
        first, last = target.tokenizer_vocab_size, target.vocab_size - 1
        return f"{reserved}, or one of the embedding rows {first} to {last}, which the tokenizer cannot produce"
    return reserved
