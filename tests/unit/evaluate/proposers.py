"""Block proposers whose drafts are known, and drafters for tiny targets."""

from typing import Any

import torch
from torch import Tensor

from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.model import Drafter
from dflash_cache.evaluate.session import DecodingTarget


class KnownProposer:
    """Drafts from a known continuation, wrong where told; remembers what it was shown."""

    def __init__(
        self, prompt: list[int], continuation: list[int], block_size: int, wrong_every: int | None = None
    ) -> None:
        self.block_size = block_size
        self.fc_layers = (1, 3)
        self.features: list[Tensor] = []
        self.context_lengths: list[int] = []
        self.anchors: list[int] = []
        self._sequence = prompt + continuation
        self._wrong_every = wrong_every

    def begin(self) -> None:
        self.features.clear()

    def extend(self, fc_features_QLH: Tensor) -> None:
        self.features.append(fc_features_QLH)

    def propose(self, anchor_id: int) -> Tensor:
        known = sum(len(part) for part in self.features)
        self.context_lengths.append(known)
        self.anchors.append(anchor_id)
        drafts = (self._sequence[known + 1 : known + self.block_size] + [0] * self.block_size)[: self.block_size - 1]
        if self._wrong_every is not None:
            drafts = [
                (token + 1) % 512 if (known + 1 + slot) % self._wrong_every == 0 else token
                for slot, token in enumerate(drafts)
            ]
        return torch.tensor(drafts)


def random_drafter(target: DecodingTarget, **changes: Any) -> Drafter:
    """A drafter of random weights that fits the target."""
    loaded = target.loaded
    fields: dict[str, Any] = {
        "hidden_size": loaded.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": loaded.vocab_size,
        "rope_theta": 10_000.0,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 16,
        "block_size": 6,
        "mask_token_id": loaded.vocab_size - 1,
        "target_layer_ids": (1, 2, 4),
        "num_target_layers": len(loaded.layers),
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    drafter = Drafter(DrafterConfig(**(fields | changes)))
    drafter.initialize(torch.Generator().manual_seed(0))
    return drafter
