"""Tiny targets opened for decoding, each built once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.targets import BUILDERS

from dflash_cache.config import CorpusConfig, ExtractConfig
from dflash_cache.evaluate.session import DecodingTarget, open_decoding_target
from dflash_cache.extract.target import open_target


@pytest.fixture(scope="session")
def decoding_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DecodingTarget]:
    """A function from a target's kind to the target, in float32 on the CPU, without end tokens."""

    @cache
    def build(kind: str) -> DecodingTarget:
        folder = BUILDERS[kind](tmp_path_factory.mktemp(kind) / "target")
        corpus = CorpusConfig(files=(Path("unused.jsonl"),))
        files = open_target(ExtractConfig(model=str(folder), corpus=corpus, device="cpu", dtype="float32"))
        opened = open_decoding_target(files, "sdpa")
        return DecodingTarget(opened.loaded, opened.head, eos_token_ids=())

    return build
