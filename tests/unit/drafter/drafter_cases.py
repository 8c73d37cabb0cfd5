"""Golden cases, a tiny target and a tiny row for the drafter's tests."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_cache.drafter.anchors import Anchors
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.model import Drafter

GOLDEN = Path(__file__).parents[2] / "golden"
SPECULATORS_CASES = ("full_b8", "slide_b16", "crowded_b4", "crossing_b8")
FC_LAYERS = (1, 16, 31, 46, 61)


@dataclass(frozen=True)
class TinyTarget:
    """The frozen parts of a target whose final norm is a plain RMSNorm."""

    embedding: Tensor
    final_norm: Tensor
    lm_head_weight: Tensor
    lm_head_bias: Tensor | None = None

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding[input_ids]

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(last_hidden_states, self.final_norm.shape, self.final_norm, 1e-6)
        return torch.nn.functional.linear(normed, self.lm_head_weight, self.lm_head_bias)

    def to(self, dtype: torch.dtype) -> "TinyTarget":
        return TinyTarget(self.embedding.to(dtype), self.final_norm.to(dtype), self.lm_head_weight.to(dtype))


@dataclass(frozen=True)
class TinyRow:
    """A packed row."""

    input_ids: Tensor
    positions: Tensor
    doc_ids: Tensor
    loss_mask: Tensor
    fc_features: Tensor
    last_hidden_states: Tensor

    def cut(self, start: int, stop: int) -> "TinyRow":
        """A row of the tokens start..stop-1, whose documents are numbered from 0 again."""
        fields = {name: value[start:stop] for name, value in vars(self).items()}
        fields["doc_ids"] = fields["doc_ids"] - fields["doc_ids"][0]
        return TinyRow(**fields)

    def changed(self, **fields: Tensor) -> "TinyRow":
        return replace(self, **fields)

    def to(self, dtype: torch.dtype) -> "TinyRow":
        return replace(
            self, fc_features=self.fc_features.to(dtype), last_hidden_states=self.last_hidden_states.to(dtype)
        )


@dataclass(frozen=True)
class GoldenCase:
    """One of speculators' cases."""

    config: DrafterConfig
    losses: dict[str, dict[str, float]]
    row: TinyRow
    anchors: Anchors
    target: TinyTarget
    drafter: Drafter
    out: dict[str, Tensor]


def drafter_config(**changes: Any) -> DrafterConfig:
    """Two sliding layers and a full one over a hidden size of 32."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "rope_theta": 10_000.0,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 6,
        "block_size": 4,
        "mask_token_id": 60,
        "target_layer_ids": FC_LAYERS,
        "num_target_layers": 64,
        "max_position_embeddings": 4096,
    }
    return DrafterConfig(**(fields | changes))


def new_drafter(config: DrafterConfig, *, seed: int = 0) -> Drafter:
    """A drafter with weights large enough that every part of it shows in the output, and gains other than 1."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    drafter.initialize(generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(8)
    return drafter


def new_target(config: DrafterConfig, *, seed: int = 1) -> TinyTarget:
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return TinyTarget(
        embedding=torch.randn(shape, generator=generator),
        final_norm=1 + 0.3 * torch.randn(config.hidden_size, generator=generator),
        lm_head_weight=torch.randn(shape, generator=generator) * 0.5,
    )


def new_row(doc_lengths: tuple[int, ...], config: DrafterConfig, *, padding: int = 0, seed: int = 2) -> TinyRow:
    """Documents of random tokens, all supervised but each first one, then padding."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(doc_lengths) + padding
    fc_shape = (num_tokens, len(config.target_layer_ids), config.hidden_size)
    positions = torch.cat([torch.arange(n) for n in doc_lengths] + [torch.zeros(padding, dtype=torch.int64)])
    doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(doc_lengths)] + [torch.full((padding,), -1)])
    return TinyRow(
        input_ids=torch.randint(config.vocab_size - 1, (num_tokens,), generator=generator),
        positions=positions,
        doc_ids=doc_ids,
        loss_mask=(positions > 0) & (doc_ids >= 0),
        fc_features=torch.randn(fc_shape, generator=generator),
        last_hidden_states=torch.randn(num_tokens, config.hidden_size, generator=generator),
    )


def anchors_at(positions: list[int], *, padding: int = 0) -> Anchors:
    return Anchors(
        torch.tensor(positions + [0] * padding, dtype=torch.int64),
        torch.tensor([True] * len(positions) + [False] * padding, dtype=torch.bool),
    )


def load_golden(name: str) -> GoldenCase:
    described = json.loads((GOLDEN / f"{name}.json").read_text())
    weights = load_file(GOLDEN / f"{name}.weights.safetensors")
    case = load_file(GOLDEN / f"{name}.case.safetensors")
    settings = described["config"]
    assert settings.pop("sliding_window_non_causal") is False
    if "sliding_attention" not in settings["layer_types"]:
        settings["sliding_window"] = None
    config = DrafterConfig(**settings, sliding_window_rule="anchor", num_target_layers=64, max_position_embeddings=4096)
    drafter = Drafter(config)
    frozen = ("embed_tokens.", "lm_head.", "verifier_")
    drafter.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith(frozen)})
    target = TinyTarget(
        weights["embed_tokens.weight"], weights["verifier_norm.weight"], weights["verifier_lm_head.weight"]
    )
    row = TinyRow(
        input_ids=case["input_ids"].long(),
        positions=case["positions"].long(),
        doc_ids=case["doc_ids"].long(),
        loss_mask=case["loss_mask"].bool(),
        fc_features=case["fc_features"],
        last_hidden_states=case["last_hidden_states"],
    )
    anchors = Anchors(case["anchors"].long(), case["anchor_valid"].bool())
    return GoldenCase(config, described["losses"], row, anchors, target, drafter, case)
