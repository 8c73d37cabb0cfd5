"""The target's embedding, final norm and lm_head, which travel with the cache: stage two never loads the target.

Shapes: V vocabulary, H hidden size.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_cache.errors import CacheDamagedError
from dflash_cache.spec import FinalNormSpec, FrozenModel

__all__ = ["TARGET_HEAD_NAME", "HeadSpec", "TargetHead"]

TARGET_HEAD_NAME = "target_head.safetensors"
_METADATA_KEY = "dflash_cache_head"


class HeadSpec(FrozenModel):
    """What the weights alone do not say.

    Attributes:
      final_norm: Kind and eps of the final norm.
      embedding_scale: Factor that the target applies to its embedding's rows (Gemma's sqrt(H)), 1 elsewhere.
      tied: Whether lm_head is the embedding matrix.
    """

    final_norm: FinalNormSpec
    embedding_scale: float = Field(gt=0)
    tied: bool


class TargetHead(nn.Module):
    """Frozen pieces of the target around its decoder layers.

    Attributes:
      spec: Norm kind, eps, scale, tying.
      embedding: [V, H].
      norm_weight: [H]; the gain, or the gain - 1, by ``spec.final_norm.kind``.
      norm_bias: [H] or None; of a layer norm.
      lm_head_weight: [V, H].
      lm_head_bias: [V] or None.
    """

    embedding: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    lm_head_weight: Tensor
    lm_head_bias: Tensor | None

    def __init__(
        self,
        spec: HeadSpec,
        *,
        embedding: Tensor,
        norm_weight: Tensor,
        lm_head_weight: Tensor,
        norm_bias: Tensor | None = None,
        lm_head_bias: Tensor | None = None,
    ) -> None:
        """Keep the tensors as buffers: they are never trained and never part of a drafter's checkpoint."""
        super().__init__()
        self.spec = spec
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("norm_bias", norm_bias, persistent=False)
        self.register_buffer("lm_head_weight", lm_head_weight, persistent=False)
        self.register_buffer("lm_head_bias", lm_head_bias, persistent=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Look up embeddings as the target does.

        Args:
          input_ids: [...] int64.

        Returns:
          [..., H] in the embedding's dtype.
        """
        rows = F.embedding(input_ids, self.embedding)
        return rows if self.spec.embedding_scale == 1.0 else rows * self.spec.embedding_scale

    def final_norm(self, last_hidden_states: Tensor) -> Tensor:
        """Apply the target's final norm, computed in float32.

        RMS norm: x / sqrt(mean(x^2) + eps) times w, or times 1 + w (Qwen3.5, Qwen3.6, Gemma).

        Args:
          last_hidden_states: [..., H]; output of the last decoder layer.

        Returns:
          [..., H] in lm_head's dtype.
        """
        hidden = last_hidden_states.float()
        weight = self.norm_weight.float()
        norm = self.spec.final_norm
        if norm.kind == "layer_norm":
            bias = None if self.norm_bias is None else self.norm_bias.float()
            normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, norm.eps)
        else:
            gain = weight + 1.0 if norm.kind == "rms_one_plus" else weight
            normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.eps) * gain
        return normed.to(self.lm_head_weight.dtype)

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        """Compute the target's logits from the last hidden states (before the final norm).

        Args:
          last_hidden_states: [..., H].

        Returns:
          [..., V] in lm_head's dtype. Monotonic transforms that a target adds (soft caps, scales) are not applied.
        """
        return F.linear(self.final_norm(last_hidden_states), self.lm_head_weight, self.lm_head_bias)

    def save(self, path: Path) -> None:
        """Write the head as safetensors; a tied lm_head is stored once."""
        tensors = {"embedding": self.embedding, "final_norm.weight": self.norm_weight}
        if not self.spec.tied:
            tensors["lm_head.weight"] = self.lm_head_weight
        if self.norm_bias is not None:
            tensors["final_norm.bias"] = self.norm_bias
        if self.lm_head_bias is not None:
            tensors["lm_head.bias"] = self.lm_head_bias
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # One metadata key only: safetensors writes several in random order, and equal caches have equal bytes.
        save_file(contiguous, path, metadata={_METADATA_KEY: self.spec.model_dump_json()})

    @classmethod
    def load(cls, path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "TargetHead":
        """Read a head.

        Args:
          path: The file.
          device: Where to put it.
          dtype: Of the matrices; None keeps the stored one. The norm's weights are kept in float32 arithmetic anyway.

        Raises:
          CacheDamagedError: If the file is not a whole target head.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            spec = HeadSpec.model_validate(json.loads(metadata[_METADATA_KEY]))
            if dtype is not None:
                tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            embedding = tensors["embedding"]
            _check_shapes(tensors, embedding.shape)
            return cls(
                spec,
                embedding=embedding,
                norm_weight=tensors["final_norm.weight"],
                lm_head_weight=embedding if spec.tied else tensors["lm_head.weight"],
                norm_bias=tensors.get("final_norm.bias"),
                lm_head_bias=tensors.get("lm_head.bias"),
            )
        except (OSError, SafetensorError, KeyError, ValueError, ValidationError) as error:
            raise CacheDamagedError(
                f"{path}: damaged: it is not a whole target head ({error}). Restore it from a copy of the cache, "
                "or delete the cache and run extract again."
            ) from error


def _check_shapes(tensors: dict[str, Tensor], embedding_shape: torch.Size) -> None:
    """Refuse tensors that do not belong together; ValueError names the first."""
    if len(embedding_shape) != 2:
        raise ValueError(f"embedding has shape {tuple(embedding_shape)}, expected two dimensions")
    vocab_size, hidden_size = embedding_shape
    expected = {
        "embedding": (vocab_size, hidden_size),
        "final_norm.weight": (hidden_size,),
        "final_norm.bias": (hidden_size,),
        "lm_head.weight": (vocab_size, hidden_size),
        "lm_head.bias": (vocab_size,),
    }
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected.get(name):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected.get(name)}")
