"""The demo's last step: decode prompts with and without the trained drafter, and compare token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_cache.config import ExtractConfig
from dflash_cache.demo.corpus import DemoPrompt
from dflash_cache.evaluate.decoding import greedy_decode, speculative_decode
from dflash_cache.evaluate.proposer import DrafterProposer
from dflash_cache.evaluate.results import Comparison, GreedyResult, SpeculativeResult, compare_with_greedy
from dflash_cache.evaluate.session import open_decoding_target
from dflash_cache.export.zlab import read_zlab_checkpoint
from dflash_cache.extract.target import open_target

__all__ = ["DecodedPrompt", "decode_prompts"]


@dataclass(frozen=True)
class DecodedPrompt:
    """One prompt, decoded twice.

    Attributes:
      prompt: The prompt.
      text: What the target wrote.
      greedy, speculative: Both generations.
      comparison: How they differ, if they do.
    """

    prompt: DemoPrompt
    text: str
    greedy: GreedyResult
    speculative: SpeculativeResult
    comparison: Comparison


def decode_prompts(
    target_config: ExtractConfig, drafter_folder: Path, prompts: Sequence[DemoPrompt], max_new_tokens: int
) -> Iterator[DecodedPrompt]:
    """Load the target and the exported drafter, and decode prompt after prompt.

    Args:
      target_config: How stage one ran the target; decoding runs it the same way.
      drafter_folder: A drafter in z-lab's format.
      prompts: What to continue or answer.
      max_new_tokens: Most tokens of each generation.

    Raises:
      TargetError, CheckpointError: If either does not load, or they do not belong together.
    """
    files = open_target(target_config)
    target = open_decoding_target(files, target_config.attention)
    _, drafter = read_zlab_checkpoint(drafter_folder, dtype=files.compute_dtype)
    proposer = DrafterProposer(drafter.to(target.loaded.device), target)
    for prompt in prompts:
        prompt_ids = prompt.token_ids(files.tokenizer)
        greedy = greedy_decode(target, prompt_ids, max_new_tokens)
        speculative = speculative_decode(target, proposer, prompt_ids, max_new_tokens)
        text = str(files.tokenizer.decode(list(speculative.tokens), skip_special_tokens=True))
        comparison = compare_with_greedy(speculative, greedy)
        yield DecodedPrompt(prompt, text, greedy, speculative, comparison)
