"""Fixtures of the corpus tests: the tiny tokenizer, and helpers that write corpora."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_tokenizer import build_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_cache.config import CorpusConfig


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Write records, or raw lines, to a JSON Lines file."""

    def write(records: list[Any], name: str = "corpus.jsonl", *, compress: bool = False) -> Path:
        lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
        data = b"".join(line + b"\n" for line in lines)
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if compress else data)
        return path

    return write


@pytest.fixture
def make_config() -> Callable[..., CorpusConfig]:
    def make(*files: Path, max_length: int = 512, **template_kwargs: Any) -> CorpusConfig:
        return CorpusConfig(files=files, max_length=max_length, template_kwargs=template_kwargs)

    return make
