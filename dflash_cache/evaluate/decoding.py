"""Greedy decoding, plain and with drafts. The two give the same tokens, whatever the drafts are.

Shapes: Q tokens read at once, K slots of a block, V vocabulary.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_cache.errors import ConfigError
from dflash_cache.evaluate.proposer import BlockProposer
from dflash_cache.evaluate.results import GreedyResult, SpeculativeResult
from dflash_cache.evaluate.session import DecodingTarget, TargetSession

__all__ = ["greedy_decode", "speculative_decode"]


def greedy_decode(target: DecodingTarget, prompt_ids: Sequence[int], max_new_tokens: int) -> GreedyResult:
    """Generate the likeliest token, one at a time, until an end token or the limit.

    Args:
      target: The target.
      prompt_ids: At least one token.
      max_new_tokens: At most so many are generated; at least 1.

    Raises:
      ConfigError: If the prompt or the limit does not fit the target.
    """
    _check_request(target, prompt_ids, max_new_tokens, beyond=0)
    tokens: list[int] = []
    margins: list[float] = []
    start = _now(target)
    with TargetSession(target.loaded, (), forgets=False) as session:
        read_ids = list(prompt_ids)
        while len(tokens) < max_new_tokens and not _ended(tokens, target):
            logits_V = session.read(_as_tensor(read_ids, target), all_logits=False).logits[-1]
            best = logits_V.float().topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            read_ids = [int(logits_V.argmax())]
            tokens += read_ids
    return GreedyResult(tuple(tokens), tuple(margins), target_passes=len(tokens), seconds=_now(target) - start)


def speculative_decode(
    target: DecodingTarget, proposer: BlockProposer, prompt_ids: Sequence[int], max_new_tokens: int
) -> SpeculativeResult:
    """Generate the same tokens with fewer target passes.

    A round: the last token that is certain is the anchor, which the target has not read yet; the proposer drafts the
    block after it from the target's states at all tokens before it; the target reads anchor and drafts in one pass;
    the leading drafts that equal the target's own choice are accepted, and its choice after them comes on top (the
    bonus token), the next anchor. What was rejected is forgotten.

    Args:
      target: The target; its attention cache must be able to forget tokens.
      proposer: Where drafts come from.
      prompt_ids: At least one token.
      max_new_tokens: At most so many are generated; at least 1.

    Raises:
      ConfigError: If the prompt or the limit does not fit the target.
      TargetError: If the target cannot forget rejected drafts.
    """
    _check_request(target, prompt_ids, max_new_tokens, beyond=proposer.block_size)
    start = _now(target)
    num_accepted: list[int] = []
    with TargetSession(target.loaded, proposer.fc_layers, forgets=True) as session:
        reading = session.read(_as_tensor(prompt_ids, target), all_logits=False)
        session.forget(0)
        proposer.begin()
        proposer.extend(reading.fc_features)
        tokens = [int(reading.logits[-1].argmax())]
        while len(tokens) < max_new_tokens and not _ended(tokens, target):
            accepted_and_bonus = _run_round(session, proposer, tokens[-1], target)
            num_accepted.append(len(accepted_and_bonus) - 1)
            tokens += accepted_and_bonus
    return SpeculativeResult(
        tokens=tuple(tokens[:max_new_tokens]),
        num_accepted=tuple(num_accepted),
        block_size=proposer.block_size,
        target_passes=1 + len(num_accepted),
        seconds=_now(target) - start,
    )


def _run_round(session: TargetSession, proposer: BlockProposer, anchor_id: int, target: DecodingTarget) -> list[int]:
    """Draft, verify and keep: return the new tokens, at least one, cut behind an end token."""
    drafts = proposer.propose(anchor_id)
    block_ids_K = torch.cat([_as_tensor([anchor_id], target), drafts.to(target.loaded.device)])
    reading = session.read(block_ids_K, all_logits=True)
    chosen_K = reading.logits.argmax(-1)
    agrees = block_ids_K[1:] == chosen_K[:-1]
    num_agreeing = int(agrees.to(torch.int64).cumprod(0).sum())
    session.forget(len(agrees) - num_agreeing)
    # The states at the anchor and the accepted drafts; the bonus token, as the next anchor, has none yet.
    proposer.extend(reading.fc_features[: num_agreeing + 1])
    new_ids: list[int] = chosen_K[: num_agreeing + 1].tolist()
    end = next((index for index, token in enumerate(new_ids) if token in target.eos_token_ids), num_agreeing)
    return new_ids[: end + 1]


def _ended(tokens: Sequence[int], target: DecodingTarget) -> bool:
    return bool(tokens) and tokens[-1] in target.eos_token_ids


def _as_tensor(token_ids: Sequence[int], target: DecodingTarget) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=target.loaded.device)


def _now(target: DecodingTarget) -> float:
    if target.loaded.device.type == "cuda":
        torch.cuda.synchronize(target.loaded.device)
    return time.perf_counter()


def _check_request(target: DecodingTarget, prompt_ids: Sequence[int], max_new_tokens: int, *, beyond: int) -> None:
    """Refuse what the target could not decode.

    Args:
      beyond: Tokens that may be read past the last one generated.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens; at least one is needed")
    highest = target.loaded.vocab_size - 1
    wrong = next((token for token in prompt_ids if not 0 <= token <= highest), None)
    if wrong is not None:
        raise ConfigError(f"the prompt holds token {wrong}; {target.loaded.name} has tokens 0 to {highest}")
    window = _max_positions(target)
    needed = len(prompt_ids) + max_new_tokens + beyond
    if window is not None and needed > window:
        raise ConfigError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones"
            + (f" (and a block of {beyond})" if beyond else "")
            + f" exceed the {window} positions of {target.loaded.name}; shorten the prompt or generate less"
        )


def _max_positions(target: DecodingTarget) -> int | None:
    config = getattr(target.loaded.model, "config", None)
    value = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) if config else None
    return value if isinstance(value, int) else None
