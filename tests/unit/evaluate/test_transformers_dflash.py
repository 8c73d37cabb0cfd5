"""An independent implementation decodes the same way: transformers' own DFlash generation, where it is installed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from proposers import random_drafter
from torch import Tensor

from dflash_cache.drafter.model import Drafter
from dflash_cache.evaluate.decoding import speculative_decode
from dflash_cache.evaluate.proposer import DrafterProposer
from dflash_cache.evaluate.session import DecodingTarget

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "MuseGlimmerAssistantModel"):
    pytest.skip("this transformers has no DFlash drafter", allow_module_level=True)


class RecordingProposer(DrafterProposer):
    """Remembers every block that it drafted."""

    def __init__(self, drafter: Drafter, target: DecodingTarget) -> None:
        self.drafts: list[list[int]] = []
        super().__init__(drafter, target)

    def propose(self, anchor_id: int) -> Tensor:
        draft = super().propose(anchor_id)
        self.drafts.append(draft.tolist())
        return draft


def as_transformers(drafter: Drafter) -> Any:
    """The same weights in transformers' class, whose sliding layers differ: full layers only."""
    config = drafter.config
    model = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            layer_types=list(config.layer_types),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=list(config.target_layer_ids),
            attn_implementation="eager",
        )
    )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(name, name): weight for name, weight in drafter.state_dict().items()})
    return model.eval()


@pytest.mark.parametrize("kind", ["dense", "llama"])
def test_drafts_and_output_equal_transformers(decoding_target: Callable[[str], DecodingTarget], kind: str) -> None:
    target = decoding_target(kind)
    model: Any = target.loaded.model
    model.generation_config.eos_token_id = None
    drafter = random_drafter(target, layer_types=("full_attention",) * 2, sliding_window=None)
    proposer = RecordingProposer(drafter, target)
    prompt = [5, 9, 200, 31, 8]
    ours = speculative_decode(target, proposer, prompt, 24)

    assistant = as_transformers(drafter)
    hidden: list[Tensor] = []
    assistant.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state[0, 1:]))
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        assistant_model=assistant,
        speculation_type="dflash",
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )
    theirs = [model.lm_head(states).argmax(-1).tolist() for states in hidden]
    assert generated[0, len(prompt) :].tolist() == list(ours.tokens)
    # It does not draft for a last token alone.
    assert len(theirs) >= len(proposer.drafts) - 1 > 5
    assert theirs[: len(proposer.drafts)] == proposer.drafts[: len(theirs)]
