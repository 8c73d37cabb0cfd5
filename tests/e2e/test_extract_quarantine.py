"""Documents whose states cannot be stored are left out, listed, and change nothing else (`--on-bad skip`)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file
from support.corpora import write_texts
from support.extraction import StopAt, files_of, planes_of, small_config
from support.targets import build_dense

from dflash_cache.config import ExtractConfig
from dflash_cache.errors import NonFiniteError
from dflash_cache.extract.progress import BatchComputed, DocumentQuarantined, ExtractEvent, ShardSealed
from dflash_cache.extract.runner import extract
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.verify import verify_cache

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

BAD = "one @ too many"
COUNT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that gives infinite states for the token "@"."""
    folder = build_dense(tmp_path_factory.mktemp("target") / "model")
    token = transformers.AutoTokenizer.from_pretrained(folder).encode("@", add_special_tokens=False)[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = 3.4e38  # a float32, infinite as bfloat16
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Callable[..., ExtractConfig]:
    """Settings for a corpus in which some documents are bad."""

    def make(bad: set[int], name: str = "cache", **changes: Any) -> ExtractConfig:
        data = write_texts(tmp_path / "data.jsonl", COUNT, longest=60)
        lines = data.read_text().splitlines()
        data.write_text("".join((json.dumps({"text": BAD}) if i in bad else lines[i]) + "\n" for i in range(COUNT)))
        return small_config(model, (data,), tmp_path / name, on_bad="skip", **changes)

    return make


def planned(config: ExtractConfig) -> list[list[int]]:
    """The documents of each shard of a whole cache without bad ones."""
    good = config.model_copy(update={"out": config.out.with_name("good")})
    data = write_texts(config.corpus.files[0].with_name("good.jsonl"), COUNT, longest=60)
    corpus = config.corpus.model_copy(update={"files": (data,)})
    extract(good.model_copy(update={"corpus": corpus}))
    index = FeatureCache.open(good.out).index
    return [index.doc_id[index.shard == number].tolist() for number in range(int(index.shard.max()) + 1)]


def test_bad_documents_are_absent_and_listed_and_the_others_are_what_they_were(
    configure: Callable[..., ExtractConfig],
) -> None:
    bad = {0, 7, 8, 25, COUNT - 1}
    events: list[ExtractEvent] = []
    report = extract(configure(bad), events.append)
    cache = FeatureCache.open(report.folder)
    manifest = report.manifest
    assert manifest.complete and manifest.num_documents == COUNT - len(bad)
    assert [(entry.document, entry.doc_id) for entry in manifest.quarantined] == [(i, i) for i in sorted(bad)]
    assert {(entry.layer, entry.reason) for entry in manifest.quarantined} == {(0, "not_finite")}
    assert {event.doc_id for event in events if isinstance(event, DocumentQuarantined)} == bad
    assert cache.index.doc_id.tolist() == [i for i in range(COUNT) if i not in bad]
    assert verify_cache(cache).problems == ()
    assert all(np.isfinite(rows).all() for rows in planes_of(report.folder).values())
    assert extract(configure(bad)).nothing_to_do


@pytest.mark.parametrize(
    ("kind", "number"), [(BatchComputed, 1), (BatchComputed, 5), (ShardSealed, 1), (ShardSealed, 2), (ShardSealed, 4)]
)
def test_a_continued_run_ends_with_the_same_bytes(
    kind: type[ExtractEvent], number: int, configure: Callable[..., ExtractConfig]
) -> None:
    bad = set(range(0, COUNT, 3))
    extract(configure(bad, "whole"))
    with pytest.raises(KeyboardInterrupt):
        extract(configure(bad), StopAt(kind, number, KeyboardInterrupt))
    report = extract(configure(bad))
    assert report.manifest.complete
    assert files_of(report.folder) == files_of(configure(bad, "whole").out)


def test_a_shard_that_holds_bad_documents_alone_does_not_exist(configure: Callable[..., ExtractConfig]) -> None:
    # Documents of the first, of a middle and of the last shard: replaced by the short bad text, each a shard alone.
    alone: dict[str, Any] = {"shard_tokens": 1}
    bad = {0, 1, 20, COUNT - 1}
    report = extract(configure(bad, **alone))
    assert len(report.manifest.shards) == COUNT - len(bad)
    assert [entry.document for entry in report.manifest.quarantined] == sorted(bad)
    assert report.manifest.shards[0].first_document == 2
    assert verify_cache(FeatureCache.open(report.folder)).problems == ()
    for number in (1, 17, 18, 19):
        config = configure(bad, f"stopped{number}", **alone)
        with pytest.raises(KeyboardInterrupt):
            extract(config, StopAt(ShardSealed, number, KeyboardInterrupt))
        extract(config)
        assert files_of(config.out) == files_of(report.folder)


def test_skipping_may_begin_where_stopping_stopped(configure: Callable[..., ExtractConfig]) -> None:
    bad = {30}
    with pytest.raises(NonFiniteError, match="--on-bad skip"):
        extract(configure(bad).model_copy(update={"on_bad": "stop"}))
    extract(configure(bad))
    extract(configure(bad, "whole"))
    assert files_of(configure(bad).out) == files_of(configure(bad, "whole").out)


def test_a_quarantine_that_is_committed_does_not_stop_a_run_that_would_stop(
    configure: Callable[..., ExtractConfig],
) -> None:
    bad = {0, 1}
    with pytest.raises(KeyboardInterrupt):
        extract(configure(bad), StopAt(ShardSealed, 1, KeyboardInterrupt))
    assert extract(configure(bad).model_copy(update={"on_bad": "stop"})).manifest.complete


def test_nothing_but_bad_documents_is_an_error_each_time(configure: Callable[..., ExtractConfig]) -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="none of the 40 documents"):
            extract(configure(set(range(COUNT))))
    shutil.rmtree(configure(set()).out)


def test_without_bad_documents_skipping_changes_no_byte(configure: Callable[..., ExtractConfig]) -> None:
    assert planned(configure(set()))
    extract(configure(set()))
    assert files_of(configure(set()).out) == files_of(configure(set(), "good").out)
