"""An interrupted extraction continues to the same bytes; one with other settings is refused (B54, B56)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.corpora import write_chats, write_texts
from support.extraction import StopAt, files_of, small_config
from support.targets import build_dense, build_hybrid

from dflash_cache.config import ExtractConfig
from dflash_cache.errors import (
    CacheDamagedError,
    ConfigError,
    CorpusError,
    IdentityMismatchError,
    OutputExistsError,
    TargetError,
)
from dflash_cache.extract.progress import BatchComputed, CorpusRead, ExtractEvent, Phase, ShardSealed
from dflash_cache.extract.runner import extract

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, ...]]:
    folder = tmp_path_factory.mktemp("inputs")
    files = (write_texts(folder / "texts.jsonl", 24, longest=70), write_chats(folder / "chats.jsonl", 10))
    return build_dense(folder / "model"), files


@pytest.fixture(scope="module")
def finished(inputs: tuple[Path, tuple[Path, ...]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache made without interruption."""
    out = tmp_path_factory.mktemp("finished") / "cache"
    extract(small_config(inputs[0], inputs[1], out))
    return out


@pytest.fixture
def interrupted(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> ExtractConfig:
    """Settings whose cache was stopped after its first shard; the background is a window ahead at most."""
    config = small_config(inputs[0], inputs[1], tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        extract(config, StopAt(ShardSealed, 1, KeyboardInterrupt))
    return config


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (CorpusRead, 1),
        (Phase, 4),
        (BatchComputed, 1),
        (BatchComputed, 4),
        (ShardSealed, 1),
        (ShardSealed, 3),
        (Phase, 5),
    ],
)
def test_stopping_anywhere_and_continuing_gives_the_same_bytes(
    kind: type[ExtractEvent], number: int, inputs: tuple[Path, tuple[Path, ...]], finished: Path, tmp_path: Path
) -> None:
    config = small_config(inputs[0], inputs[1], tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        extract(config, StopAt(kind, number, KeyboardInterrupt))
    report = extract(config)
    assert report.manifest.complete
    assert files_of(config.out) == files_of(finished)


def test_a_hybrid_target_continues_to_the_same_bytes(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> None:
    model = build_hybrid(tmp_path / "model")
    whole = small_config(model, inputs[1][:1], tmp_path / "whole")
    extract(whole)
    stopped = small_config(model, inputs[1][:1], tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        extract(stopped, StopAt(ShardSealed, 1, KeyboardInterrupt))
    assert extract(stopped).documents_before > 0
    assert files_of(stopped.out) == files_of(whole.out)


def test_continuing_recomputes_only_what_is_missing(interrupted: ExtractConfig) -> None:
    report = extract(interrupted)
    assert report.documents_before > 0
    assert report.tokens_computed < report.manifest.num_tokens
    assert report.self_check is not None


def test_a_second_run_has_nothing_to_do_and_says_so(inputs: tuple[Path, tuple[Path, ...]], finished: Path) -> None:
    before = files_of(finished)
    events: list[ExtractEvent] = []
    report = extract(small_config(inputs[0], inputs[1], finished), events.append)
    assert report.nothing_to_do and report.batches == 0
    assert any("nothing to do" in notice for notice in report.notices)
    assert Phase("load_weights") not in events
    assert files_of(finished) == before


def test_a_nested_new_folder_is_made(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> None:
    assert extract(small_config(inputs[0], inputs[1][:1], tmp_path / "a" / "b" / "cache")).manifest.complete


def _change_corpus(config: ExtractConfig, folder: Path) -> dict[str, Any]:
    lines = config.corpus.files[0].read_text().splitlines()
    lines[3] = json.dumps({"text": "another document, once"})
    changed = folder / "texts.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    return {"corpus": {"files": (changed, *config.corpus.files[1:])}}


def _change_model(change: Callable[[Path], None]) -> Callable[[ExtractConfig, Path], dict[str, Any]]:
    def apply(config: ExtractConfig, folder: Path) -> dict[str, Any]:
        changed = Path(shutil.copytree(config.model, folder / "copy" / Path(config.model).name))
        change(changed)
        return {"model": str(changed)}

    return apply


def _change_json(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _change_weight(model: Path) -> None:
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _change_template(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text() + "{# the same text #}")


def _change_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"][3]["single_word"] = True
    path.write_text(json.dumps(document))


CHANGES: dict[str, tuple[Callable[[ExtractConfig, Path], dict[str, Any]], str]] = {
    "corpus": (_change_corpus, r"corpus\.digest: '\w+' -> '\w+'"),
    "order": (lambda c, f: {"corpus": {"files": c.corpus.files[::-1]}}, r"corpus\.digest"),
    "max_length": (lambda c, f: {"corpus": {"max_length": 40}}, r"corpus\.max_length: 4096 -> 40"),
    "template_kwargs": (
        lambda c, f: {"corpus": {"template_kwargs": {"greeting": "hello"}}},
        r"corpus\.template_kwargs\.greeting: None -> 'hello'",
    ),
    "taps": (lambda c, f: {"fc_layers": (0, 2, 3)}, r"features\.fc_layers"),
    "dtype": (lambda c, f: {"dtype": "bfloat16"}, r"target\.compute_dtype: 'float32' -> 'bfloat16'"),
    "codec": (lambda c, f: {"codec": "fast"}, r"settings\.codec: 'compact' -> 'fast'"),
    "batch_tokens": (lambda c, f: {"batch_tokens": 700}, r"settings\.batch_tokens: 400 -> 700"),
    "shard_tokens": (lambda c, f: {"shard_tokens": 800}, r"settings\.shard_tokens: 300 -> 800"),
    "window_tokens": (lambda c, f: {"window_tokens": 3000}, r"settings\.window_tokens: 700 -> 3000"),
    "attention": (lambda c, f: {"attention": "eager"}, r"settings\.attention: 'sdpa' -> 'eager'"),
    "weights": (_change_model(_change_weight), r"target\.weights_digest"),
    "config": (_change_model(_change_json("config.json", rms_norm_eps=1e-5)), r"target\.config_digest"),
    "template": (_change_model(_change_template), r"corpus\.template_digest"),
    "tokenizer": (_change_model(_change_tokenizer), r"target\.tokenizer_digest"),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_a_changed_setting_is_refused_by_name_before_weights_are_loaded(
    setting: str, interrupted: ExtractConfig, tmp_path: Path
) -> None:
    change, message = CHANGES[setting]
    changed = change(interrupted, tmp_path)
    if "corpus" in changed:
        changed["corpus"] = interrupted.corpus.model_copy(update=changed["corpus"])
    before = files_of(interrupted.out)
    events: list[ExtractEvent] = []
    with pytest.raises(IdentityMismatchError, match=message):
        extract(interrupted.model_copy(update=changed), events.append)
    assert Phase("load_weights") not in events
    assert files_of(interrupted.out) == before


def test_a_moved_model_folder_is_the_same_model(interrupted: ExtractConfig, tmp_path: Path) -> None:
    moved = shutil.copytree(interrupted.model, tmp_path / "elsewhere" / Path(interrupted.model).name)
    assert extract(interrupted.model_copy(update={"model": str(moved)})).manifest.complete


def test_overwrite_replaces_a_cache_only_once_the_new_one_can_begin(
    interrupted: ExtractConfig, finished: Path, tmp_path: Path
) -> None:
    before = files_of(interrupted.out)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    no_corpus = interrupted.corpus.model_copy(update={"files": (empty,)})
    with pytest.raises(CorpusError):
        extract(interrupted.model_copy(update={"overwrite": True, "corpus": no_corpus}))
    assert files_of(interrupted.out) == before
    report = extract(interrupted.model_copy(update={"overwrite": True}))
    assert report.documents_before == 0
    assert files_of(interrupted.out) == files_of(finished)


def test_a_foreign_folder_is_left_alone(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match=r"thesis\.txt"):
            extract(small_config(inputs[0], inputs[1], tmp_path, overwrite=overwrite))
    assert files_of(tmp_path) == {"thesis.txt": b"mine"}


def test_two_runs_at_once_are_refused(interrupted: ExtractConfig) -> None:
    messages: list[str] = []

    def start_another(event: ExtractEvent) -> None:
        if event == Phase("tokenize"):
            with pytest.raises(OutputExistsError, match="another process") as caught:
                extract(interrupted)
            messages.append(str(caught.value))

    assert extract(interrupted, start_another).manifest.complete
    assert len(messages) == 1


def test_a_deleted_shard_is_noticed_when_continuing(interrupted: ExtractConfig) -> None:
    shutil.rmtree(interrupted.out / "shard-00000.zarr" / "fc_features")
    with pytest.raises(CacheDamagedError, match=r"shard-00000\.zarr"):
        extract(interrupted)


def test_a_damaged_attachment_is_made_again(interrupted: ExtractConfig, finished: Path) -> None:
    (interrupted.out / "tokenizer.json").write_text("{}")
    (interrupted.out / "target_head.safetensors").unlink()
    extract(interrupted)
    assert files_of(interrupted.out) == files_of(finished)


def test_leftovers_of_a_killed_run_are_cleared(interrupted: ExtractConfig, finished: Path) -> None:
    for name in (".staging/shard-00002.zarr", ".scratch/tokens", "shard-00002.zarr/junk"):
        (interrupted.out / name).mkdir(parents=True)
        (interrupted.out / name / "half").write_bytes(b"x" * 100)
    extract(interrupted)
    assert files_of(interrupted.out) == files_of(finished)


@pytest.mark.parametrize(
    ("layers", "message"), [((1, 40), r"\[40\].*0 to 5"), ((1, 1), "more than once"), ((-1,), r"\[-1\]")]
)
def test_taps_out_of_range_are_refused_before_the_corpus_is_read(
    layers: tuple[int, ...], message: str, inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path
) -> None:
    events: list[ExtractEvent] = []
    with pytest.raises(ConfigError, match=message):
        extract(small_config(inputs[0], inputs[1], tmp_path / "cache", fc_layers=layers), events.append)
    assert events == [Phase("open_target")]


def test_documents_beyond_the_targets_window_are_refused(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"text": "token " * 3000}) + "\n")
    with pytest.raises(ConfigError, match="--max-length 1024"):
        extract(small_config(inputs[0], (data,), tmp_path / "cache"))


def test_an_unknown_model_names_the_next_step(inputs: tuple[Path, tuple[Path, ...]], tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="organisation/nothing"):
        extract(small_config(Path("nothing"), inputs[1], tmp_path / "cache"))


def test_an_error_in_the_background_ends_the_run_and_loses_nothing(interrupted: ExtractConfig, finished: Path) -> None:
    sealed_before = sorted(path.name for path in interrupted.out.glob("shard-*"))

    last = sorted(path.name for path in finished.glob("shard-*"))[-1]

    def break_staging(event: ExtractEvent) -> None:
        if isinstance(event, ShardSealed) and (interrupted.out / ".staging").is_dir():
            (interrupted.out / ".staging" / last).touch()  # a file where a folder should be

    with pytest.raises(OSError, match="staging"):
        extract(interrupted, break_staging)
    assert set(sealed_before) <= {path.name for path in interrupted.out.glob("shard-*")}
    extract(interrupted)
    assert files_of(interrupted.out) == files_of(finished)
