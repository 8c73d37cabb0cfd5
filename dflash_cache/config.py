"""Settings of both stages: flag over ``--config`` file over recipe over default, resolved into one frozen object.

Only :func:`resolve` builds a configuration from outside input; the result is stored in whatever it made.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from dflash_cache.errors import ConfigError
from dflash_cache.spec import FrozenModel

__all__ = [
    "RECIPES",
    "Codec",
    "CorpusConfig",
    "DrafterSettings",
    "ExtractConfig",
    "LongDocuments",
    "LossConfig",
    "OnBad",
    "OptimizerConfig",
    "RecipeName",
    "TemplateValue",
    "TrainConfig",
    "resolve",
]

Codec = Literal["compact", "fast"]
RecipeName = Literal["speculators", "paper"]
LongDocuments = Literal["truncate", "split", "drop"]
OnBad = Literal["stop", "skip"]
# JSON has no infinity and no NaN, and NaN differs from itself: a cache or run made with one could not be continued.
FiniteFloat = Annotated[float, Field(allow_inf_nan=False, strict=True)]
TemplateValue = str | int | FiniteFloat | bool

# Strict: TOML's true is no number, and a quoted number is text.
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Seed = Annotated[int, Field(ge=0, strict=True)]
LayerIndex = Annotated[int, Field(strict=True)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]
Share = Annotated[FiniteFloat, Field(ge=0, lt=1)]


# Far beyond any drafter; a typing error then fails at once rather than after hours of allocating.
MAX_DRAFTER_LAYERS = 256
MAX_BLOCK_SIZE = 1024


class CorpusConfig(FrozenModel):
    """How text becomes tokens; all of it is part of a cache's identity.

    Attributes:
      files: JSON Lines files, plain or gzip, read in this order.
      max_length: Most tokens of a document.
      long: What happens to a longer one: ``truncate`` cuts off the rest, ``split`` makes consecutive documents of it,
        ``drop`` leaves it out.
      limit: Read only the first so many documents.
      sample: Of these, draw so many at random; they stay in the order of the files, since training shuffles anyway.
      shuffle_seed: Of that draw; 0 when not given.
      template_kwargs: Arguments of the chat template, such as ``enable_thinking``.
    """

    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    max_length: Annotated[int, Field(ge=2, strict=True)] = 4096
    long: LongDocuments = "truncate"
    limit: PositiveInt | None = None
    sample: PositiveInt | None = None
    shuffle_seed: Seed | None = None
    template_kwargs: dict[str, TemplateValue] = {}

    @model_validator(mode="after")
    def _a_seed_needs_a_draw(self) -> "CorpusConfig":
        if self.shuffle_seed is not None and self.sample is None:
            raise ValueError("shuffle_seed decides which documents a sample draws; give sample too, or leave it out")
        return self


class ExtractConfig(FrozenModel):
    """Settings of stage one.

    Attributes:
      model: Hub name or folder of the target.
      corpus: The text and how it is tokenised.
      out: Folder of the cache.
      revision: Commit, tag or branch of a hub model.
      dtype: Number format in which the target runs; ``auto`` is the checkpoint's own on a GPU, float32 on the CPU.
      device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
      attention: Attention implementation of the target.
      trust_remote_code: Whether code shipped with the model may run.
      fc_layers: 0-based decoder layers whose outputs feed the drafter's fc; None spreads five over the target.
      batch_tokens: Padded tokens in one forward pass.
      shard_tokens: Tokens in a full shard; None aims at 512 MiB of raw hidden states.
      window_tokens: Tokens batched together by length, in whole shards; None aims at 32 batches within 8 GiB.
      codec: ``compact`` compresses losslessly; ``fast`` only adds checksums.
      fused: Whether a target on a GPU runs with fused pieces where flash-linear-attention is installed.
      self_check_documents: Documents that are recomputed one by one before the first shard is sealed.
      on_bad: Whether a document whose states are NaN, infinite or zero stops the run (``stop``), or is left out and
        listed in the manifest (``skip``).
      overwrite: Whether an existing cache in ``out`` is deleted first.
    """

    model: str
    corpus: CorpusConfig
    out: Path = Path("cache")
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    trust_remote_code: bool = False
    fc_layers: tuple[LayerIndex, ...] | None = None
    batch_tokens: PositiveInt = 4096
    shard_tokens: PositiveInt | None = None
    window_tokens: PositiveInt | None = None
    codec: Codec = "compact"
    fused: bool = True
    self_check_documents: PositiveInt = 4
    on_bad: OnBad = "stop"
    overwrite: bool = False


class LossConfig(FrozenModel):
    """What the drafter is trained to do in each supervised slot (dflash.md sections 4 and 5).

    Attributes:
      terms: Loss terms and their weights: ``ce`` hard cross-entropy, ``kl_div`` forward KL from the target's
        distribution.
      temperature: Divides both logits in ``kl_div``, whose value is multiplied by its square.
      gamma: Slots are weighted ``exp(-(slot - 1) / gamma)``; None weighs them alike.
      label: ``target_argmax``, the argmax of the target's logits one token earlier, or ``data_token``, the corpus' own.
      denominator: ``mask``, the number of supervised slots + 1e-5, or ``mask_weight``, the sum of their weights.
    """

    terms: Annotated[dict[Literal["ce", "kl_div"], PositiveFloat], Field(min_length=1)] = {"ce": 1.0}
    temperature: PositiveFloat = 1.0
    gamma: PositiveFloat | None = 4.0
    label: Literal["target_argmax", "data_token"] = "target_argmax"
    denominator: Literal["mask", "mask_weight"] = "mask"


class OptimizerConfig(FrozenModel):
    """AdamW with linear warmup and cosine decay.

    Attributes:
      lr: Peak learning rate.
      weight_decay: Decoupled, on matrices only.
      beta1, beta2, eps: As in Adam.
      warmup_ratio: Share of all steps in which the rate rises from 0.
      min_lr_ratio: Last learning rate as a share of the peak.
      max_grad_norm: Gradients are scaled down to this norm.
    """

    lr: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.01
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: PositiveFloat = 1e-8
    warmup_ratio: Share = 0.04
    min_lr_ratio: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    max_grad_norm: PositiveFloat = 1.0


class DrafterSettings(FrozenModel):
    """The drafter's geometry as far as a user sets it; what is None is derived from the target."""

    num_layers: Annotated[int, Field(gt=0, le=MAX_DRAFTER_LAYERS, strict=True)] | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    sliding_window: PositiveInt | None = None
    sliding_window_rule: Literal["query", "anchor"] | None = None
    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK_SIZE, strict=True)] | None = None
    mask_token_id: Annotated[int, Field(ge=0, strict=True)] | None = None
    rope_theta: PositiveFloat | None = None
    rms_norm_eps: PositiveFloat | None = None
    max_position_embeddings: PositiveInt | None = None


class TrainConfig(FrozenModel):
    """Settings of stage two.

    Attributes:
      shards: Folder of the cache.
      out: Folder of the run: checkpoints, metrics and the final drafter.
      recipe: The preset beneath the other settings.
      seed: Of weights, order, anchors and noise.
      epochs: Passes over the training documents; ``max_steps`` may end the run earlier.
      max_steps: Optimizer steps; None lets ``epochs`` decide.
      row_tokens: Tokens of packed documents in one row.
      rows_per_step: Rows whose gradients are accumulated into one optimizer step, with one exact denominator.
      num_anchors: Blocks trained in a row, shared fairly by its documents.
      noise_half_width: Uniform noise in [-x, x) on the fc features, in training only, in units of the hidden states.
      loss, optimizer, drafter: See their classes.
      eval_fraction: Share of the documents held out.
      eval_every: Steps between evaluations; None evaluates at every checkpoint.
      save_every: Steps between checkpoints.
      keep_checkpoints: Newest checkpoints kept.
      device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
      overwrite: Whether an existing run in ``out`` is deleted first.
      resume: Whether to continue the run in ``out``.
      allow_incomplete: Whether a cache whose extraction has not finished may be trained on as it is.
    """

    shards: Path
    out: Path = Path("drafter")
    recipe: RecipeName = "speculators"
    seed: Seed = 0
    epochs: PositiveInt = 6
    max_steps: PositiveInt | None = None
    row_tokens: Annotated[int, Field(ge=2, strict=True)] = 4096
    rows_per_step: PositiveInt = 1
    num_anchors: PositiveInt = 512
    noise_half_width: NonNegativeFloat = 0.05
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    drafter: DrafterSettings = DrafterSettings()
    eval_fraction: Share = 0.02
    eval_every: PositiveInt | None = None
    save_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    device: str = "auto"
    overwrite: bool = False
    resume: bool = False
    allow_incomplete: bool = False

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "TrainConfig":
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other: one continues the run in out, one deletes it")
        return self


# dflash.md section 0. The paper's gamma goes with the block size: 7, 5 and 4 for 16, 10 and 8 slots.
RECIPES: Mapping[RecipeName, Mapping[str, Any]] = {
    "speculators": {
        "noise_half_width": 0.05,
        "loss": {"terms": {"ce": 1.0}, "gamma": 4.0, "label": "target_argmax", "denominator": "mask"},
        "optimizer": {"lr": 3e-4, "weight_decay": 0.01, "warmup_ratio": 0.04},
    },
    "paper": {
        "noise_half_width": 0.0,
        "loss": {"terms": {"ce": 1.0}, "label": "data_token", "denominator": "mask_weight"},
        "optimizer": {"lr": 6e-4, "weight_decay": 0.0, "warmup_ratio": 0.04},
        "drafter": {"sliding_window_rule": "query"},
    },
}
_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
_DEFAULT_BLOCK_SIZE = 16

Config = TypeVar("Config", ExtractConfig, TrainConfig)


def resolve(
    kind: type[Config],
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    stored: Config | None = None,
) -> Config:
    """Build a configuration: flag over file over stored settings over recipe over default.

    Args:
      kind: Which configuration.
      flags: Settings given on the command line, nested like the configuration; None means not given.
      config_file: A TOML file with the same names.
      stored: Settings of the run that is being continued.

    Raises:
      ConfigError: Naming the unknown setting and the nearest known one, or the value that is out of range.
    """
    from_file = _read_toml(config_file) if config_file else {}
    _refuse_unknown(kind, from_file, str(config_file))
    before = stored.model_dump(exclude={"resume", "overwrite"}) if stored is not None else {}
    given = _merge(_merge(before, from_file), _drop_none(flags))
    if kind is TrainConfig:
        given = _merge(_recipe_preset(given), given)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _recipe_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    name = given.get("recipe", "speculators")
    if name not in tuple(RECIPES):  # a tuple: what a file gives need not be hashable
        raise ConfigError(f"recipe {name!r} is not known; choose one of {', '.join(RECIPES)}")
    preset = _merge({}, RECIPES[name])
    if name == "paper":
        block_size = given.get("drafter", {}).get("block_size", _DEFAULT_BLOCK_SIZE)
        if not isinstance(block_size, int):
            return preset  # the model says what a block size is
        if block_size not in _PAPER_GAMMA and "gamma" not in given.get("loss", {}):
            raise ConfigError(
                f"the paper gives gamma for block sizes {sorted(_PAPER_GAMMA)}, not for {block_size}; set loss.gamma"
            )
        preset["loss"]["gamma"] = _PAPER_GAMMA.get(block_size)
    return preset


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read as TOML: {error}") from error


def _refuse_unknown(kind: type[FrozenModel], given: Mapping[str, Any], where: str, prefix: str = "") -> None:
    for name, value in given.items():
        field = kind.model_fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, kind.model_fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(sorted(kind.model_fields))}"
            raise ConfigError(f"{where}: unknown setting {prefix}{name}; {hint}")
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, FrozenModel):
            if not isinstance(value, Mapping):  # flags of the group would cover it up
                raise ConfigError(f"{where}: {prefix}{name} is {value!r}, expected a table: [{prefix}{name}]")
            _refuse_unknown(nested, value, where, f"{prefix}{name}.")


def _drop_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Remove what was not given, and groups of which nothing was given."""
    kept: dict[str, Any] = {}
    for name, value in flags.items():
        cleaned = _drop_none(value) if isinstance(value, Mapping) else value
        if cleaned is not None and (cleaned != {} or not isinstance(value, Mapping)):
            kept[name] = cleaned
    return kept


# Settings that replace as a whole: merging them key by key would mix one layer's loss terms with another's.
_WHOLE_SETTINGS = frozenset({"terms", "template_kwargs"})


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: _merge(value, {}) if isinstance(value, Mapping) else value for name, value in base.items()}
    for name, value in over.items():
        below = merged.get(name)
        nested = isinstance(value, Mapping) and isinstance(below, dict) and name not in _WHOLE_SETTINGS
        merged[name] = _merge(below, value) if nested and isinstance(below, dict) else value
    return merged


# Where a setting's flag is not named like the setting.
_FLAGS = {"corpus": "--data", "corpus.files": "--data"}


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"]) or "configuration"
        if item["type"] == "missing":
            flag = _FLAGS.get(name, f"--{name}")
            lines.append(f"{name} is not given; name it with {flag} or in the --config file")
            continue
        got = f" (got {item['input']!r})" if item["loc"] else ""
        lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')}{got}")
    return "; ".join(lines)
