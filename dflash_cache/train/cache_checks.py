"""Whether a cache is one that a drafter can be trained from. Nothing is guessed: what does not fit is refused."""

from pathlib import Path

import torch

from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.head import target_ids
from dflash_cache.errors import CacheDamagedError, CacheFormatError, ConfigError, NonFiniteError
from dflash_cache.format.manifest import CacheManifest
from dflash_cache.stream.batch import PackedBatch
from dflash_cache.target_head import TargetHead

__all__ = ["check_features", "check_head", "implausible_head"]

# A language model names the next token of its own kind of text a third of the time or more; a head fed with the wrong
# layer, or with states that were normed twice, hardly ever.
_LEAST_AGREEMENT = 0.05
_SAMPLE_POSITIONS = 512


def check_features(folder: Path, manifest: CacheManifest, *, allow_incomplete: bool) -> None:
    """Refuse a cache that is unfinished, or whose tensors are not those that training is defined on.

    Raises:
      CacheFormatError: Naming the field, what it says and what it must say.
    """
    identity = manifest.identity
    total = identity.corpus.num_documents
    if not manifest.complete and not allow_incomplete:
        raise CacheFormatError(
            f"{folder} is not complete: {manifest.num_documents} of {total} documents are extracted. Run the extract "
            "command that began it again to finish it, or train on what is there with --allow-incomplete."
        )
    features, target = identity.features, identity.target
    layers = {f"fc_layers[{number}]": layer for number, layer in enumerate(features.fc_layers)}
    for name, layer in {**layers, "last_layer": features.last_layer}.items():
        if layer.final_norm_applied:
            raise CacheFormatError(
                f"{folder}: features.{name} (layer {layer.index}) was stored after the target's final norm; training "
                "applies that norm itself and needs the layer's own output. Extract the cache again."
            )
        if layer.index >= target.num_layers:
            raise CacheFormatError(
                f"{folder}: features.{name} is layer {layer.index}, but {target.name} has layers 0 to "
                f"{target.num_layers - 1}. Extract the cache again."
            )
    if not layers:
        raise CacheFormatError(f"{folder}: features.fc_layers is empty; a drafter needs at least one. Extract again.")
    if features.last_layer.index != target.num_layers - 1:
        raise CacheFormatError(
            f"{folder}: features.last_layer is layer {features.last_layer.index}, expected the last one, "
            f"{target.num_layers - 1}: its output alone goes through final norm and lm_head. Extract the cache again."
        )
    if features.hidden_size != target.hidden_size:
        raise CacheFormatError(
            f"{folder}: features.hidden_size is {features.hidden_size}, the target's is {target.hidden_size}. "
            "Extract the cache again."
        )


def check_head(path: Path, head: TargetHead, manifest: CacheManifest, drafter: DrafterConfig) -> None:
    """Refuse a target head of another target, or one that is not finite.

    Raises:
      CacheDamagedError: Naming the tensor or field.
      ConfigError: If the drafter cannot be trained against it.
      NonFiniteError: If a weight is NaN or infinite.
    """
    target = manifest.identity.target
    matrix = [target.vocab_size, target.hidden_size]
    expected = {
        "embedding": matrix,
        "lm_head_weight": matrix,
        "norm_weight": [target.hidden_size],
        "norm_bias": [target.hidden_size],
        "lm_head_bias": [target.vocab_size],
    }
    for name, shape in expected.items():
        tensor = getattr(head, name)
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            raise CacheDamagedError(
                f"{path}: {name} is {list(tensor.shape)}, the manifest's target implies {shape}. Extract again."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{path}: {name} holds NaN or infinity. Check the target's weights; extract again.")
    if head.spec.final_norm != target.final_norm:
        raise CacheDamagedError(
            f"{path}: its final norm is {head.spec.final_norm}, the manifest says {target.final_norm}. Extract again."
        )
    if drafter.hidden_size != target.hidden_size or drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter has hidden size {drafter.hidden_size} and vocabulary {drafter.vocab_size}, the cache's "
            f"target {target.hidden_size} and {target.vocab_size}; they must be equal"
        )


def implausible_head(row: PackedBatch, head: TargetHead) -> str | None:
    """Compare what stored last states predict with the tokens that really follow.

    A sign of trouble, not a proof: text that the target finds hard, or a random target, gives the same picture.

    Args:
      row: Documents, on the head's device.
      head: The target's.

    Returns:
      A warning in words, or None.
    """
    follows = (row.doc_ids[1:] == row.doc_ids[:-1]) & row.loss_mask[1:]
    index = follows.nonzero()[:, 0][:_SAMPLE_POSITIONS]
    if not len(index):
        return None
    predicted = target_ids(row.last_hidden_states[index], head)
    actual = row.input_ids[index + 1]
    agreement = float((predicted == actual).float().mean())
    most_common = int(torch.bincount(actual).max()) / len(index)
    if agreement >= _LEAST_AGREEMENT and (agreement > most_common or most_common > 0.5):
        return None
    return (
        f"the target's head, applied to the stored last hidden states of {row.describe()}, names the next token at "
        f"{agreement:.1%} of {len(index)} positions. A trained language model reaches 30 % and more on its own kind of "
        "text: check that the cache's last layer, final norm and lm_head belong together (see `dflash-cache inspect`)."
    )
