"""A tiny target of every family that stage one is proved with; sizes differ so that mixed-up shapes do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.targets import (
    VOCAB,
    build_dense,
    build_gemma3,
    build_hybrid,
    build_llama,
    hybrid_config,
    save_target,
)
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_moe import Qwen3MoeConfig

__all__ = ["FAMILY_BUILDERS"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# Of a layer's update, in models of 64 layers: otherwise float32 rounding alone grows beyond 1e-5 on the way up.
_DEEP_GAIN = 0.3


def _save(config: PreTrainedConfig, folder: Path, *, update_gain: float = 1.0) -> Path:
    return save_target(AutoModelForCausalLM.from_config(config), folder, update_gain=update_gain)


def _deep_text() -> dict[str, Any]:
    """Qwen3.6-27B's 64 layers, 48 linear and 16 full."""
    text: dict[str, Any] = hybrid_config().text_config.to_dict()
    del text["layer_types"]  # follows from the number of layers
    return {**text, "num_hidden_layers": 64}


def build_qwen3_5_deep(folder: Path) -> Path:
    """Qwen3.5's text model alone, 64 layers."""
    return _save(Qwen3_5TextConfig(**_deep_text()), folder, update_gain=_DEEP_GAIN)


def build_qwen3_5_deep_wrapper(folder: Path) -> Path:
    """Qwen3.5's wrapper around 64 layers."""
    config = Qwen3_5Config(text_config=_deep_text(), vision_config=hybrid_config().vision_config.to_dict())
    return save_target(Qwen3_5ForConditionalGeneration(config), folder, update_gain=_DEEP_GAIN)


def build_qwen3_5_moe(folder: Path) -> Path:
    """Qwen3.5's wrapper with experts and a shared one."""
    dense = hybrid_config()
    text: dict[str, Any] = dense.text_config.to_dict()
    for field in ("intermediate_size", "layer_types", "model_type"):
        text.pop(field)
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text |= {"shared_expert_intermediate_size": 24}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=dense.vision_config.to_dict())
    return save_target(Qwen3_5MoeForConditionalGeneration(config), folder)


def build_qwen3_moe(folder: Path, *, update_gain: float = 1.0) -> Path:
    """Qwen3 with experts in every layer but the second."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**_COMMON, head_dim=16, norm_topk_prob=True, **experts)
    return _save(config, folder, update_gain=update_gain)


def build_gpt_oss(folder: Path) -> Path:
    """GPT-OSS: attention sinks, every other layer a window, YaRN positions, experts with biases."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _save(GptOssConfig(**_COMMON, head_dim=16, sliding_window=32, rope_parameters=rope, **experts), folder)


def build_deepseek_v3(folder: Path) -> Path:
    """DeepSeek-V3: latent attention, expert groups, a shared expert, the first layer dense."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
    sizes = {**_COMMON, "num_key_value_heads": 4}
    return _save(DeepseekV3Config(**sizes, **latent, **experts), folder)


def build_glm4_moe(folder: Path, *, update_gain: float = 1.0) -> Path:
    """GLM-4.5: partial rotary, query and key norms, sigmoid routing."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Glm4MoeConfig(
        **_COMMON, head_dim=16, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, **experts
    )
    return _save(config, folder, update_gain=update_gain)


def build_mistral(folder: Path) -> Path:
    """Mistral with a sliding window in every layer."""
    return _save(MistralConfig(**_COMMON, head_dim=16, sliding_window=32), folder)


def build_olmo2(folder: Path) -> Path:
    """OLMo 2: norms after attention and after the feed-forward part."""
    return _save(Olmo2Config(**_COMMON), folder)


def build_phi3(folder: Path) -> Path:
    """Phi-3: fused projections."""
    return _save(Phi3Config(**_COMMON), folder)


FAMILY_BUILDERS: dict[str, Callable[[Path], Path]] = {
    "qwen3": build_dense,
    "llama": build_llama,
    "gemma3": build_gemma3,
    "qwen3_5": build_hybrid,
    "qwen3_5_deep": build_qwen3_5_deep,
    "qwen3_5_deep_wrapper": build_qwen3_5_deep_wrapper,
    "qwen3_moe": build_qwen3_moe,
    "qwen3_5_moe": build_qwen3_5_moe,
    "gpt_oss": build_gpt_oss,
    "deepseek_v3": build_deepseek_v3,
    "glm4_moe": build_glm4_moe,
    "mistral": build_mistral,
    "olmo2": build_olmo2,
    "phi3": build_phi3,
}
