"""Documents beyond the maximum length: cut, split into parts, or dropped; every token is accounted for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpus_tokenizer import build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_cache.config import CorpusConfig
from dflash_cache.corpus.fit import Dropped, Encoded, Kept, Split, fit_document
from dflash_cache.corpus.records import Message, RawDocument, Source
from dflash_cache.corpus.summary import DropReason
from dflash_cache.corpus.tokenize import tokenize_corpus, tokenize_document

RAW = RawDocument(7, Source(Path("corpus.jsonl"), 8), "text", None)


def encoded(mask: list[bool], *, is_chat: bool = False) -> Encoded:
    return Encoded(np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=np.bool_), is_chat)


def text_of(length: int) -> Encoded:
    return encoded([False] + [True] * (length - 1))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(2, 12))
def test_parts_are_consecutive_and_whole_and_nothing_is_lost(mask: list[bool], max_length: int) -> None:
    result = fit_document(RAW, encoded(mask), max_length, "split")
    if not any(mask) or len(mask) <= max_length:
        assert isinstance(result, Kept | Dropped)
        return
    usable = [
        (start, min(start + max_length, len(mask)))
        for start in range(0, len(mask), max_length)
        if min(start + max_length, len(mask)) - start >= 2 and any(mask[start + (start > 0) : start + max_length])
    ]
    if not usable:
        assert isinstance(result, Dropped) and result.reason == DropReason.NO_SUPERVISED_TOKEN
        return
    assert isinstance(result, Split)
    assert [(int(part.input_ids[0]), int(part.input_ids[-1]) + 1) for part in result.parts] == usable
    for part, (start, stop) in zip(result.parts, usable, strict=True):
        assert part.doc_id == 7
        assert part.input_ids.tolist() == list(range(start, stop))
        assert part.loss_mask.tolist() == [mask[i] and (i > start or start == 0) for i in range(start, stop)]
    kept = sum(len(part.input_ids) for part in result.parts)
    assert kept + result.tokens_left_out == len(mask)
    assert len(result.parts) + result.parts_left_out == -(-len(mask) // max_length)


@pytest.mark.parametrize(("length", "parts"), [(10, None), (11, [10]), (12, [10, 2]), (20, [10, 10]), (21, [10, 10])])
def test_lengths_at_the_edge(length: int, parts: list[int] | None) -> None:
    result = fit_document(RAW, text_of(length), 10, "split")
    if parts is None:
        assert isinstance(result, Kept) and result.tokens_cut == 0
    else:
        assert isinstance(result, Split)
        assert [len(part.input_ids) for part in result.parts] == parts


def test_a_part_without_a_supervised_token_is_left_out_and_counted() -> None:
    result = fit_document(RAW, encoded([False] * 10 + [True] * 10), 5, "split")
    assert isinstance(result, Split)
    assert (len(result.parts), result.parts_left_out, result.tokens_left_out) == (2, 2, 10)
    assert result.parts[0].loss_mask.tolist() == [False, True, True, True, True]


def test_drop_leaves_only_longer_documents_out() -> None:
    assert isinstance(fit_document(RAW, text_of(10), 10, "drop"), Kept)
    result = fit_document(RAW, text_of(11), 10, "drop")
    assert isinstance(result, Dropped)
    assert (result.reason, result.detail) == (DropReason.TOO_LONG, "11 tokens, at most 10 are allowed")


def test_a_long_chat_keeps_the_answers_of_its_later_parts() -> None:
    tokenizer = build_tokenizer()
    turns = (Message("user", "hello there " * 20), Message("assistant", "Paris is the capital " * 4))
    chat = RawDocument(0, RAW.source, None, turns)
    whole = tokenize_document(chat, tokenizer, 4096, {})
    assert isinstance(whole, Kept)
    first = int(whole.document.loss_mask.argmax())
    assert isinstance(tokenize_document(chat, tokenizer, first - 5, {}), Dropped)
    parts = tokenize_document(chat, tokenizer, first - 5, {}, "split")
    assert isinstance(parts, Split)
    supervised = [part.input_ids[part.loss_mask] for part in parts.parts]
    lost = int(whole.document.loss_mask.sum()) - sum(map(len, supervised))
    assert parts.parts_left_out == 1 and 0 <= lost <= len(parts.parts)


def test_a_split_corpus_counts_its_parts_and_gives_them_their_documents_id(
    write_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    path = write_corpus([{"text": "fox"}, {"text": "the quick brown fox jumps " * 9}, {"text": "hello there"}])
    stores = {
        long: tokenize_corpus(CorpusConfig(files=(path,), max_length=8, long=long), tokenizer, tmp_path / long)
        for long in ("truncate", "split", "drop")
    }
    split = stores["split"]
    assert len({store.digest for store in stores.values()}) == 3
    assert split.summary.documents_kept == 3 and split.summary.documents_split == 1
    assert split.summary.documents_truncated == 0
    assert split.num_documents == split.summary.parts > 4
    assert split.doc_ids.tolist() == [0, *[1] * (split.num_documents - 2), 2]
    assert split.lengths.max() == 8
    split.verify()
    assert stores["truncate"].summary.documents_truncated == 1
    assert stores["drop"].summary.dropped[0].reason == DropReason.TOO_LONG
    assert stores["drop"].doc_ids.tolist() == [0, 2]


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValidationError, match="long"):
        CorpusConfig.model_validate({"files": ("x",), "long": "pack"})
