"""What a run will do, from its settings and its target: shared by extracting and estimating."""

from collections.abc import Callable

from dflash_cache.config import ExtractConfig
from dflash_cache.corpus.chat import template_digest
from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.errors import ConfigError
from dflash_cache.extract.fused import can_fuse, fuse_target
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.mask_token import MaskTokenProposal
from dflash_cache.extract.plan import default_shard_tokens, default_window_tokens
from dflash_cache.extract.target import TargetFiles
from dflash_cache.format.manifest import CorpusSpec, ExtractSettings
from dflash_cache.spec import FeatureSpec, spread_fc_layers

__all__ = ["check_window", "corpus_spec", "feature_spec", "open_weights", "pad_id", "run_settings"]


def check_window(config: ExtractConfig, files: TargetFiles, corpus: TokenizedCorpus) -> None:
    """Refuse documents that are longer than what the target has positions for.

    Raises:
      ConfigError: Naming both lengths.
    """
    longest, window = int(corpus.lengths.max()), files.max_positions
    if window is not None and longest > window:
        raise ConfigError(
            f"the longest document has {longest} tokens, and {config.model} has positions for {window}; "
            f"use --max-length {window}"
        )


def feature_spec(config: ExtractConfig, files: TargetFiles) -> FeatureSpec:
    """Say which layers are stored.

    Raises:
      ConfigError: If a layer that was asked for does not exist.
    """
    layers = config.fc_layers if config.fc_layers is not None else spread_fc_layers(files.num_layers)
    return FeatureSpec.for_layers(layers, num_layers=files.num_layers, hidden_size=files.hidden_size)


def corpus_spec(
    config: ExtractConfig, files: TargetFiles, corpus: TokenizedCorpus, mask_token: MaskTokenProposal
) -> CorpusSpec:
    """Describe the corpus for the manifest."""
    summary = corpus.summary
    return CorpusSpec(
        digest=corpus.digest,
        num_documents=corpus.num_documents,
        num_tokens=corpus.num_tokens,
        supervised_tokens=summary.supervised_tokens,
        max_length=config.corpus.max_length,
        long=config.corpus.long,
        template_digest=template_digest(files.tokenizer) if summary.chats_kept else None,
        template_kwargs=config.corpus.template_kwargs,
        mask_token_uses=mask_token.uses,
        dropped={str(entry.reason): entry.count for entry in summary.dropped},
        truncated=summary.documents_truncated,
        split=summary.documents_split,
    )


def run_settings(config: ExtractConfig, files: TargetFiles, features: FeatureSpec) -> ExtractSettings:
    """Fill in the settings that the target decides."""
    per_token = features.bytes_per_token
    return ExtractSettings(
        codec=config.codec,
        batch_tokens=config.batch_tokens,
        shard_tokens=config.shard_tokens or default_shard_tokens(per_token),
        window_tokens=config.window_tokens or default_window_tokens(config.batch_tokens, per_token),
        attention=config.attention,
        device_type=files.device.type,
        fused=config.fused and can_fuse(files.device),
    )


def open_weights(config: ExtractConfig, files: TargetFiles, on_notice: Callable[[str], None]) -> LoadedTarget:
    """Load the target, with fused pieces where they are asked for and possible.

    Args:
      config: The settings.
      files: The target.
      on_notice: Told what is missing for fused pieces.
    """
    target = load_target(files, config.attention)
    if config.fused:
        fusion = fuse_target(target)
        if fusion.missing:
            on_notice(fusion.missing)
    return target


def pad_id(files: TargetFiles) -> int:
    """Choose an id of the embedding to stand on padding."""
    own = files.tokenizer.pad_token_id
    return own if own is not None and own < files.vocab_size else 0
