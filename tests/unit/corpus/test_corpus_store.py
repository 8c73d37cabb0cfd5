"""The whole way from files to a store on disk: counts, digest, reading back, damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus_tokenizer as templates
import numpy as np
import pytest
from corpus_tokenizer import build_tokenizer

from dflash_cache.config import CorpusConfig
from dflash_cache.corpus import tokenize as tokenize_module
from dflash_cache.corpus.batches import length_batches
from dflash_cache.corpus.reader import read_documents
from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.corpus.summary import DropReason
from dflash_cache.corpus.tokenize import CorpusProgress, Kept, tokenize_corpus, tokenize_document
from dflash_cache.errors import CacheDamagedError, CacheFormatError, CorpusError, DiskSpaceError, TargetError

WriteCorpus = Callable[..., Path]
MakeConfig = Callable[..., CorpusConfig]


def chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


MIXED = [
    {"text": "the quick brown fox " * 8},
    {"text": ""},
    chat("hi", "hello 🎉"),
    chat("nobody answers"),
    {"text": "jumps"},
    chat("question " * 40, "cut off"),
    chat("q", ""),
    {"text": ""},
]


@pytest.fixture
def mixed(write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path) -> TokenizedCorpus:
    config = make_config(write_corpus(MIXED), max_length=40)
    return tokenize_corpus(config, build_tokenizer(), tmp_path / "store")


def test_documents_come_back_as_they_were_tokenised(mixed: TokenizedCorpus, tmp_path: Path) -> None:
    raws = list(read_documents([tmp_path / "corpus.jsonl"]))
    results = [tokenize_document(raw, build_tokenizer(), 40, {}) for raw in raws]
    kept = [result.document for result in results if isinstance(result, Kept)]
    assert mixed.num_documents == len(kept) == 4
    assert mixed.doc_ids.tolist() == [0, 2, 4, 6]
    assert mixed.lengths.tolist() == [len(document.input_ids) for document in kept]
    for expected, got in zip(kept, mixed.documents(), strict=True):
        assert got.doc_id == expected.doc_id
        assert got.input_ids.dtype == np.int32
        assert got.loss_mask.dtype == np.bool_
        assert np.array_equal(got.input_ids, expected.input_ids)
        assert np.array_equal(got.loss_mask, expected.loss_mask)


def test_the_summary_counts_every_document_once_with_its_reason(mixed: TokenizedCorpus, tmp_path: Path) -> None:
    summary = mixed.summary
    assert (summary.documents_read, summary.documents_kept, summary.documents_dropped) == (8, 4, 4)
    assert summary.documents_truncated == 1
    assert {entry.reason: entry.count for entry in summary.dropped} == {
        DropReason.TOO_SHORT: 2,
        DropReason.NO_SUPERVISED_TOKEN: 1,
        DropReason.SUPERVISED_PART_CUT_OFF: 1,
    }
    assert summary.dropped[0].reason is DropReason.TOO_SHORT
    assert [example.line for example in summary.dropped[0].examples] == [2, 8]
    assert summary.dropped[0].examples[0].path == str(tmp_path / "corpus.jsonl")
    masks = [document.loss_mask for document in mixed.documents()]
    assert summary.tokens == mixed.num_tokens == sum(len(mask) for mask in masks)
    assert summary.supervised_tokens == sum(int(mask.sum()) for mask in masks)
    assert summary.mean_mask_share == pytest.approx(np.mean([mask.mean() for mask in masks]))


def test_only_the_first_few_places_of_a_reason_are_kept(
    write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(write_corpus([{"text": ""}] * 50 + [{"text": "kept text"}]))
    (entry,) = tokenize_corpus(config, build_tokenizer(), tmp_path / "store").summary.dropped
    assert entry.count == 50
    assert [example.line for example in entry.examples] == [1, 2, 3]


def test_a_store_is_opened_without_the_corpus(mixed: TokenizedCorpus, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").unlink()
    again = TokenizedCorpus.open(tmp_path / "store")
    assert again.digest == mixed.digest
    assert again.summary == mixed.summary
    assert np.array_equal(again.document(1).input_ids, mixed.document(1).input_ids)
    again.verify()


def test_the_digest_does_not_depend_on_batching_or_compression_but_on_order_and_gaps(
    write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(records: list[Any], **options: bool) -> str:
        config = make_config(write_corpus(records, **options), max_length=40)
        return tokenize_corpus(config, build_tokenizer(), tmp_path / "digest").digest

    reference = digest(MIXED)
    assert digest(MIXED) == reference
    assert digest(MIXED, compress=True) == reference
    assert digest(MIXED[::-1]) != reference
    assert digest([MIXED[0], *MIXED[2:]]) != reference
    assert digest([{"text": "the quick brown fox"}, *MIXED[1:]]) != reference
    monkeypatch.setattr(tokenize_module, "_BATCH_DOCUMENTS", 1)
    assert digest(MIXED) == reference
    monkeypatch.setattr(tokenize_module, "_BATCH_DOCUMENTS", 10_000)
    monkeypatch.setattr(tokenize_module, "_BATCH_CHARACTERS", 30)
    assert digest(MIXED) == reference


def test_the_digest_sees_the_mask(write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(write_corpus([chat("one", "two", "three", "four")]))
    untagged = tokenize_corpus(config, build_tokenizer(), tmp_path / "a")
    last_only = templates.CHATML_TAGGED.replace(
        "message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last"
    )
    tagged = tokenize_corpus(config, build_tokenizer(last_only), tmp_path / "b")
    assert np.array_equal(untagged.document(0).input_ids, tagged.document(0).input_ids)
    assert untagged.digest != tagged.digest


def test_several_files_make_one_corpus(write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path) -> None:
    first = write_corpus([{"text": "first text"}, {"text": ""}], "a.jsonl")
    second = write_corpus([{"text": "second text"}], "b.jsonl", compress=True)
    corpus = tokenize_corpus(make_config(first, second), build_tokenizer(), tmp_path / "store")
    assert corpus.doc_ids.tolist() == [0, 2]
    assert build_tokenizer().decode(corpus.document(1).input_ids, skip_special_tokens=True) == "second text"


def test_progress_reaches_the_end(
    write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_module, "_BATCH_DOCUMENTS", 3)
    path = write_corpus(MIXED)
    seen: list[CorpusProgress] = []
    corpus = tokenize_corpus(make_config(path, max_length=40), build_tokenizer(), tmp_path / "store", seen.append)
    assert [progress.documents for progress in seen] == [3, 6, 8]
    assert seen[-1] == CorpusProgress(8, corpus.num_tokens, path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize("records", [[], [b"", b"  "]])
def test_an_empty_corpus_is_refused(
    records: list[Any], write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match=r"corpus\.jsonl: no documents"):
        tokenize_corpus(make_config(write_corpus(records)), build_tokenizer(), tmp_path / "store")


def test_a_corpus_of_which_nothing_is_left_is_refused_with_all_reasons(
    write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(templates.STRIPS_REASONING)
    unstable = chat("q", "<think>x</think>a", "r", "b")
    config = make_config(write_corpus([unstable, unstable, {"text": ""}, chat("long " * 99, "a")]), max_length=40)
    with pytest.raises(CorpusError) as caught:
        tokenize_corpus(config, tokenizer, tmp_path / "store")
    message = str(caught.value)
    assert "none of the 4 documents" in message
    for part in ("2 unstable_template", "1 too_short", "1 supervised_part_cut_off", "corpus.jsonl:1", "corpus.jsonl:4"):
        assert part in message
    with pytest.raises(CacheFormatError, match="no finished tokenised corpus"):
        TokenizedCorpus.open(tmp_path / "store")


def test_a_bad_line_leaves_no_finished_store_even_where_one_was(
    write_corpus: WriteCorpus, make_config: MakeConfig, mixed: TokenizedCorpus, tmp_path: Path
) -> None:
    config = make_config(write_corpus([{"text": "good text"}, b"{"]))
    with pytest.raises(CorpusError, match=":2: not valid JSON"):
        tokenize_corpus(config, build_tokenizer(), tmp_path / "store")
    with pytest.raises(CacheFormatError):
        TokenizedCorpus.open(tmp_path / "store")


def test_token_counts(mixed: TokenizedCorpus) -> None:
    counts = mixed.token_counts(400)
    everything = np.concatenate([document.input_ids for document in mixed.documents()])
    assert counts.dtype == np.int64
    assert counts.tolist() == np.bincount(everything, minlength=400).tolist()
    with pytest.raises(TargetError, match="only ids below 50"):
        mixed.token_counts(50)


def test_length_batches_of_a_corpus_name_its_own_documents(mixed: TokenizedCorpus) -> None:
    rows = [mixed.document(int(i)) for batch in length_batches(mixed.lengths, 64) for i in batch]
    assert sorted(row.doc_id for row in rows) == mixed.doc_ids.tolist()


@pytest.mark.parametrize("index", [-1, 4])
def test_documents_that_are_not_there(mixed: TokenizedCorpus, index: int) -> None:
    with pytest.raises(IndexError, match="4 documents"):
        mixed.document(index)


@pytest.mark.parametrize("name", ["tokens.u32", "mask.u8", "doc_ids.i64", "lengths.i64"])
def test_a_missing_or_shortened_file_is_noticed(mixed: TokenizedCorpus, tmp_path: Path, name: str) -> None:
    path = tmp_path / "store" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheDamagedError, match=f"{name}: has"):
        TokenizedCorpus.open(tmp_path / "store")
    path.unlink()
    with pytest.raises(CacheDamagedError, match=f"{name}: no such file"):
        TokenizedCorpus.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["tokens.u32", "mask.u8", "doc_ids.i64"])
def test_a_changed_byte_is_found_by_verify(mixed: TokenizedCorpus, tmp_path: Path, name: str) -> None:
    path = tmp_path / "store" / name
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheDamagedError, match="digest"):
        TokenizedCorpus.open(tmp_path / "store").verify()


def test_changed_lengths_are_noticed(mixed: TokenizedCorpus, tmp_path: Path) -> None:
    path = tmp_path / "store" / "lengths.i64"
    lengths = np.frombuffer(path.read_bytes(), dtype="<i8").copy()
    lengths[0] += 1
    path.write_bytes(lengths.tobytes())
    with pytest.raises(CacheDamagedError, match="add up to"):
        TokenizedCorpus.open(tmp_path / "store")


def test_another_version_of_the_store_is_refused(mixed: TokenizedCorpus, tmp_path: Path) -> None:
    path = tmp_path / "store" / "corpus.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "format_version": 2}))
    with pytest.raises(CacheFormatError, match="format_version"):
        TokenizedCorpus.open(tmp_path / "store")


def test_a_full_disk_is_one_message(write_corpus: WriteCorpus, make_config: MakeConfig, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "tokens.u32").symlink_to("/dev/full")
    config = make_config(write_corpus([{"text": "the quick brown fox"}]))
    with pytest.raises(DiskSpaceError, match="disk is full"):
        tokenize_corpus(config, build_tokenizer(), store)
