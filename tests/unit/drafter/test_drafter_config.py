"""The drafter's configuration and how it is derived from a target."""

from typing import Any

import pytest
from drafter_cases import drafter_config
from pydantic import ValidationError

from dflash_cache.config import DrafterSettings
from dflash_cache.drafter.config import DrafterConfig, derive_drafter_config
from dflash_cache.errors import ConfigError
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec, spread_fc_layers


def target_spec(**changes: Any) -> TargetSpec:
    """Qwen3.6-27B as stage one describes it: 24 heads of 256, none of which may reach the drafter."""
    fields: dict[str, Any] = {
        "name": "Qwen/Qwen3.6-27B",
        "revision": None,
        "architecture": "Qwen3_5ForConditionalGeneration",
        "model_type": "qwen3_5_text",
        "config_digest": "c",
        "weights_digest": "w",
        "tokenizer_digest": "t",
        "compute_dtype": "bfloat16",
        "quantization": None,
        "num_layers": 64,
        "hidden_size": 5120,
        "vocab_size": 248320,
        "tokenizer_vocab_size": 248077,
        "intermediate_size": 17408,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "bos_token_id": None,
        "pad_token_id": 248044,
        "eos_token_ids": (248044, 248046),
        "mask_token_id": 248070,
        "mask_token_reason": "a reserved special token",
        "final_norm": FinalNormSpec(kind="rms_one_plus", eps=1e-6),
        "tied_embeddings": False,
    }
    return TargetSpec(**(fields | changes))


def derive(target: TargetSpec, **settings: Any) -> DrafterConfig:
    layers = spread_fc_layers(target.num_layers)
    features = FeatureSpec.for_layers(layers, num_layers=target.num_layers, hidden_size=target.hidden_size)
    return derive_drafter_config(target, features, DrafterSettings(**settings))


def test_qwen36_27b_gets_the_published_drafter() -> None:
    assert derive(target_spec()) == DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        sliding_window=2048,
        sliding_window_rule="query",
        block_size=16,
        mask_token_id=248070,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        max_position_embeddings=262144,
        initializer_range=0.02,
    )


@pytest.mark.parametrize(
    ("hidden_size", "heads", "kv_heads", "head_dim"),
    [(64, 1, 1, 64), (128, 2, 1, 64), (576, 8, 2, 64), (1024, 8, 2, 128), (4096, 32, 8, 128), (8192, 64, 16, 128)],
)
def test_head_geometry_follows_the_width(hidden_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
    config = derive(target_spec(hidden_size=hidden_size))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, kv_heads, head_dim)


@pytest.mark.parametrize("hidden_size", [32, 96, 576, 896, 960, 1536, 2048, 2560, 3584, 6144, 12288])
def test_any_width_gets_a_valid_geometry_about_as_wide_as_itself(hidden_size: int) -> None:
    config = derive(target_spec(hidden_size=hidden_size, intermediate_size=None))
    assert config.num_attention_heads % config.num_key_value_heads == 0
    if hidden_size >= 64:
        assert 0.5 <= config.num_attention_heads * config.head_dim / hidden_size <= 1.15
    assert config.intermediate_size % 64 == 0
    assert 3 <= config.intermediate_size / hidden_size <= 4


def test_mlp_follows_the_target_where_nothing_is_published() -> None:
    assert derive(target_spec(hidden_size=576, intermediate_size=1536)).intermediate_size == 1536
    for of_target in (None, 25600):
        assert derive(target_spec(hidden_size=5120, intermediate_size=of_target)).intermediate_size == 17408


def test_missing_rotary_base_and_window_fall_to_what_a_server_assumes() -> None:
    config = derive(target_spec(rope_theta=None, max_position_embeddings=None))
    assert (config.rope_theta, config.max_position_embeddings) == (10_000.0, 32_768)


def test_every_setting_overrides() -> None:
    settings: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "intermediate_size": 100,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 64,
        "sliding_window_rule": "anchor",
        "block_size": 8,
        "mask_token_id": 17,
        "rope_theta": 5.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 99,
    }
    config = derive(target_spec(), **settings)
    assert {name: getattr(config, name) for name in settings} == settings
    assert config.num_hidden_layers == 2


def test_one_layer_is_full_and_has_no_window() -> None:
    config = derive(target_spec(), num_layers=1)
    assert (config.layer_types, config.sliding_window) == (("full_attention",), None)


@pytest.mark.parametrize("heads", [1, 6, 7, 12])
def test_query_heads_alone_get_fitting_key_value_heads(heads: int) -> None:
    config = derive(target_spec(), num_attention_heads=heads)
    assert config.num_attention_heads == heads
    assert heads % config.num_key_value_heads == 0


def test_missing_mask_token_is_an_error_with_suggestions_not_the_padding_token() -> None:
    target = target_spec(mask_token_id=None, mask_token_reason="no reserved token")
    with pytest.raises(ConfigError, match=r"no reserved token.*drafter\.mask_token_id.*248077 to 248319"):
        derive(target)
    with pytest.raises(ConfigError, match=r"reserved or unused special token of the tokenizer$"):
        derive(target_spec(mask_token_id=None, tokenizer_vocab_size=248320))
    assert derive(target, mask_token_id=248100).mask_token_id == 248100


@pytest.mark.parametrize(
    ("mask_token_id", "role"), [(248044, "end"), (248046, "end"), (248050, "padding"), (7, "begin")]
)
def test_mask_token_may_not_be_one_that_text_contains(mask_token_id: int, role: str) -> None:
    target = target_spec(pad_token_id=248050, bos_token_id=7)
    with pytest.raises(ConfigError, match=f"{mask_token_id}, which is the {role} token"):
        derive(target, mask_token_id=mask_token_id)


def test_mask_token_must_be_a_row_of_the_embedding() -> None:
    with pytest.raises(ConfigError, match=r"248320, but the embedding .* rows 0 to 248319"):
        derive(target_spec(), mask_token_id=248320)
    with pytest.raises(ValidationError, match="0 to 60, got 61"):
        drafter_config(mask_token_id=61)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 3, "layer_types": ("full_attention",)}, "num_layers is 3, but drafter.layer_types names 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple of num_key_value_heads, got 6 and 4"),
        ({"head_dim": 7}, "head_dim must be even .* got 7"),
        ({"layer_types": ("full_attention",), "sliding_window": 64}, "sliding_window is 64, but no layer"),
        ({"sliding_window": 8}, r"at least block_size \(16\), got 8"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        derive(target_spec(), **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ("full_attention",)}, "one kind for each of the 3 layers, got 1"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"target_layer_ids": (1, 64)}, r"\[64\] do not exist"),
        ({"target_layer_ids": (1, 1)}, r"\[1\] are named more than once"),
        ({"block_size": 1}, "block_size"),
        ({"num_taps": 5}, "num_taps"),
    ],
)
def test_a_configuration_from_a_file_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        drafter_config(**changes)
