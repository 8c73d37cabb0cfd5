"""The first documents, or a seeded sample of them: in order, with their own numbers, unread lines not looked into."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_tokenizer import build_tokenizer
from pydantic import ValidationError

from dflash_cache.config import CorpusConfig
from dflash_cache.corpus.reader import DocumentReader, Selection
from dflash_cache.corpus.tokenize import tokenize_corpus
from dflash_cache.errors import CorpusError


def indices(path: Path, **selection: int) -> list[int]:
    return [document.index for document in DocumentReader([path], Selection(**selection))]


@pytest.fixture
def forty(write_corpus: Callable[..., Path]) -> Path:
    return write_corpus([*({"text": f"document number {i}"} for i in range(40)), b""])


def test_limit_takes_the_first_and_reads_no_further(write_corpus: Callable[..., Path]) -> None:
    path = write_corpus([{"text": "a"}, b"", {"text": "b"}, b"not JSON"])
    assert indices(path, limit=2) == [0, 1]
    reader = DocumentReader([path, path], Selection(limit=2))
    assert len(list(reader)) == 2 and reader.bytes_read == reader.total_bytes
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:4"):
        indices(path, limit=3)


def test_a_limit_beyond_the_end_takes_all(forty: Path) -> None:
    assert indices(forty, limit=41) == indices(forty, limit=40) == list(range(40))


def test_a_sample_is_ascending_and_a_function_of_its_seed(forty: Path) -> None:
    first = indices(forty, sample=10, seed=3)
    assert len(first) == 10 and first == sorted(set(first))
    assert indices(forty, sample=10, seed=3) == first
    assert indices(forty, sample=10, seed=4) != first
    assert indices(forty, sample=40) == indices(forty, sample=99) == list(range(40))
    assert max(indices(forty, limit=12, sample=10)) < 12


def test_a_sample_draws_across_files(forty: Path, write_corpus: Callable[..., Path]) -> None:
    more = write_corpus([{"text": "more"}] * 40, "more.jsonl", compress=True)
    drawn = [document.source.path for document in DocumentReader([forty, more], Selection(sample=30))]
    assert 8 < Counter(drawn)[more] < 22


def test_every_document_is_drawn_equally_often() -> None:
    counts: Counter[int] = Counter()
    for seed in range(600):
        counts.update(i for i, drawn in enumerate(Selection(sample=3, seed=seed).chosen(12)) if drawn)
    assert sum(counts.values()) == 1800
    assert min(counts.values()) > 100 and max(counts.values()) < 200


def test_lines_that_are_not_drawn_are_not_looked_into(write_corpus: Callable[..., Path]) -> None:
    drawn = [i for i, chosen in enumerate(Selection(sample=3, seed=1).chosen(8)) if chosen]
    path = write_corpus([{"text": "a"} if i in drawn else b"broken" for i in range(8)])
    assert indices(path, sample=3, seed=1) == drawn
    with pytest.raises(CorpusError, match="not valid JSON"):
        indices(path, sample=4, seed=1)


def test_the_selection_is_part_of_the_digest(forty: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    configs = [
        CorpusConfig(files=(forty,)),
        CorpusConfig(files=(forty,), limit=20),
        CorpusConfig(files=(forty,), sample=20),
        CorpusConfig(files=(forty,), sample=20, shuffle_seed=1),
        CorpusConfig(files=(forty,), sample=20, shuffle_seed=0),
    ]
    stores = [tokenize_corpus(config, tokenizer, tmp_path / str(i)) for i, config in enumerate(configs)]
    assert len({store.digest for store in stores}) == 4
    assert stores[2].digest == stores[4].digest
    assert stores[1].summary.documents_read == 20


@pytest.mark.parametrize("bad", [{"limit": 0}, {"sample": -1}, {"sample": 3, "shuffle_seed": -1}, {"shuffle_seed": 1}])
def test_impossible_selections_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        CorpusConfig.model_validate({"files": ("x",), **bad})
