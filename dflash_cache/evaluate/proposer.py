"""Where drafts come from.

Shapes: Q new tokens, T context tokens, L fc layers, H hidden size, K slots of a block.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import CheckpointError
from dflash_cache.evaluate.session import DecodingTarget

__all__ = ["BlockProposer", "DrafterProposer"]


class BlockProposer(Protocol):
    """Fills the block after an anchor from the target's states before it. Any answer is safe; good ones save time."""

    @property
    def block_size(self) -> int:
        """K, slots including the anchor's."""
        ...

    @property
    def fc_layers(self) -> tuple[int, ...]:
        """0-based target layers whose outputs it wants, in this order."""
        ...

    def begin(self) -> None:
        """Forget everything: a new sequence follows."""
        ...

    def extend(self, fc_features_QLH: Tensor) -> None:
        """Take the states of the tokens that follow those known, all of them before the next anchor."""
        ...

    def propose(self, anchor_id: int) -> Tensor:
        """Draft the K - 1 tokens after an anchor that follows the known tokens; int64 [K - 1]."""
        ...


class DrafterProposer:
    """A trained drafter with the target's embedding and lm_head."""

    def __init__(self, drafter: Drafter, target: DecodingTarget) -> None:
        """Pair them.

        Args:
          drafter: On the target's device.
          target: The target it was trained for.

        Raises:
          CheckpointError: If the drafter belongs to another target; lists every difference.
        """
        config, loaded = drafter.config, target.loaded
        pairs = (
            ("layers", config.num_target_layers, len(loaded.layers)),
            ("hidden size", config.hidden_size, loaded.hidden_size),
            ("vocabulary", config.vocab_size, loaded.vocab_size),
        )
        wrong = [f"{what} {wanted} against {found}" for what, wanted, found in pairs if wanted != found]
        if wrong:
            raise CheckpointError(
                f"this drafter was not made for {loaded.name}: {', '.join(wrong)} (drafter against target). Name the "
                "target that is in the drafter's model card"
            )
        self._drafter = drafter.eval()
        self._head = target.head
        self._device = loaded.device
        self.begin()

    @property
    def block_size(self) -> int:
        """K, slots including the anchor's."""
        return self._drafter.config.block_size

    @property
    def fc_layers(self) -> tuple[int, ...]:
        """0-based target layers, in the order of ``fc``."""
        return self._drafter.config.target_layer_ids

    def begin(self) -> None:
        """Forget the context."""
        weight = self._drafter.fc.weight
        self._context_TH = torch.empty(0, self._drafter.config.hidden_size, dtype=weight.dtype, device=self._device)

    @torch.inference_mode()
    def extend(self, fc_features_QLH: Tensor) -> None:
        """Merge the new tokens' states into the context; each token is merged once."""
        self._context_TH = torch.cat([self._context_TH, self._drafter.encode_context(fc_features_QLH)])

    @torch.inference_mode()
    def propose(self, anchor_id: int) -> Tensor:
        """Draft a block and take the likeliest token of each slot."""
        config = self._drafter.config
        block_ids_K = torch.full((config.block_size,), config.mask_token_id, device=self._device)
        block_ids_K[0] = anchor_id
        drafted_KH = self._drafter.draft_block(self._context_TH, self._head.embed(block_ids_K))
        weight = self._head.lm_head_weight
        return F.linear(drafted_KH[1:].to(weight.dtype), weight, self._head.lm_head_bias).argmax(-1)
