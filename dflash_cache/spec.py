"""Which tensor is which: the vocabulary that both stages share. No torch, no input or output.

A *layer index* is a 0-based decoder layer and always means that layer's **output** (transformers calls it
``hidden_states[i + 1]``; vLLM and speculators count one higher). It is never negative.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_cache.errors import ConfigError

__all__ = [
    "DEFAULT_NUM_FC_LAYERS",
    "FeatureSpec",
    "FinalNormSpec",
    "FrozenModel",
    "LayerSpec",
    "NormKind",
    "TargetSpec",
    "check_fc_layers",
    "spread_fc_layers",
]

DEFAULT_NUM_FC_LAYERS = 5

NormKind = Literal["rms", "rms_one_plus", "layer_norm"]
"""How the final norm scales: ``rms`` gain w; ``rms_one_plus`` gain 1 + w (Qwen3.5, Qwen3.6, Gemma); ``layer_norm``."""


class FrozenModel(BaseModel):
    """Base of everything that is read from or written to a file: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=())


class LayerSpec(FrozenModel):
    """One captured tensor of the target.

    Attributes:
      index: 0-based decoder layer.
      point: Where in that layer; only its output is ever captured.
      final_norm_applied: Whether the target's final norm was already applied to it.
    """

    index: Annotated[int, Field(ge=0)]
    point: Literal["decoder_layer_output"] = "decoder_layer_output"
    final_norm_applied: bool


class FeatureSpec(FrozenModel):
    """The tensors that a cache stores for each token.

    Attributes:
      fc_layers: The layers concatenated into the drafter's ``fc``, in this order.
      last_layer: The last decoder layer, before the final norm unless its flag says otherwise.
      hidden_size: H, the width of each.
      dtype: Stored number format.
    """

    fc_layers: tuple[LayerSpec, ...]
    last_layer: LayerSpec
    hidden_size: Annotated[int, Field(gt=0)]
    dtype: Literal["bfloat16"] = "bfloat16"

    @property
    def fc_layer_indices(self) -> tuple[int, ...]:
        """The fc layers' indices, 0-based, in stored order."""
        return tuple(layer.index for layer in self.fc_layers)

    @property
    def bytes_per_token(self) -> int:
        """Uncompressed bytes of one token's hidden states."""
        return (len(self.fc_layers) + 1) * self.hidden_size * 2

    @classmethod
    def for_layers(cls, fc_layers: Sequence[int], *, num_layers: int, hidden_size: int) -> "FeatureSpec":
        """Build the specification that stage one captures: raw layer outputs, final norm never applied.

        Raises:
          ConfigError: If fc_layers is not a valid choice for a target of num_layers layers.
        """
        check_fc_layers(fc_layers, num_layers)
        return cls(
            fc_layers=tuple(LayerSpec(index=i, final_norm_applied=False) for i in fc_layers),
            last_layer=LayerSpec(index=num_layers - 1, final_norm_applied=False),
            hidden_size=hidden_size,
        )


class FinalNormSpec(FrozenModel):
    """The target's final norm: what lies between the last hidden states and lm_head."""

    kind: NormKind
    eps: Annotated[float, Field(gt=0)]


class TargetSpec(FrozenModel):
    """What identifies the target and what stage two must know of it.

    Attributes:
      name: Hub name or folder name, as given.
      revision: Commit of the hub repository; None for a local folder.
      architecture: First entry of the config's ``architectures``.
      model_type: The text model's ``model_type``.
      config_digest: Digest of the config that was loaded.
      weights_digest: Digest of the weight files (names, sizes, and contents of their headers).
      tokenizer_digest: Digest of the serialized tokenizer.
      compute_dtype: Number format in which the target ran.
      quantization: Quantization method of the checkpoint; None when it is not quantized.
      num_layers: Decoder layers.
      hidden_size: Width of the residual stream.
      vocab_size: Rows of the embedding, which may exceed the tokenizer's vocabulary.
      tokenizer_vocab_size: Ids that the tokenizer can produce.
      intermediate_size: Width of a dense MLP, as a starting point for the drafter's; None where the target has none.
      max_position_embeddings: The target's window in tokens; None when its config names none.
      rope_theta: Base of the target's rotary embedding; None when its config names none.
      bos_token_id, pad_token_id: As the tokenizer has them; None when absent.
      eos_token_ids: Ids that end a generation.
      mask_token_id: The id that stage one proposes for unknown block slots; None when no safe one was found.
      mask_token_reason: Why that id, in words.
      final_norm: Kind and eps of the final norm.
      tied_embeddings: Whether lm_head and embedding are one matrix.
    """

    name: str
    revision: str | None
    architecture: str
    model_type: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    compute_dtype: str
    quantization: str | None
    num_layers: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    tokenizer_vocab_size: Annotated[int, Field(gt=0)]
    intermediate_size: int | None
    max_position_embeddings: int | None
    rope_theta: float | None
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None
    mask_token_reason: str
    final_norm: FinalNormSpec
    tied_embeddings: bool


def spread_fc_layers(num_layers: int, num_fc_layers: int = DEFAULT_NUM_FC_LAYERS) -> tuple[int, ...]:
    """Choose the fc layers as the published DFlash drafters do.

    ``round(1 + j (num_layers - 4) / (n - 1))`` for j = 0..n-1, Python's rounding to even; the middle layer for n = 1.
    64 layers give 1, 16, 31, 46, 61 (z-lab/dflash, ``model.py``).

    Args:
      num_layers: Decoder layers of the target.
      num_fc_layers: How many to choose, n.

    Returns:
      0-based layer indices, ascending.

    Raises:
      ConfigError: If the target is too shallow for so many different layers.
    """
    if num_fc_layers < 1:
        raise ConfigError(f"the number of fc layers must be at least 1, got {num_fc_layers}")
    if num_fc_layers == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_fc_layers - 1)
    layers = tuple(round(1 + j * step) for j in range(num_fc_layers))
    if len(set(layers)) != len(layers) or layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(
            f"a target of {num_layers} layers is too shallow to spread {num_fc_layers} fc layers over it by the "
            f"published rule (that gives {list(layers)}); name them yourself with --fc-layers, "
            f"for example --fc-layers {','.join(str(i) for i in range(min(num_layers, num_fc_layers)))}"
        )
    return layers


def check_fc_layers(fc_layers: Sequence[int], num_layers: int) -> None:
    """Refuse fc layers that a target does not have, or that name one layer twice.

    Raises:
      ConfigError: Naming the offending indices and the valid range.
    """
    valid = f"valid are 0 to {num_layers - 1}, 0-based outputs of decoder layers"
    if not fc_layers:
        raise ConfigError(f"no fc layers given; {valid}")
    wrong = [i for i in fc_layers if not 0 <= i < num_layers]
    if wrong:
        raise ConfigError(f"fc layers {wrong} do not exist in a target of {num_layers} layers; {valid}")
    repeated = sorted({i for i in fc_layers if list(fc_layers).count(i) > 1})
    if repeated:
        raise ConfigError(f"fc layers {repeated} are named more than once in {list(fc_layers)}; {valid}")
