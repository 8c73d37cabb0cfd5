"""One tiny target, corpus and cache, made once for all command-line tests."""

from pathlib import Path

import pytest
from support.corpora import write_chats, write_texts
from support.program import run
from support.targets import build_dense


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dense(tmp_path_factory.mktemp("target") / "tiny-qwen3")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts, chats = write_texts(folder / "texts.jsonl", 20), write_chats(folder / "chats.jsonl", 10)
    path = folder / "corpus.jsonl"
    path.write_text(texts.read_text() + chats.read_text())
    return path


@pytest.fixture(scope="session")
def extracted(target: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cache; tests must not change it."""
    out = tmp_path_factory.mktemp("extracted") / "cache"
    outcome = run("extract", "--model", target, "--data", corpus, "--out", out, "--fc-layers", "0,1,2,3,4")
    assert outcome.code == 0, outcome.stderr
    return out
