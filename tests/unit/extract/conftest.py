"""Targets and corpora that the tests of stage one share; built once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from support.corpora import write_chats, write_texts
from support.extraction import small_config
from support.targets import BUILDERS

from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.target import TargetFiles, open_target

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build a target by name, once."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = BUILDERS[name](tmp_path_factory.mktemp(name))
        return built[name]

    return build


@pytest.fixture(scope="session")
def opened(target_folder: Callable[[str], Path]) -> Callable[[str], tuple[TargetFiles, LoadedTarget]]:
    """Load a target by name, once, in float32 on the CPU."""
    loaded: dict[str, tuple[TargetFiles, LoadedTarget]] = {}

    def load(name: str) -> tuple[TargetFiles, LoadedTarget]:
        if name not in loaded:
            files = open_target(small_config(target_folder(name), (Path("unused"),), Path("unused")))
            loaded[name] = (files, load_target(files, "sdpa"))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def corpus_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Plain texts and chats of many lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    return write_texts(folder / "texts.jsonl", 22, longest=60), write_chats(folder / "chats.jsonl", 8)
