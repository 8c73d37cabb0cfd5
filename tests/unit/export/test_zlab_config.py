"""z-lab's config.json: what servers read is right or absent, and nothing is guessed when it is read back."""

import json
from typing import Any

import pytest
import transformers
from export_cases import drafter_config, full_attention_config

from dflash_cache.config import DrafterSettings
from dflash_cache.drafter.config import derive_drafter_config
from dflash_cache.errors import CheckpointError
from dflash_cache.export.zlab_config import config_from_zlab, config_to_zlab
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec, spread_fc_layers


def qwen36_27b() -> TargetSpec:
    """As stage one describes Qwen3.6-27B: 24 heads of 256, mRoPE and partial rotary in its own config."""
    return TargetSpec(
        name="Qwen/Qwen3.6-27B",
        revision="0" * 40,
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5_text",
        config_digest="c" * 32,
        weights_digest="w" * 32,
        tokenizer_digest="t" * 32,
        compute_dtype="bfloat16",
        quantization=None,
        num_layers=64,
        hidden_size=5120,
        vocab_size=248320,
        tokenizer_vocab_size=248077,
        intermediate_size=17408,
        max_position_embeddings=262144,
        rope_theta=1e7,
        bos_token_id=None,
        pad_token_id=248044,
        eos_token_ids=(248044, 248046),
        mask_token_id=248070,
        mask_token_reason="published drafters use it",
        final_norm=FinalNormSpec(kind="rms_one_plus", eps=1e-6),
        tied_embeddings=False,
    )


def test_published_drafter_of_qwen36_27b_field_by_field() -> None:
    # dflash.md 1.2; B02: ids in z-lab's convention; B24: no mRoPE; B75, B76: names and places that servers know.
    target = qwen36_27b()
    features = FeatureSpec.for_layers(spread_fc_layers(64), num_layers=64, hidden_size=5120)
    config = derive_drafter_config(target, features, DrafterSettings())
    assert config_to_zlab(config, "bfloat16") == {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 16,
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "max_position_embeddings": 262144,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": 1e7,
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 248320,
    }


@pytest.mark.parametrize(
    "config", [drafter_config(), full_attention_config(), drafter_config(sliding_window_rule="anchor")]
)
def test_reads_back_what_it_wrote(config: Any) -> None:
    described = json.loads(json.dumps(config_to_zlab(config, "bfloat16")))
    assert config_from_zlab(described, "config.json") == config


def test_transformers_understands_it(tmp_path: Any) -> None:
    # B26, B29: rotary base, window and layer types survive the library that most readers use.
    config = drafter_config()
    (tmp_path / "config.json").write_text(json.dumps(config_to_zlab(config, "bfloat16")))
    read = transformers.Qwen3Config.from_pretrained(tmp_path)
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert read.rope_parameters["rope_type"] == "default"
    assert (read.sliding_window, tuple(read.layer_types)) == (24, config.layer_types)
    assert (read.head_dim, read.num_key_value_heads, read.tie_word_embeddings) == (8, 2, False)
    assert read.dflash_config == {"block_size": 16, "mask_token_id": 96, "target_layer_ids": [1, 2, 4, 5, 6]}
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.json").write_text(json.dumps(config_to_zlab(full_attention_config(), "bfloat16")))
    assert transformers.Qwen3Config.from_pretrained(full).sliding_window is None


def test_no_flag_overrides_the_layers_own_causality() -> None:
    # B29, trap 31: such a flag holds for every layer, and these drafters mix both kinds.
    described = config_to_zlab(drafter_config(), "bfloat16")
    assert "is_causal" not in described and "causal" not in described["dflash_config"]
    assert "auto_map" not in described


def zlab(**changes: Any) -> dict[str, Any]:
    """A valid config with top-level fields replaced; ... removes one."""
    described = json.loads(json.dumps(config_to_zlab(drafter_config(), "bfloat16")))
    described.update(changes)
    return {name: value for name, value in described.items() if value is not ...}


def nested(**changes: Any) -> dict[str, Any]:
    """The same with fields of dflash_config replaced."""
    inner = zlab()["dflash_config"] | changes
    return zlab(dflash_config={name: value for name, value in inner.items() if value is not ...})


@pytest.mark.parametrize("described", [zlab(block_size=...), nested(block_size=...)])
def test_block_size_in_either_place(described: dict[str, Any]) -> None:
    assert config_from_zlab(described, "config.json") == drafter_config()


@pytest.mark.parametrize(
    "described",
    [
        zlab(rope_parameters=...),
        zlab(rope_theta=..., rope_scaling=...),
        zlab(rope_scaling={"type": "default"}),
        zlab(use_sliding_window=...),
        zlab(
            transformers_version="5.17.0", id2label={"0": "LABEL_0"}, auto_map={"AutoModel": "dflash.DFlashDraftModel"}
        ),
        nested(use_swa=True, swa_window_size=24),
    ],
)
def test_equivalent_ways_to_say_the_same(described: dict[str, Any]) -> None:
    assert config_from_zlab(described, "config.json") == drafter_config()


def test_causal_flag_that_says_what_the_layers_say() -> None:
    described = config_to_zlab(full_attention_config(), "bfloat16")
    assert config_from_zlab(described | {"is_causal": False}, "config.json") == full_attention_config()


@pytest.mark.parametrize("name", ["target_layer_ids", "mask_token_id"])
def test_missing_keys_of_dflash_config_are_never_guessed(name: str) -> None:
    # B03.
    with pytest.raises(CheckpointError, match=rf"dflash_config\.{name} is missing"):
        config_from_zlab(nested(**{name: ...}), "config.json")


@pytest.mark.parametrize(
    "name",
    ["dflash_config", "hidden_size", "head_dim", "layer_types", "num_target_layers", "sliding_window", "rms_norm_eps"],
)
def test_missing_keys_are_never_guessed(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        config_from_zlab(zlab(**{name: ...}), "config.json")


def test_missing_block_size_or_rotary_base() -> None:
    inner = {name: value for name, value in zlab()["dflash_config"].items() if name != "block_size"}
    with pytest.raises(CheckpointError, match="block_size is missing"):
        config_from_zlab(zlab(block_size=..., dflash_config=inner), "config.json")
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        config_from_zlab(zlab(rope_theta=..., rope_parameters=...), "config.json")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (zlab(architectures=["Qwen3ForCausalLM"]), "architectures"),
        (zlab(architectures=["DFlashSpeculator"]), "architectures"),
        (zlab(model_type="llama"), "model_type"),
        (zlab(hidden_act="gelu"), "hidden_act"),
        (zlab(attention_bias=True), "attention_bias"),
        (zlab(dflash_config=[1, 2]), "dflash_config should be a JSON object"),
        (zlab(layer_types="full_attention"), "layer_types should be a JSON array"),
        (zlab(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
        (zlab(layer_types=["linear_attention"] * 3), "layer_types"),
        (zlab(block_size=8), "block_size is 8, but dflash_config.block_size 16"),
        (nested(attention_sink_bias=True), "attention_sink_bias"),
        (nested(projector_type="domino"), "projector_type"),
        (nested(target_layer_ids=[1, 2, 4, 5, 8]), "do not exist in a target of 8 layers"),
        (nested(target_layer_ids=[1, 2, 2]), "more than once"),
        (nested(mask_token_id=97), "mask_token_id"),
        (nested(causal=True), "dflash_config.causal"),
        (zlab(is_causal=False), "is_causal"),
        (zlab(use_sliding_window=False), "use_sliding_window"),
        (zlab(layer_types=["full_attention"] * 3), "use_sliding_window"),
        (nested(swa_window_size=48), "swa_window_size"),
        (zlab(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}), "disagree"),
        (zlab(rope_parameters={"rope_theta": 1e7, "rope_type": "yarn", "factor": 4.0}), "rope_parameters"),
        (zlab(rope_scaling={"rope_type": "yarn"}), "yarn"),
        (zlab(rope_parameters={"rope_theta": 1e7, "mrope_section": [1, 1, 0]}), "mrope_section"),
        (zlab(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (zlab(num_attention_heads=3), "num_attention_heads"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(described: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_from_zlab(described, "some/config.json")
    assert str(caught.value).startswith("some/config.json")
