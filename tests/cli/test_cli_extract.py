"""`extract` as a user types it, with everything that can be wrong."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.corpora import write_texts
from support.extraction import files_of
from support.program import fails_cleanly, run
from transformers import AutoTokenizer

from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.manifest import read_manifest


def extract(target: object, data: object, out: Path, *more: object) -> object:
    return run("extract", "--model", target, "--data", data, "--out", out, "--fc-layers", "0,1,2,3,4", *more)


def test_the_closing_table_counts_everything(target: Path, corpus: Path, tmp_path: Path) -> None:
    outcome = extract(target, corpus, tmp_path / "cache")
    assert outcome.code == 0, outcome.stderr
    for words in ("30 kept of 30 read", "supervised", "ratio", "recomputed", "tokens/s"):
        assert words in " ".join(outcome.stdout.split()), words
    assert "self-check passed" in outcome.stderr
    assert "dflash-cache train --shards" in outcome.stderr


def test_a_second_run_does_nothing_and_says_so(extracted: Path, target: Path, corpus: Path) -> None:
    """B56."""
    before = files_of(extracted)
    outcome = extract(target, corpus, extracted)
    assert outcome.code == 0
    assert "nothing to do" in outcome.stderr
    assert files_of(extracted) == before


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--max-length", "64"], "max_length"),
        (["--codec", "fast"], "codec"),
        (["--dtype", "bfloat16"], "compute_dtype"),
        (["--batch-tokens", "512"], "batch_tokens"),
        (["--attention", "eager"], "attention"),
        (["--template-kwarg", "greeting=hello"], "template_kwargs"),
    ],
)
def test_a_changed_setting_is_refused_by_name(
    extracted: Path, target: Path, corpus: Path, flags: list[str], field: str
) -> None:
    before = files_of(extracted)
    fails_cleanly(extract(target, corpus, extracted, *flags), field, "->", "--overwrite")
    assert files_of(extracted) == before


class TestCorpus:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b'{"text": "fine"}\n{"text": \n', ["data.jsonl:2"]),
            (b'{"text": "fine"}\n["not an object"]\n', ["data.jsonl:2", "object"]),
            (b'{"content": "hello"}\n', ["data.jsonl:1", "content", "text", "messages"]),
            (b'{"text": 5}\n', ["data.jsonl:1", "text"]),
            (b'{"messages": []}\n', ["data.jsonl:1", "messages"]),
            (b'{"text": "caf\xe9"}\n', ["data.jsonl:1", "UTF-8"]),
            (b"", ["data.jsonl", "no document"]),
            (b"\n  \n", ["data.jsonl", "no document"]),
            (b'{"messages": [{"role": "user", "content": "hello"}]}\n', ["no_supervised_token"]),
            (b'{"text": "x"}\n', ["too_short"]),
            (gzip.compress(b'{"text": "hello there"}\n' * 50)[:-12], ["data.jsonl", "gzip"]),
        ],
        ids=[
            "cut", "array", "other fields", "wrong type", "no messages", "latin-1", "empty", "blank", "no answer",
            "short", "cut gzip",
        ],
    )  # fmt: skip
    def test_unusable_data(self, target: Path, tmp_path: Path, content: bytes, words: list[str]) -> None:
        data = tmp_path / "data.jsonl"
        data.write_bytes(content)
        fails_cleanly(extract(target, data, tmp_path / "cache"), *words)
        assert not (tmp_path / "cache" / "manifest.json").exists()

    def test_missing_file(self, target: Path, tmp_path: Path) -> None:
        fails_cleanly(extract(target, tmp_path / "nowhere.jsonl", tmp_path / "cache"), "nowhere.jsonl")

    def test_no_file_named(self, target: Path, tmp_path: Path) -> None:
        fails_cleanly(run("extract", "--model", target, "--out", tmp_path / "cache"), "--data")

    def test_a_tokenizer_without_a_chat_template(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        plain = shutil.copytree(target, tmp_path / "plain")
        (plain / "chat_template.jinja").unlink()
        fails_cleanly(extract(plain, corpus, tmp_path / "cache"), "chat template", "corpus.jsonl:21")


class TestTarget:
    def test_unknown_folder_or_name(self, corpus: Path, tmp_path: Path) -> None:
        fails_cleanly(extract("./no/such/model", corpus, tmp_path / "cache"), "no/such/model")
        fails_cleanly(extract("nothing-known", corpus, tmp_path / "cache"), "nothing-known")

    def test_a_bare_hub_name_says_what_it_was_taken_as_before_anything_is_fetched(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        command = [sys.executable, "-c", "from dflash_cache.cli import main; main()"]
        command += ["extract", "--model", "Qwen3.6-27B", "--data", str(corpus), "--out", str(tmp_path / "cache")]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Qwen3.6-27B was taken as Qwen/Qwen3.6-27B" in done.stderr
        assert done.stderr.count("error: ") == 1
        assert "Traceback" not in done.stderr

    def test_no_model_named(self, corpus: Path, tmp_path: Path) -> None:
        fails_cleanly(run("extract", "--data", corpus, "--out", tmp_path / "cache"), "--model")

    def test_a_folder_that_is_no_model(self, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        fails_cleanly(extract(tmp_path / "model", corpus, tmp_path / "cache"), "model")

    @pytest.mark.parametrize(
        ("layers", "words"),
        [("1,40", "0 to 5"), ("1,1,2", "more than once"), ("-1,2", "0 to 5"), ("1;2", "commas"), ("", "commas")],
    )
    def test_fc_layers_that_do_not_exist(
        self, target: Path, corpus: Path, tmp_path: Path, layers: str, words: str
    ) -> None:
        """B10: refused before the weights are loaded."""
        outcome = run("extract", "--model", target, "--data", corpus, "--out", tmp_path / "c", f"--fc-layers={layers}")
        fails_cleanly(outcome, words)
        assert "loading" not in outcome.stderr

    def test_a_cut_weight_file(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        broken = shutil.copytree(target, tmp_path / "broken")
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        fails_cleanly(extract(broken, corpus, tmp_path / "cache"), "model.safetensors")


class TestOutput:
    def test_a_folder_that_holds_something_else(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        for more in ([], ["--overwrite"]):
            fails_cleanly(extract(target, corpus, tmp_path, *more), "notes.txt")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_cache_of_another_format_version(
        self, extracted: Path, target: Path, corpus: Path, tmp_path: Path
    ) -> None:
        out = shutil.copytree(extracted, tmp_path / "cache")
        document = json.loads((out / "manifest.json").read_text())
        document["format_version"] = 2
        (out / "manifest.json").write_text(json.dumps(document))
        before = files_of(out)
        fails_cleanly(extract(target, corpus, out), "format_version")
        assert files_of(out) == before

    def test_a_damaged_shard_is_not_continued(
        self, extracted: Path, target: Path, corpus: Path, tmp_path: Path
    ) -> None:
        out = shutil.copytree(extracted, tmp_path / "cache")
        next((out / "shard-00000.zarr" / "fc_features").glob("c.*")).unlink()
        fails_cleanly(extract(target, corpus, out), "fc_features")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_without_permission(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        fails_cleanly(extract(target, corpus, tmp_path / "cache"), str(tmp_path))

    def test_out_below_a_file(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        fails_cleanly(extract(target, corpus, tmp_path / "file" / "cache"), "file")


class TestConfigFile:
    def test_flags_beat_the_file(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        config = tmp_path / "extract.toml"
        config.write_text(
            f'model = "{target}"\ncodec = "fast"\nfc_layers = [0, 2]\nbatch_tokens = 300\n'
            f'[corpus]\nfiles = ["{corpus}"]\nmax_length = 50\n'
        )
        outcome = run("extract", "--config", config, "--out", tmp_path / "cache", "--batch-tokens", "200")
        assert outcome.code == 0, outcome.stderr
        identity = read_manifest(tmp_path / "cache").identity
        assert identity.settings.codec == "fast"
        assert identity.settings.batch_tokens == 200
        assert identity.features.fc_layer_indices == (0, 2)
        assert identity.corpus.max_length == 50

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("batch_token = 5", "batch_tokens"),
            ("[corpus]\nmax_lenght = 5", "corpus.max_length"),
            ("batch_tokens = -1", "batch_tokens"),
            ("batch_tokens = ", "TOML"),
            ('codec = "best"', "codec"),
        ],
    )
    def test_a_wrong_file_is_explained(self, target: Path, corpus: Path, tmp_path: Path, text: str, words: str) -> None:
        config = tmp_path / "extract.toml"
        config.write_text(text)
        fails_cleanly(extract(target, corpus, tmp_path / "cache", "--config", config), words)


def many_shards(target: Path, tmp_path: Path, out: Path) -> list[object]:
    """A command that seals shards for a second or more."""
    data = tmp_path / "data.jsonl"
    if not data.exists():
        write_texts(data, 400)
    return [
        "extract", "--model", target, "--data", data, "--out", out, "--fc-layers", "0,1,2,3,4",
        "--shard-tokens", "300", "--batch-tokens", "300",
    ]  # fmt: skip


def start(command: list[object], out: Path) -> subprocess.Popen[str]:
    """Run a command in a process of its own and wait until it has sealed three shards."""
    program = [sys.executable, "-c", "from dflash_cache.cli import main; main()", *map(str, command)]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    while not (out / "shard-00002.zarr").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "extract_log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "code", "reason"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_keeps_what_is_sealed_and_says_how_to_go_on(
    target: Path, tmp_path: Path, number: signal.Signals, code: int, reason: str
) -> None:
    out, summary = tmp_path / "cache", tmp_path / "summary.json"
    command = many_shards(target, tmp_path, out)
    process = start([*command, "--summary", summary], out)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert "run the same command again" in stderr and number.name in stderr
    manifest = read_manifest(out)
    assert not manifest.complete
    record = json.loads(summary.read_text())
    assert log_of(out) == [record]
    assert record["exit"] == reason
    assert record["sealed"]["documents"] == manifest.num_documents > 0
    assert 0 < record["tokens_computed"] < 20_000 and record["tokens_per_second"] > 0
    assert run(*command).code == 0
    assert [entry["exit"] for entry in log_of(out)] == [reason, "complete"]
    whole = tmp_path / "whole"
    assert run(*many_shards(target, tmp_path, whole)).code == 0
    assert files_of(out) == files_of(whole)


def test_a_second_signal_ends_at_once_and_loses_nothing_sealed(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    command = many_shards(target, tmp_path, out)
    process = start(command, out)
    sealed = read_manifest(out).num_documents
    process.send_signal(signal.SIGSTOP)  # so that both come before it acts on either
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (130, 143)
    assert read_manifest(out).num_documents >= sealed
    assert run(*command).code == 0


class TestRecords:
    def test_the_log_tells_of_every_run(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        out, summary = tmp_path / "cache", tmp_path / "summary.json"
        assert extract(target, corpus, out, "--summary", summary).code == 0
        before = files_of(out)
        fails_cleanly(extract(target, corpus, out, "--codec", "fast", "--summary", summary))
        assert json.loads(summary.read_text())["exit"] == "failed"
        assert extract(target, corpus, out).code == 0
        complete, failed, nothing = log_of(out)
        assert [complete["exit"], failed["exit"], nothing["exit"]] == ["complete", "failed", "nothing_to_do"]
        assert complete["settings"]["model"] == str(target) and complete["settings"]["corpus"]["max_length"] == 4096
        assert complete["corpus"]["documents_kept"] == 30
        assert complete["sealed"]["documents"] == 30 and complete["sealed"]["complete"]
        assert complete["sealed"]["tokens"] == complete["corpus"]["tokens"] == complete["tokens_computed"]
        assert complete["self_check_agreement"] > 0.99
        assert failed["error"].startswith("IdentityMismatchError: ") and "codec" in failed["error"]
        assert nothing["tokens_computed"] == 0 and "nothing to do" in nothing["notices"][-1]
        assert files_of(out) == before
        assert run("inspect", "cache", out, "--verify").code == 0

    def test_a_failed_first_run_leaves_a_folder_that_may_become_a_cache(
        self, target: Path, corpus: Path, tmp_path: Path
    ) -> None:
        out, empty = tmp_path / "cache", tmp_path / "empty.jsonl"
        empty.write_text("")
        fails_cleanly(extract(target, empty, out))
        assert log_of(out)[0]["sealed"] is None
        assert extract(target, corpus, out).code == 0
        assert len(log_of(out)) == 2
        assert extract(target, corpus, out, "--overwrite").code == 0
        assert len(log_of(out)) == 1

    def test_a_foreign_folder_gets_no_log(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        fails_cleanly(extract(target, corpus, tmp_path))
        assert not (tmp_path / "extract_log.jsonl").exists()

    @pytest.mark.parametrize("name", ["no/such/summary.json", "."])
    def test_a_summary_that_cannot_be_written_is_refused_first(
        self, target: Path, corpus: Path, tmp_path: Path, name: str
    ) -> None:
        fails_cleanly(extract(target, corpus, tmp_path / "cache", "--summary", tmp_path / name), "--summary")
        assert not (tmp_path / "cache").exists()


def test_documents_left_out_are_said_and_end_with_exit_code_3(target: Path, corpus: Path, tmp_path: Path) -> None:
    spoilt = shutil.copytree(target, tmp_path / "spoilt")
    token = AutoTokenizer.from_pretrained(spoilt).encode("@", add_special_tokens=False)[0]
    tensors = load_file(spoilt / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = 3.4e38  # a float32, infinite as bfloat16
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    data, out = tmp_path / "data.jsonl", tmp_path / "cache"
    data.write_text(corpus.read_text() + '{"text": "one @ too many"}\n')
    fails_cleanly(extract(spoilt, data, out), "document 30", "--on-bad skip")
    for _ in range(2):
        outcome = extract(spoilt, data, out, "--on-bad", "skip")
        assert outcome.code == 3, outcome.stderr
        assert "1 left out, their states" in " ".join(outcome.stdout.split())
    assert [entry.doc_id for entry in read_manifest(out).quarantined] == [30]
    assert [entry["sealed"]["quarantined"] for entry in log_of(out)] == [0, 1, 1]
    assert "quarantined" in run("inspect", "cache", out).stdout


class TestSelection:
    def test_long_limit_and_sample_decide_what_is_in_the_cache(
        self, target: Path, corpus: Path, tmp_path: Path
    ) -> None:
        flags = ["--max-length", "40", "--long", "split", "--limit", "20", "--sample", "12", "--shuffle-seed", "5"]
        outcome = extract(target, corpus, tmp_path / "cache", *flags)
        assert outcome.code == 0, outcome.stderr
        words = " ".join(outcome.stdout.split())
        assert "12 kept of 12 read" in words and "parts of at most 40 tokens" in words
        cache = FeatureCache.open(tmp_path / "cache")
        spec = cache.manifest.identity.corpus
        ids = cache.index.doc_id
        assert (spec.long, spec.max_length, spec.truncated) == ("split", 40, 0)
        assert len(set(ids.tolist())) == 12 and ids.max() < 20
        assert spec.split == sum(1 for doc_id in set(ids.tolist()) if (ids == doc_id).sum() > 1) > 0
        assert spec.num_documents == len(ids) and cache.index.length.max() == 40
        assert run("inspect", "cache", tmp_path / "cache", "--verify").code == 0
        before = files_of(tmp_path / "cache")
        assert extract(target, corpus, tmp_path / "cache", *flags).code == 0
        fails_cleanly(extract(target, corpus, tmp_path / "cache", *flags[:-1], "6"), "corpus.digest", "--overwrite")
        fails_cleanly(extract(target, corpus, tmp_path / "cache", *flags[:2], *flags[4:]), "corpus.long", "split")
        assert files_of(tmp_path / "cache") == before

    def test_dropped_long_documents_are_counted(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        outcome = extract(target, corpus, tmp_path / "cache", "--max-length", "60", "--long", "drop")
        assert outcome.code == 0, outcome.stderr
        assert "too_long" in outcome.stdout
        assert read_manifest(tmp_path / "cache").identity.corpus.dropped["too_long"] > 0

    def test_a_seed_without_a_sample_is_refused(self, target: Path, corpus: Path, tmp_path: Path) -> None:
        fails_cleanly(extract(target, corpus, tmp_path / "cache", "--shuffle-seed", "5"), "sample")
        assert not (tmp_path / "cache").exists()
