"""What decoding returns, compared and summed up. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Comparison", "DecodingFigures", "GreedyResult", "SpeculativeResult", "compare_with_greedy", "summarize"]


@dataclass(frozen=True)
class GreedyResult:
    """A plain generation, one token a target pass.

    Attributes:
      tokens: New tokens; the last may be an end token.
      margins: By how much each token's logit exceeds the second best.
      target_passes: Forward passes of the target, the prompt's included.
      seconds: Wall time, the prompt's pass included.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    target_passes: int
    seconds: float


@dataclass(frozen=True)
class SpeculativeResult:
    """A generation with drafts.

    Attributes:
      tokens: New tokens; the last may be an end token.
      num_accepted: Accepted drafts of each round, without the bonus token. An end token ends its round and counts as
        its bonus token. The last round counts in full where ``max_new_tokens`` cuts it.
      block_size: K; a round drafts K - 1 tokens.
      target_passes: Forward passes of the target, the prompt's included.
      seconds: Wall time, the prompt's pass included.
    """

    tokens: tuple[int, ...]
    num_accepted: tuple[int, ...]
    block_size: int
    target_passes: int
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tau: accepted drafts + 1 bonus token, averaged over rounds; None when there was no round."""
        return _acceptance_length(self.num_accepted)


@dataclass(frozen=True)
class Comparison:
    """How a speculative generation differs from the greedy one.

    Attributes:
      equal: Whether all tokens are the same.
      position: Index of the first new token that differs; None if equal.
      speculative_token, greedy_token: The two there; None where one generation had ended.
      margin: By how much the greedy token led there, in logits: close to 0 a rounding difference may decide; None if
        equal or if the greedy generation had ended.
    """

    equal: bool
    position: int | None = None
    speculative_token: int | None = None
    greedy_token: int | None = None
    margin: float | None = None


@dataclass(frozen=True)
class DecodingFigures:
    """Figures over several prompts; every round weighs the same.

    Attributes:
      num_prompts: Generations.
      num_rounds: Drafted blocks.
      num_tokens: New tokens.
      acceptance_length: Tau, with the bonus token; None when there was no round.
      accepted_share: Share of rounds that accept at least s drafts, for s = 1 to K-1.
      tokens_per_pass: New tokens for each target pass, prompts' passes included.
      speedup: Greedy seconds for each speculative second.
    """

    num_prompts: int
    num_rounds: int
    num_tokens: int
    acceptance_length: float | None
    accepted_share: tuple[float, ...]
    tokens_per_pass: float
    speedup: float


def compare_with_greedy(speculative: SpeculativeResult, greedy: GreedyResult) -> Comparison:
    """Find the first token that differs."""
    if speculative.tokens == greedy.tokens:
        return Comparison(equal=True)
    pairs = zip(speculative.tokens, greedy.tokens, strict=False)
    shorter = min(len(speculative.tokens), len(greedy.tokens))
    position = next((index for index, (drafted, own) in enumerate(pairs) if drafted != own), shorter)
    return Comparison(
        equal=False,
        position=position,
        speculative_token=_at(speculative.tokens, position),
        greedy_token=_at(greedy.tokens, position),
        margin=greedy.margins[position] if position < len(greedy.margins) else None,
    )


def summarize(speculative: Sequence[SpeculativeResult], greedy: Sequence[GreedyResult]) -> DecodingFigures:
    """Pool generations of the same prompts.

    Args:
      speculative: One for each prompt, all of one block size; at least one.
      greedy: Of the same prompts.
    """
    accepted = [count for result in speculative for count in result.num_accepted]
    num_tokens = sum(len(result.tokens) for result in speculative)
    slots = range(1, speculative[0].block_size)
    return DecodingFigures(
        num_prompts=len(speculative),
        num_rounds=len(accepted),
        num_tokens=num_tokens,
        acceptance_length=_acceptance_length(accepted),
        accepted_share=tuple(sum(count >= slot for count in accepted) / len(accepted) for slot in slots if accepted),
        tokens_per_pass=num_tokens / sum(result.target_passes for result in speculative),
        speedup=sum(result.seconds for result in greedy) / sum(result.seconds for result in speculative),
    )


def _acceptance_length(num_accepted: Sequence[int]) -> float | None:
    return sum(num_accepted) / len(num_accepted) + 1 if num_accepted else None


def _at(tokens: tuple[int, ...], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
