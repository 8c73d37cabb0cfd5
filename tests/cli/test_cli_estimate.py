"""`estimate` and `extract --dry-run` say beforehand what extraction makes, and write nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import write_texts
from support.extraction import files_of
from support.program import fails_cleanly, run

from dflash_cache.format.cache import FeatureCache

LAYERS = ["--fc-layers", "0,1,2,3,4"]


def estimated(target: Path, corpus: Path, out: Path, *more: object) -> dict[str, Any]:
    outcome = run("estimate", "--model", target, "--data", corpus, "--out", out, *LAYERS, "--json", *more)
    assert outcome.code == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("long") / "texts.jsonl", 120, longest=250)


@pytest.mark.parametrize("codec", ["fast", "compact"])
def test_the_estimate_is_what_extraction_writes(target: Path, long_corpus: Path, tmp_path: Path, codec: str) -> None:
    out = tmp_path / "cache"
    flags = ["--codec", codec, "--shard-tokens", "4000", "--batch-tokens", "1500", "--max-length", "400"]
    found = estimated(target, long_corpus, out, *flags, "--measure")
    assert not out.exists()
    summary = tmp_path / "summary.json"
    outcome = run(
        "extract", "--model", target, "--data", long_corpus, "--out", out, *LAYERS, *flags, "--summary", summary
    )
    assert outcome.code == 0, outcome.stderr
    cache = FeatureCache.open(out)
    manifest = cache.manifest
    readers = [cache.shard(number) for number in range(len(manifest.shards))]
    raw = sum(layout.raw_bytes for reader in readers for layout in reader.layout.values())
    stored = sum(shard.stored_bytes for shard in manifest.shards)
    assert found["documents"] == manifest.num_documents
    assert found["tokens"] == manifest.num_tokens
    assert found["supervised_tokens"] == manifest.identity.corpus.supervised_tokens
    assert found["shards"] == len(manifest.shards) > 2
    assert found["raw_bytes"] == raw
    assert found["raw_bytes"] == pytest.approx(json.loads(summary.read_text())["sealed"]["raw_bytes"], rel=0.02)
    assert found["head_bytes"] == pytest.approx(sum(file.bytes for file in manifest.attached.values()), rel=0.02)
    if codec == "fast":
        assert found["stored_basis"] == "exact" and found["stored_bytes"] == stored
    else:
        assert found["stored_basis"] == "measured" and found["stored_bytes"] == pytest.approx(stored, rel=0.1)
    assert found["rate_basis"] == "measured" and found["hours"] > 0
    assert found["corpus"]["documents_truncated"] == manifest.identity.corpus.truncated > 0


def test_padding_is_that_of_the_batches(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "1 " * count}) + "\n" for count in (10, 20, 20, 10)))
    one_by_one = estimated(target, data, tmp_path / "cache", "--batch-tokens", "1")
    assert one_by_one["padding_share"] == 0 and one_by_one["batches"] == 4
    together = estimated(target, data, tmp_path / "cache", "--batch-tokens", "1000")
    short, longest = (estimated(target, data, tmp_path / "cache", "--limit", n)["tokens"] for n in (1, 2))
    longest -= short
    assert (together["batches"], together["padded_tokens"]) == (1, 4 * longest)
    assert together["tokens"] == 2 * (short + longest)
    assert together["padding_share"] == pytest.approx(1 - (short + longest) / (2 * longest))


def test_without_measuring_no_weights_are_loaded_and_the_share_is_assumed(
    target: Path, corpus: Path, tmp_path: Path
) -> None:
    outcome = run("estimate", "--model", target, "--data", corpus, "--out", tmp_path / "cache", *LAYERS, "--rate", 50)
    assert outcome.code == 0, outcome.stderr
    assert "weights" not in outcome.stderr
    words = " ".join(outcome.stdout.split())
    for part in ("30 kept of 30 read", "are padding", "assumed with caution", "enough for", "at 50 tokens/s (given)"):
        assert part in words, part
    found = estimated(target, corpus, tmp_path / "cache", "--rate", 50)
    assert found["hours"] == pytest.approx(found["tokens"] / 50 / 3600)
    assert estimated(target, corpus, tmp_path / "cache")["hours"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_same_and_touches_nothing(
    target: Path, corpus: Path, extracted: Path, tmp_path: Path
) -> None:
    options = ["--model", target, "--data", corpus, *LAYERS, "--limit", 12, "--out"]
    dry, estimate = run("extract", *options, tmp_path / "c", "--dry-run"), run("estimate", *options, tmp_path / "c")
    assert dry.code == estimate.code == 0
    assert dry.stdout == estimate.stdout and "12 kept of 12 read" in " ".join(dry.stdout.split())
    assert list(tmp_path.iterdir()) == []
    before = files_of(extracted)
    names = sorted(path.name for path in extracted.iterdir())
    again = run("extract", *options, extracted, "--dry-run")
    assert again.code == 0 and "of this cache there already" in again.stdout
    assert files_of(extracted) == before and sorted(path.name for path in extracted.iterdir()) == names


def test_a_dry_run_has_no_summary(target: Path, corpus: Path, tmp_path: Path) -> None:
    options = ["--model", target, "--data", corpus, "--out", tmp_path / "cache", *LAYERS]
    fails_cleanly(run("extract", *options, "--dry-run", "--summary", tmp_path / "summary.json"), "estimate --json")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said(target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    outcome = run("estimate", "--model", target, "--data", corpus, "--out", tmp_path / "a" / "b", *LAYERS)
    assert outcome.code == 0, outcome.stderr
    assert "1,000 B free: NOT ENOUGH" in " ".join(outcome.stdout.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--rate", "5", "--measure"], "--measure"),
        (["--fc-layers", "1,40"], "0 to 5"),
        (["--max-length", "1"], "max_length"),
    ],
)
def test_what_cannot_be_is_refused(target: Path, corpus: Path, tmp_path: Path, flags: list[str], words: str) -> None:
    options = ["--model", target, "--data", corpus, "--out", tmp_path / "cache"]
    fails_cleanly(run("estimate", *options, *flags), words)
    assert list(tmp_path.iterdir()) == []


def test_documents_beyond_the_targets_window_are_refused(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"text": "token " * 3000}) + "\n")
    fails_cleanly(
        run("estimate", "--model", target, "--data", data, "--out", tmp_path / "c", *LAYERS), "--max-length 1024"
    )
