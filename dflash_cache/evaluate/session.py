"""The target in the middle of a generation: it reads tokens, remembers them in its cache, and can forget the last ones.

Shapes: Q tokens read at once, L fc layers, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_cache.errors import TargetError
from dflash_cache.extract.head import find_head
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.taps import LayerTaps
from dflash_cache.extract.target import TargetFiles
from dflash_cache.target_head import TargetHead

__all__ = ["DecodingTarget", "TargetReading", "TargetSession", "open_decoding_target"]

# Transformers is renaming the argument; which one a model takes depends on the version.
_CACHE_ARGUMENTS = ("cache", "past_key_values")


@dataclass(frozen=True)
class DecodingTarget:
    """A target that can be decoded with.

    Attributes:
      loaded: The model.
      head: Its embedding and lm_head, which a drafter borrows; shares the model's memory.
      eos_token_ids: Ids that end a generation.
    """

    loaded: LoadedTarget
    head: TargetHead
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TargetReading:
    """What the target says after reading some tokens.

    Attributes:
      logits: For the token after each token read, [Q, V]; [1, V] where only the last were asked for.
      fc_features: Outputs of the tapped layers at the tokens read, as a cache stores them; bfloat16 [Q, L, H].
    """

    logits: Tensor
    fc_features: Tensor


def open_decoding_target(files: TargetFiles, attention: str) -> DecodingTarget:
    """Load the target's weights.

    Args:
      files: From ``open_target``.
      attention: Attention implementation, ``sdpa`` or ``eager``.

    Raises:
      TargetError: If the weights do not load, or the model is not understood.
    """
    loaded = load_target(files, attention)
    return DecodingTarget(loaded, find_head(loaded).head, files.eos_token_ids)


class TargetSession(AbstractContextManager["TargetSession"]):
    """One generation of one sequence; a context manager, which keeps hooks on the target while it lasts."""

    def __init__(self, target: LoadedTarget, fc_layers: Sequence[int], *, forgets: bool) -> None:
        """Begin with nothing read.

        Args:
          target: The target.
          fc_layers: 0-based layers whose outputs are captured, in this order; may be empty.
          forgets: Whether :meth:`forget` will follow every :meth:`read`.

        Raises:
          TargetError: If the model takes no cache.
        """
        self._target = target
        self._taps = LayerTaps(target.layers, fc_layers, target.hidden_size)
        self._forgets = forgets
        model: Any = target.model
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
        if self._cache_argument is None:
            raise TargetError(
                f"{target.name}: {type(model).__name__} takes no cache ({' or '.join(_CACHE_ARGUMENTS)}); "
                "this architecture cannot be decoded step by step"
            )
        self._chooses_logits = "logits_to_keep" in parameters
        cache_class: Any = DynamicCache  # transformers leaves parts of it without types
        self._cache = cache_class(config=model.config)
        if forgets:
            # Sliding-window layers then keep what a crop may have to bring back.
            self._cache.activate_past_recording()
        self.num_tokens = 0

    def __enter__(self) -> "TargetSession":
        self._taps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._taps.__exit__(None, None, None)

    @torch.inference_mode()
    def read(self, token_ids_Q: Tensor, *, all_logits: bool) -> TargetReading:
        """Read tokens that follow those read before.

        Args:
          token_ids_Q: int64, on the target's device.
          all_logits: Whether logits are wanted for every token rather than for the last alone.

        Raises:
          TargetError: If the target's state cannot be rolled back and a rollback will be needed.
        """
        model: Any = self._target.model
        options: dict[str, Any] = {str(self._cache_argument): self._cache, "use_cache": True, "return_dict": True}
        if self._chooses_logits and not all_logits:
            options["logits_to_keep"] = 1
        self._taps.begin(len(token_ids_Q), token_ids_Q.device)
        output = model(input_ids=token_ids_Q[None], **options)
        if self._forgets and not self._cache.is_croppable:
            raise TargetError(
                f"{self._target.name} ({type(model).__name__}) has layers with a recurrent state, which cannot forget "
                "rejected drafts; speculative decoding with such a target is not supported yet"
            )
        self.num_tokens += len(token_ids_Q)
        logits: Tensor = output.logits[0]
        return TargetReading(logits if all_logits else logits[-1:], self._taps.finish())

    def forget(self, count: int) -> None:
        """Forget the last ``count`` tokens, possibly none; to be called after every read."""
        # With none, too: sliding-window layers drop here what has left their window. Before transformers 5.24 their
        # masks rely on it.
        self._cache.crop(-count)
        self.num_tokens -= count
