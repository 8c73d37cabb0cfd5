"""Small drafters and cards for the export tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_cache.config import TrainConfig, resolve
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.model import Drafter
from dflash_cache.export.card import ModelCard
from dflash_cache.format.manifest import CacheIdentity, CorpusSpec, ExtractSettings
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec


def drafter_config(**changes: Any) -> DrafterConfig:
    """Two sliding layers and a full one."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "rope_theta": 10_000_000.0,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 24,
        "block_size": 16,
        "mask_token_id": 96,
        "target_layer_ids": (1, 2, 4, 5, 6),
        "num_target_layers": 8,
        "max_position_embeddings": 4096,
    }
    return DrafterConfig(**(fields | changes))


def full_attention_config(**changes: Any) -> DrafterConfig:
    """Full layers only."""
    return drafter_config(layer_types=("full_attention",) * 3, sliding_window=None, **changes)


def random_drafter(config: DrafterConfig) -> Drafter:
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(0)
    drafter.initialize(generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return drafter


def cache_identity() -> CacheIdentity:
    """What a card tells of target and data."""
    return CacheIdentity(
        target=TargetSpec(
            name="tiny-random",
            revision=None,
            architecture="TinyForCausalLM",
            model_type="qwen3",
            config_digest="c" * 32,
            weights_digest="w" * 32,
            tokenizer_digest="t" * 32,
            compute_dtype="float32",
            quantization=None,
            num_layers=8,
            hidden_size=32,
            vocab_size=97,
            tokenizer_vocab_size=94,
            intermediate_size=64,
            max_position_embeddings=4096,
            rope_theta=1e7,
            bos_token_id=None,
            pad_token_id=0,
            eos_token_ids=(1,),
            mask_token_id=96,
            mask_token_reason="a row above the tokenizer's vocabulary",
            final_norm=FinalNormSpec(kind="rms", eps=1e-6),
            tied_embeddings=False,
        ),
        features=FeatureSpec.for_layers((1, 2, 4, 5, 6), num_layers=8, hidden_size=32),
        corpus=CorpusSpec(
            digest="d" * 32,
            num_documents=6,
            num_tokens=235,
            supervised_tokens=229,
            max_length=4096,
            template_digest=None,
            template_kwargs={},
            mask_token_uses=0,
            dropped={},
            truncated=0,
        ),
        settings=ExtractSettings(
            codec="compact",
            batch_tokens=256,
            shard_tokens=256,
            window_tokens=256,
            attention="sdpa",
            device_type="cpu",
        ),
    )


@dataclass(frozen=True)
class Evaluation:
    step: int = 475
    loss: float | None = 1.25
    accuracy: float | None = 0.5
    streak: float | None = 2.75
    eal: float | None = 3.75


def model_card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "identity": cache_identity(),
        "training": resolve(TrainConfig, {"shards": Path("/somewhere/private/cache"), "seed": 7}),
        "steps": 480,
        "held_out": Evaluation(),
        "documents": 6,
    }
    return ModelCard(**(fields | changes))
