"""Choose the id that stands in a block's unknown slots: one that neither text nor the target's own output uses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MaskTokenProposal", "propose_mask_token"]

# What the published drafters of Qwen3.5 and Qwen3.6 use (dflash.md 1.2).
_PUBLISHED_FAMILY = "qwen3_5"
_PUBLISHED_ROWS = 248320
_PUBLISHED_ID = 248070
_RESERVED_WORDS = ("mask", "reserved", "unused", "extra", "placeholder")


@dataclass(frozen=True)
class MaskTokenProposal:
    """A mask token and why.

    Attributes:
      token_id: The id; None when no safe one was found.
      reason: In words.
      uses: How often the corpus contains it.
    """

    token_id: int | None
    reason: str
    uses: int


def propose_mask_token(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model_type: str,
    tokenizer_vocab_size: int,
    eos_token_ids: tuple[int, ...],
    counts: npt.NDArray[np.int64],
) -> MaskTokenProposal:
    """Propose a mask token; never one that ends, pads or begins a text.

    In order: the published drafters' id; the tokenizer's own mask token; an embedding row above the tokenizer's
    vocabulary; a special token without a role that neither the corpus nor the chat template contains, preferably one
    that calls itself reserved.

    Args:
      tokenizer: The target's.
      model_type: Of the target's text model.
      tokenizer_vocab_size: Ids that the tokenizer can produce.
      eos_token_ids: Ids that end a generation.
      counts: [V] int64; how often the corpus contains each id; V is the embedding's rows.
    """
    vocab_size = len(counts)

    def proposal(token_id: int, reason: str) -> MaskTokenProposal:
        return MaskTokenProposal(token_id, reason, int(counts[token_id]))

    if model_type.startswith(_PUBLISHED_FAMILY) and vocab_size == _PUBLISHED_ROWS:
        return proposal(_PUBLISHED_ID, f"the published drafters of the {_PUBLISHED_FAMILY} family use it")
    taken = {*eos_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    own = tokenizer.mask_token_id
    if own is not None and own not in taken and own < vocab_size:
        return proposal(own, f"the tokenizer's own mask token {tokenizer.mask_token!r}")
    if tokenizer_vocab_size < vocab_size:
        return proposal(tokenizer_vocab_size, "the first embedding row above the tokenizer's vocabulary")
    reserved = _unused_reserved_token(tokenizer, taken, counts)
    if reserved is not None:
        return proposal(
            reserved[0],
            f"the special token {reserved[1]!r}, which has no role and which corpus and template do not use",
        )
    return MaskTokenProposal(
        None,
        "none is safe: the tokenizer has no mask token and no unused reserved token, and the embedding has no spare "
        "row; name one with drafter.mask_token_id",
        0,
    )


def _unused_reserved_token(
    tokenizer: "PreTrainedTokenizerBase", taken: set[int | None], counts: npt.NDArray[np.int64]
) -> tuple[int, str] | None:
    template = str(tokenizer.chat_template or "")
    named = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    unused = [
        (token_id, token.content)
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token_id not in taken and token_id < len(counts) and counts[token_id] == 0
        if token.content not in template and token.content not in named
    ]
    said_reserved = [entry for entry in unused if any(word in entry[1].lower() for word in _RESERVED_WORDS)]
    return next(iter([*said_reserved, *unused]), None)
