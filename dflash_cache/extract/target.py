"""What a target is, before its weights are loaded: config, tokenizer, sizes, fingerprint."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from dflash_cache.config import ExtractConfig
from dflash_cache.device import choose_device
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.extract.digests import (
    config_digest,
    hub_weights_digest,
    stored_dtypes,
    tokenizer_digest,
    weights_digest,
)
from dflash_cache.extract.mask_token import MaskTokenProposal
from dflash_cache.extract.target_name import TargetName, resolve_target_name
from dflash_cache.spec import FinalNormSpec, TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TargetFiles", "choose_compute_dtype", "explain_load_error", "open_target"]

logger = logging.getLogger(__name__)

# What transformers and the libraries below it raise for a model that is absent, foreign or broken.
LOAD_ERRORS = (
    *(OSError, ValueError, ImportError, RuntimeError, KeyError, AttributeError, TypeError),
    *(ArithmeticError, StrictDataclassError),
)


@dataclass(frozen=True)
class TargetFiles:
    """A target's config and tokenizer, opened; its weights are not.

    Attributes:
      name: Where it lies.
      commit: The hub repository's commit; None for a folder.
      config: The whole config, possibly of a multimodal wrapper.
      text_config: The config of the text model in it.
      tokenizer: Its tokenizer.
      tokenizer_vocab_size: Ids that the tokenizer can produce.
      eos_token_ids: Ids that end a generation.
      device: Where it will run.
      compute_dtype: Number format in which it will run.
      config_digest, weights_digest, tokenizer_digest: Its fingerprint.
      trust_remote_code: Whether code shipped with it may run.
    """

    name: TargetName
    commit: str | None
    config: PreTrainedConfig
    text_config: PreTrainedConfig
    tokenizer: "PreTrainedTokenizerBase"
    tokenizer_vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    compute_dtype: torch.dtype
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    trust_remote_code: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.text_config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, H."""
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, V."""
        return int(self.text_config.vocab_size)

    @property
    def model_type(self) -> str:
        """The text model's type."""
        return str(self.text_config.model_type)

    @property
    def max_positions(self) -> int | None:
        """Tokens that a document may have; None when the config does not say, or says -1 for any number."""
        stated = _optional_int(self.text_config, "max_position_embeddings")
        return stated if stated is not None and stated > 0 else None

    def spec(self, mask_token: MaskTokenProposal, final_norm: FinalNormSpec, *, tied: bool) -> TargetSpec:
        """Describe the target for the manifest.

        Args:
          mask_token: The proposed mask token.
          final_norm: As found in the weights, or as the manifest of the cache to be continued has it.
          tied: Likewise.
        """
        architectures = getattr(self.config, "architectures", None)
        if not isinstance(architectures, list | tuple) or not architectures:
            architectures = [type(self.config).__name__]
        return TargetSpec(
            name=self.name.identity_name,
            revision=self.commit,
            architecture=str(architectures[0]),
            model_type=self.model_type,
            config_digest=self.config_digest,
            weights_digest=self.weights_digest,
            tokenizer_digest=self.tokenizer_digest,
            compute_dtype=str(self.compute_dtype).removeprefix("torch."),
            quantization=_quantization(self.config),
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            tokenizer_vocab_size=self.tokenizer_vocab_size,
            intermediate_size=_optional_int(self.text_config, "intermediate_size"),
            max_position_embeddings=self.max_positions,
            rope_theta=_rope_theta(self.text_config),
            bos_token_id=self.tokenizer.bos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_ids=self.eos_token_ids,
            mask_token_id=mask_token.token_id,
            mask_token_reason=mask_token.reason,
            final_norm=final_norm,
            tied_embeddings=tied,
        )


def open_target(config: ExtractConfig, on_notice: Callable[[str], None] = logger.info) -> TargetFiles:
    """Open a target's config and tokenizer and take its fingerprint; cheap, no weights are loaded.

    Args:
      config: Names the target.
      on_notice: Told, before anything is fetched, which organisation was filled into a bare name.

    Raises:
      TargetError: If it does not exist, cannot be reached, or is not a causal language model.
      ConfigError: If the device is not there.
    """
    name = resolve_target_name(config.model)
    if name.notice:
        on_notice(name.notice)
    device = choose_device(config.device)
    where: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if name.folder is None:
        where["revision"] = config.revision
    elif config.revision is not None:
        raise ConfigError(f"{config.model} is a folder, which has no revisions; leave --revision {config.revision} out")
    model_config, raw_config, commit = _load_config(name, where)
    if commit is not None:
        where["revision"] = commit
    text_config = model_config.get_text_config(decoder=True)
    _require_sizes(name, text_config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name.location, **where)
    except LOAD_ERRORS as error:
        raise explain_load_error(name, "tokenizer", error) from error
    if not tokenizer.is_fast:
        raise TargetError(
            f"{name.location}: its tokenizer {type(tokenizer).__name__} has no fast (Rust) backend, which gives the "
            "character offsets that the loss mask needs; convert it to a tokenizer.json first"
        )
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # made up where the files are missing
        raise TargetError(
            f"{name.location}: its tokenizer has no vocabulary but special tokens; fetch the tokenizer's files too"
        )
    return TargetFiles(
        name=name,
        commit=commit,
        config=model_config,
        text_config=text_config,
        tokenizer=tokenizer,
        tokenizer_vocab_size=max(tokenizer.get_vocab().values()) + 1,
        eos_token_ids=_eos_token_ids(name, where, model_config, tokenizer),
        device=device,
        compute_dtype=choose_compute_dtype(config.dtype, device, _checkpoint_dtype(name, model_config)),
        config_digest=config_digest(raw_config),
        weights_digest=_weights_digest(name, commit),
        tokenizer_digest=tokenizer_digest(tokenizer),
        trust_remote_code=config.trust_remote_code,
    )


def choose_compute_dtype(asked: str, device: torch.device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Choose the number format in which the target runs; never float16, which residual streams overflow.

    ``auto``: float32 on the CPU; elsewhere the checkpoint's own, bfloat16 for float16, 8-bit and unknown ones.
    """
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    if device.type == "cpu" or checkpoint == torch.float32:
        return torch.float32
    return torch.bfloat16


def explain_load_error(name: TargetName, what: str, error: BaseException) -> TargetError:
    """Turn what the loading library raised into one message with a next step."""
    where = name.location
    causes = list(_causes(error))
    kinds = tuple(type(cause) for cause in causes)

    def caused_by(*wanted: type[BaseException]) -> bool:
        return any(issubclass(kind, wanted) for kind in kinds)

    if name.folder is None:
        if caused_by(GatedRepoError):
            return TargetError(f"{where} is gated: accept its terms on the hub, log in with `hf auth login`, try again")
        if caused_by(RevisionNotFoundError):
            return TargetError(f"{where} has no such revision; name a commit, tag or branch of it with --revision")
        if caused_by(RepositoryNotFoundError):
            return TargetError(
                f"{where} is not on the hub, or is private: check the name, or log in with `hf auth login`; "
                "a folder on this machine is given by its path"
            )
        if caused_by(OfflineModeIsEnabled, LocalEntryNotFoundError, ConnectionError):
            return TargetError(
                f"{where}: its {what} is not on this machine and the hub cannot be reached; connect to the network "
                "(and unset HF_HUB_OFFLINE), or give the path of a folder that holds the model"
            )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A strict config says in its first line only which field is wrong, and how in the next.
    text = " ".join(line.strip() for line in lines) if isinstance(error, StrictDataclassError) else lines[0]
    if any("trust_remote_code" in str(cause) for cause in causes):
        return TargetError(
            f"{where} needs code that it ships itself to load its {what}; read that code, and if you trust it, "
            "add --trust-remote-code"
        )
    if isinstance(error, ImportError):
        return TargetError(f"{where}: its {what} needs a package that is not installed: {text}")
    return TargetError(f"{where}: its {what} cannot be loaded: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _load_config(name: TargetName, where: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any], str | None]:
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name.location, revision=where.get("revision"))
        commit = None
        if name.folder is None:
            commit = raw.get("_commit_hash")
            where = {**where, "revision": commit}
        config = AutoConfig.from_pretrained(name.location, **where)
    except LOAD_ERRORS as error:
        raise explain_load_error(name, "config", error) from error
    if name.folder is None and commit is None:
        raise TargetError(f"{name.location}: the hub did not say which commit this is; fetch the model into a folder")
    return config, raw, commit


def _require_sizes(name: TargetName, text_config: PreTrainedConfig) -> None:
    for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
        size = _optional_int(text_config, field)
        if size is None or size < 1:
            raise TargetError(
                f"{name.location}: {field} in its config ({text_config.model_type}) is "
                f"{getattr(text_config, field, None)!r}, expected a positive number; a causal language model is needed"
            )


def _weights_digest(name: TargetName, commit: str | None) -> str:
    if name.folder is not None:
        return weights_digest(name.folder)
    return hub_weights_digest(name.location, str(commit))


def _checkpoint_dtype(name: TargetName, config: PreTrainedConfig) -> torch.dtype | None:
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    if isinstance(stated, str):
        stated = getattr(torch, stated, None)
    if isinstance(stated, torch.dtype):
        return stated
    if name.folder is None:
        return None
    totals = stored_dtypes(name.folder)
    most = max(totals, key=lambda dtype: totals[dtype]) if totals else ""
    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(most)


def _eos_token_ids(
    name: TargetName, where: dict[str, Any], config: PreTrainedConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[int, ...]:
    """Collect the ids that end a generation: of the generation config where there is one, else of the config."""
    try:
        generation: Any = GenerationConfig.from_pretrained(name.location, revision=where.get("revision") or "main")
    except OSError as error:  # most models have none; then transformers derives one from the config, as here
        logger.debug("%s has no generation config: %s", name.location, error)
        generation = config.get_text_config(decoder=True)
    found: list[Any] = []
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found += [] if value is None else value if isinstance(value, list | tuple) else [value]
    foreign = [token for token in found if not isinstance(token, int)]
    if foreign:
        raise TargetError(
            f"{name.location}: eos_token_id holds {foreign[0]!r}, expected a number or a list of numbers; mend its "
            "generation_config.json or config.json"
        )
    return tuple(sorted(set(found)))


def _quantization(config: PreTrainedConfig) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method))


def _rope_theta(text_config: PreTrainedConfig) -> float | None:
    parameters = getattr(text_config, "rope_parameters", None)
    if isinstance(parameters, dict):
        # Models with several kinds of attention have one entry a kind; the drafter follows the full one.
        full = parameters.get("full_attention")
        theta = (full if isinstance(full, dict) else parameters).get("rope_theta")
        if theta is not None:
            return float(theta)
    theta = getattr(text_config, "rope_theta", None)
    return None if theta is None else float(theta)


def _optional_int(config: PreTrainedConfig, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) else None
