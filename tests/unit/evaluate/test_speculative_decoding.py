"""Speculative decoding gives the target's own greedy output, whatever is drafted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from proposers import KnownProposer, random_drafter

from dflash_cache.config import LossConfig
from dflash_cache.drafter.anchors import all_anchors
from dflash_cache.drafter.objective import Objective
from dflash_cache.errors import CheckpointError, ConfigError, TargetError
from dflash_cache.evaluate.decoding import greedy_decode, speculative_decode
from dflash_cache.evaluate.proposer import DrafterProposer
from dflash_cache.evaluate.session import DecodingTarget
from dflash_cache.extract.features import FeatureExtractor
from dflash_cache.spec import FeatureSpec
from dflash_cache.stream.batch import PackedBatch

Targets = Callable[[str], DecodingTarget]
CROPPABLE = ("dense", "llama", "gemma3", "gpt2")
PROMPTS = ([7], [5, 9, 200, 31, 8], list(range(40, 90)))  # the last is longer than Gemma's window of 32


def generate(target: DecodingTarget, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy decoding."""
    ends = list(target.eos_token_ids) or None
    output = target.loaded.model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("kind", [*CROPPABLE, "hybrid"])
def test_greedy_equals_transformers_generate(decoding_target: Targets, kind: str) -> None:
    target = decoding_target(kind)
    # transformers stops at its generation config's end token when given none.
    target.loaded.model.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        result = greedy_decode(target, prompt, 12)
        assert list(result.tokens) == generate(target, prompt, 12)
        assert result.target_passes == 12
        assert len(result.margins) == 12 and min(result.margins) >= 0


@pytest.mark.parametrize("kind", CROPPABLE)
def test_any_drafter_is_lossless(decoding_target: Targets, kind: str) -> None:
    target = decoding_target(kind)
    proposer = DrafterProposer(random_drafter(target), target)
    for prompt in PROMPTS:
        result = speculative_decode(target, proposer, prompt, 12)
        assert result.tokens == greedy_decode(target, prompt, 12).tokens
        assert result.target_passes == len(result.num_accepted) + 1


@pytest.mark.parametrize("kind", CROPPABLE)
@pytest.mark.parametrize("wrong_every", [3, 7])
def test_partly_right_drafts_are_lossless(decoding_target: Targets, kind: str, wrong_every: int) -> None:
    # Rejections after 0 to all drafts of a block: every amount that a cache is cropped by.
    target = decoding_target(kind)
    for prompt in PROMPTS[1:]:
        greedy = greedy_decode(target, prompt, 24)
        proposer = KnownProposer(prompt, list(greedy.tokens), 6, wrong_every)
        result = speculative_decode(target, proposer, prompt, 24)
        assert result.tokens == greedy.tokens
        assert 0 < sum(result.num_accepted) < 5 * len(result.num_accepted)


def test_perfect_drafts_are_all_accepted(decoding_target: Targets) -> None:
    target = decoding_target("dense")
    greedy = greedy_decode(target, PROMPTS[1], 26)
    result = speculative_decode(target, KnownProposer(PROMPTS[1], list(greedy.tokens), 6), PROMPTS[1], 25)
    # One token from the prompt's pass, then 4 rounds of 5 drafts and the bonus token.
    assert result.tokens == greedy.tokens[:25]
    assert result.num_accepted == (5, 5, 5, 5)
    assert result.target_passes == 5
    assert result.acceptance_length == 6.0


def test_wrong_drafts_cost_one_pass_a_token(decoding_target: Targets) -> None:
    target = decoding_target("dense")
    greedy = greedy_decode(target, PROMPTS[1], 9)
    never = [(token + 1) % 512 for token in greedy.tokens]
    result = speculative_decode(target, KnownProposer(PROMPTS[1], never, 6), PROMPTS[1], 9)
    assert result.tokens == greedy.tokens
    assert result.num_accepted == (0,) * 8
    assert result.acceptance_length == 1.0


def test_limit_is_never_exceeded(decoding_target: Targets) -> None:
    target = decoding_target("llama")
    greedy = greedy_decode(target, PROMPTS[1], 16)
    for limit in (1, 2, 6, 7, 8, 13):
        proposer = KnownProposer(PROMPTS[1], list(greedy.tokens), 6)
        assert speculative_decode(target, proposer, PROMPTS[1], limit).tokens == greedy.tokens[:limit]


def test_stops_at_an_end_token_inside_a_block(decoding_target: Targets) -> None:
    target = decoding_target("dense")
    free = greedy_decode(target, PROMPTS[1], 30).tokens
    for index in (1, 4, 5, 6, 7, 13):
        if free[index] in free[:index]:
            continue
        ending = replace(target, eos_token_ids=(free[index], 511))
        proposer = KnownProposer(PROMPTS[1], list(free), 6)
        result = speculative_decode(ending, proposer, PROMPTS[1], 30)
        assert result.tokens == free[: index + 1] == greedy_decode(ending, PROMPTS[1], 30).tokens
        assert list(result.tokens) == generate(ending, PROMPTS[1], 30)
        # An end token ends its round as its bonus token, so rounds account for every token but the first.
        assert sum(count + 1 for count in result.num_accepted) == index


def test_end_token_right_after_the_prompt(decoding_target: Targets) -> None:
    target = decoding_target("dense")
    first = greedy_decode(target, PROMPTS[1], 1).tokens[0]
    ending = replace(target, eos_token_ids=(first,))
    result = speculative_decode(ending, KnownProposer(PROMPTS[1], [], 6), PROMPTS[1], 30)
    assert result.tokens == (first,)
    assert result.num_accepted == () and result.acceptance_length is None and result.target_passes == 1


@pytest.mark.parametrize("kind", ["dense", "gemma3"])
def test_context_is_every_token_before_the_anchor(decoding_target: Targets, kind: str) -> None:
    # Trap 1, B31: the anchor's own state is unknown when its block is drafted.
    target = decoding_target(kind)
    prompt = PROMPTS[2]
    greedy = list(greedy_decode(target, prompt, 40).tokens)
    proposer = KnownProposer(prompt, greedy, 6, wrong_every=4)
    speculative_decode(target, proposer, prompt, 40)
    sequence = prompt + greedy
    assert [sequence[length] for length in proposer.context_lengths] == proposer.anchors
    read = torch.cat(proposer.features)
    features = FeatureSpec.for_layers(
        proposer.fc_layers, num_layers=len(target.loaded.layers), hidden_size=target.loaded.hidden_size
    )
    known = min(len(read), len(sequence))
    with FeatureExtractor(target.loaded, features, pad_id=0) as extractor:
        expected = extractor.run([torch.tensor(sequence[:known], dtype=torch.int32).numpy()])[:, :-1]
    torch.testing.assert_close(read[:known].float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_memorised_text_is_drafted_whole(decoding_target: Targets) -> None:
    # B31: labels, positions, context and decoding agree: what was learned by heart comes out in whole blocks.
    target = decoding_target("dense")
    prompt = PROMPTS[1]
    tokens = prompt + list(greedy_decode(target, prompt, 43).tokens)
    drafter = random_drafter(target, initializer_range=0.1)
    row = _row_of(target, tokens, drafter.config.target_layer_ids)
    _learn(drafter, row, target, steps=100)
    result = speculative_decode(target, DrafterProposer(drafter, target), prompt, 40)
    assert list(result.tokens) == tokens[len(prompt) : len(prompt) + 40]
    assert result.acceptance_length is not None and result.acceptance_length >= 0.95 * 6


def _row_of(target: DecodingTarget, tokens: list[int], fc_layers: tuple[int, ...]) -> PackedBatch:
    loaded = target.loaded
    features = FeatureSpec.for_layers(fc_layers, num_layers=len(loaded.layers), hidden_size=loaded.hidden_size)
    with FeatureExtractor(loaded, features, pad_id=0) as extractor:
        planes = extractor.run([torch.tensor(tokens, dtype=torch.int32).numpy()]).clone()
    index = torch.arange(len(tokens))
    return PackedBatch(
        input_ids=torch.tensor(tokens),
        positions=index,
        doc_ids=torch.zeros_like(index),
        loss_mask=index > 0,
        fc_features=planes[:, :-1],
        last_hidden_states=planes[:, -1],
        corpus_ids=(0,),
    )


def _learn(drafter: torch.nn.Module, row: PackedBatch, target: DecodingTarget, steps: int) -> None:
    objective = Objective(drafter.config, LossConfig(), target.head)  # type: ignore[arg-type]
    anchors = all_anchors(row.loss_mask, row.doc_ids, 6)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        result = objective(drafter, row, anchors)
        optimizer.zero_grad()
        (result.numerator / result.denominator).backward()
        optimizer.step()


def test_recurrent_targets_are_refused(decoding_target: Targets) -> None:
    target = decoding_target("hybrid")
    proposer = DrafterProposer(random_drafter(target), target)
    with pytest.raises(TargetError, match="recurrent state"):
        speculative_decode(target, proposer, PROMPTS[1], 8)


def test_hooks_are_gone_afterwards(decoding_target: Targets) -> None:
    target = decoding_target("hybrid")
    with pytest.raises(TargetError):
        speculative_decode(target, KnownProposer([3], [], 6), [3], 8)
    assert not any(layer._forward_hooks for layer in target.loaded.layers)


def test_drafter_of_another_target_is_refused(decoding_target: Targets) -> None:
    # B10: told before anything runs, not as a shape error inside.
    target = decoding_target("dense")
    with pytest.raises(CheckpointError, match=r"layers 32 against 6, hidden size 32 against 64"):
        DrafterProposer(random_drafter(target, num_target_layers=32, hidden_size=32), target)


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 5, "no tokens"),
        ([3], 0, "at least 1"),
        ([3, 512], 5, "token 512"),
        ([-1], 5, "token -1"),
        ([3] * 1000, 25, "1024 positions"),
    ],
)
def test_requests_that_do_not_fit(decoding_target: Targets, prompt: list[int], limit: int, message: str) -> None:
    target = decoding_target("dense")
    with pytest.raises(ConfigError, match=message):
        greedy_decode(target, prompt, limit)
    with pytest.raises(ConfigError, match=message):
        speculative_decode(target, KnownProposer(prompt, [], 6), prompt, limit)
