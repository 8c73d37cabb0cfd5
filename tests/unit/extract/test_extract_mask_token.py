"""The proposed mask token is never one that text or the target's output uses (B48)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.targets import build_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_cache.extract.mask_token import propose_mask_token


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    return build_tokenizer(tmp_path)


def _propose(tokenizer: PreTrainedTokenizerFast, rows: int, *, used: tuple[int, ...] = (), **changes: Any) -> Any:
    counts = np.zeros(rows, dtype=np.int64)
    counts[list(used)] = 3
    options = {"model_type": "qwen3", "tokenizer_vocab_size": len(tokenizer), "eos_token_ids": (2,), **changes}
    return propose_mask_token(tokenizer, counts=counts, **options)


def test_the_published_id_of_the_family(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _propose(tokenizer, 248320, model_type="qwen3_5_text").token_id == 248070
    assert _propose(tokenizer, 248320, model_type="qwen3_5_text", used=(248070,)).uses == 3
    assert _propose(tokenizer, 512, model_type="qwen3_5_text").token_id == len(tokenizer)


def test_the_tokenizers_own_mask_token_unless_it_has_another_role(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.mask_token = "<|reserved_0|>"
    assert _propose(tokenizer, 512).token_id == 3
    tokenizer.mask_token = tokenizer.pad_token
    assert _propose(tokenizer, 512).token_id == len(tokenizer)


def test_a_row_above_the_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    proposal = _propose(tokenizer, 512)
    assert proposal.token_id == len(tokenizer) and "above" in proposal.reason


def test_a_reserved_token_that_nothing_uses(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _propose(tokenizer, len(tokenizer)).token_id == 3


def test_none_rather_than_pad_or_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    # ids 0 pad, 1 and 2 in the template, 3 reserved: once the corpus uses 3, nothing safe is left
    proposal = _propose(tokenizer, len(tokenizer), used=(3,))
    assert proposal.token_id is None
    assert "drafter.mask_token_id" in proposal.reason
