"""Token ids back to text, cut where supervision begins and ends."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dflash_cache.errors import CacheDamagedError

__all__ = ["TextSpan", "decode_spans"]


@dataclass(frozen=True)
class TextSpan:
    """A run of tokens that are all supervised, or all not.

    Attributes:
      text: Decoded, special tokens included.
      supervised: Whether the drafter is trained to predict it.
      tokens: How many.
    """

    text: str
    supervised: bool
    tokens: int


def decode_spans(
    tokenizer_file: Path, input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.bool_]
) -> tuple[TextSpan, ...]:
    """Decode a document span by span.

    Args:
      tokenizer_file: The cache's ``tokenizer.json``.
      input_ids: [n].
      loss_mask: [n].

    Returns:
      Alternating spans whose token counts add up to n. A character whose bytes lie on both sides of a cut shows as
      the replacement character.

    Raises:
      CacheDamagedError: If the tokenizer cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception for every kind of bad file
        raise CacheDamagedError(f"{tokenizer_file}: damaged: it is not a tokenizer ({error})") from error
    cuts = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1).tolist(), len(input_ids)]
    return tuple(
        TextSpan(
            text=tokenizer.decode(input_ids[start:stop].tolist(), skip_special_tokens=False),
            supervised=bool(loss_mask[start]),
            tokens=stop - start,
        )
        for start, stop in itertools.pairwise(cuts)
    )
