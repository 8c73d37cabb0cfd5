"""How often the cached last layer predicts the corpus' next token: near chance means that something is shifted."""

from dataclasses import dataclass

import numpy as np
import torch

from dflash_cache.format.cache import DocumentSlice
from dflash_cache.target_head import TargetHead

__all__ = ["Agreement", "count_agreement"]

_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Agreement:
    """Supervised tokens that the target itself would have chosen, greedily, from the tokens before them.

    Attributes:
      matches: Tokens equal to the argmax of the target's logits one position earlier.
      tokens: Supervised tokens that were compared.
    """

    matches: int = 0
    tokens: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.matches + other.matches, self.tokens + other.tokens)

    @property
    def share(self) -> float | None:
        """Matches as a share of tokens; None when none was compared."""
        return self.matches / self.tokens if self.tokens else None


@torch.inference_mode()
def count_agreement(head: TargetHead, tokens: DocumentSlice, *, limit: int) -> Agreement:
    """Compare up to ``limit`` supervised tokens of a document with the target's own choice.

    Args:
      head: The target's final norm and lm_head.
      tokens: A document from its first token on.
      limit: Most tokens to compare, spread evenly; each costs one row of lm_head.
    """
    supervised = np.flatnonzero(tokens.loss_mask)
    supervised = supervised[supervised > 0]
    if len(supervised) > limit:
        supervised = supervised[np.linspace(0, len(supervised) - 1, limit).astype(np.int64)]
    matches = 0
    for start in range(0, len(supervised), _POSITIONS_AT_ONCE):
        chosen = supervised[start : start + _POSITIONS_AT_ONCE]
        bits = torch.from_numpy(np.ascontiguousarray(tokens.last_hidden_states[chosen - 1]))
        predicted = head.logits(bits.view(torch.bfloat16)).argmax(-1)
        expected = torch.from_numpy(tokens.input_ids[chosen].astype(np.int64))
        matches += int((predicted.cpu() == expected).sum())
    return Agreement(matches, len(supervised))
