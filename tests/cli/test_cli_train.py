"""`train` as a user types it, on a cache that `extract` made."""

import json
import shutil
from pathlib import Path

import pytest
from support.program import fails_cleanly, run

SMALL = ["--block-size", 4, "--num-layers", 1, "--row-tokens", 256, "--num-anchors", 16, "--eval-fraction", 0.2]


def test_a_run_ends_with_a_drafter_and_its_card(extracted: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    outcome = run("train", "--shards", extracted, "--out", out, "--max-steps", 3, *SMALL)
    assert outcome.code == 0, outcome.stderr
    assert "held out" in outcome.stdout
    assert {path.name for path in (out / "final").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    config = json.loads((out / "final" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3, 4]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3]


def test_resume_needs_no_settings_typed_again(extracted: Path, tmp_path: Path) -> None:
    """An interrupted run that is resumed with --out alone equals an uninterrupted one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--shards", extracted, "--max-steps", 4, "--save-every", 2, "--lr", 1e-3, *SMALL]
    assert run("train", "--out", whole, *flags).code == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-000004")
    shutil.rmtree(parts / "final")
    outcome = run("train", "--out", parts, "--resume")
    assert outcome.code == 0, outcome.stderr
    weights = "final/model.safetensors"
    assert (parts / weights).read_bytes() == (whole / weights).read_bytes()


def test_resume_finds_the_run_that_the_config_file_names(extracted: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "drafter", tmp_path / "train.toml"
    config.write_text(f"out = '{out}'\n")
    assert run("train", "--shards", extracted, "--config", config, "--max-steps", 2, *SMALL).code == 0
    shutil.rmtree(out / "final")
    outcome = run("train", "--config", config, "--resume")
    assert outcome.code == 0, outcome.stderr
    assert (out / "final" / "model.safetensors").is_file()


def test_a_changed_setting_is_refused_on_resume(extracted: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    assert run("train", "--shards", extracted, "--out", out, "--max-steps", 2, *SMALL).code == 0
    for flags, field in ([["--lr", 1e-2], "lr"], [["--seed", 5], "seed"], [["--recipe", "paper"], "recipe"]):
        fails_cleanly(run("train", "--out", out, "--resume", *flags), field)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shards", "{out}/nowhere"], "not a cache"),
        ([], "--shards"),
        (["--shards", "{cache}", "--config", "{out}/none.toml"], "none.toml"),
        (["--shards", "{cache}", "--row-tokens", "-4"], "row_tokens"),
        (["--shards", "{cache}", "--mask-token-id", "99999"], "mask_token_id"),
        (["--shards", "{cache}", "--mask-token-id", "2"], "mask_token_id"),
        (["--shards", "{cache}", "--block-size", "1"], "block_size"),
        (["--shards", "{cache}", "--block-size", "99999999"], "block_size"),
        (["--shards", "{cache}", "--num-layers", "99999999"], "num_layers"),
        (["--shards", "{cache}", "--recipe", "paper", "--block-size", "9"], "gamma"),
        (["--out", "{out}/never", "--resume"], "no run to resume"),
        (["--shards", "{cache}", "--device", "cuda:77"], "cuda"),
    ],
)
def test_a_wrong_setting_is_one_clear_message(
    extracted: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    filled = [argument.format(cache=extracted, out=tmp_path) for argument in arguments]
    if "--out" not in filled:
        filled += ["--out", str(tmp_path / "drafter")]
    fails_cleanly(run("train", *filled), words)
    assert not (tmp_path / "drafter" / "run.json").exists()


def test_out_that_holds_something_else(extracted: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for more in ([], ["--overwrite"], ["--resume"]):
        fails_cleanly(run("train", "--shards", extracted, "--out", tmp_path, *SMALL, *more), "notes.txt")


@pytest.mark.parametrize("damage", ["flip", "delete", "manifest", "head"])
def test_a_damaged_cache_is_refused(extracted: Path, tmp_path: Path, damage: str) -> None:
    cache = shutil.copytree(extracted, tmp_path / "cache")
    states = next((cache / "shard-00000.zarr" / "last_hidden_states").glob("c.*"))
    if damage == "flip":
        content = bytearray(states.read_bytes())
        content[len(content) // 3] ^= 4
        states.write_bytes(content)
    elif damage == "delete":
        states.unlink()
    elif damage == "manifest":
        path = cache / "manifest.json"
        path.write_text(path.read_text().replace("tiny-qwen3", "tiny-qwen4"))
    else:
        (cache / "target_head.safetensors").write_bytes(b"nothing")
    outcome = run("train", "--shards", cache, "--out", tmp_path / "drafter", "--max-steps", 5, *SMALL)
    fails_cleanly(outcome, {"manifest": "manifest.json", "head": "target_head"}.get(damage, "last_hidden_states"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drafter = 5", "drafter"),
        ("[[drafter]]\nblock_size = 4", "drafter"),
        ("recipe = 'paper'\nloss = 3", "loss"),
        ("recipe = []", "recipe"),
        ("recipe = 'paper'\n[drafter]\nblock_size = [1]", "block_size"),
        ("[drafter]\nrope_theta = inf", "rope_theta"),
        ("[optimizer]\neps = inf", "eps"),
        ("noise_half_width = inf", "noise_half_width"),
        ("[loss.terms]\nce = inf", "ce"),
    ],
)
def test_a_config_file_of_wrong_types_is_one_clear_message(
    extracted: Path, tmp_path: Path, text: str, words: str
) -> None:
    config, out = tmp_path / "train.toml", tmp_path / "drafter"
    config.write_text(text)
    flags = [] if "block_size" in text else ["--block-size", 16]  # must not cover up what the file says
    fails_cleanly(run("train", "--shards", extracted, "--out", out, "--config", config, *flags), words)
    assert not out.exists()


@pytest.mark.parametrize("text", ["epochs = true", 'epochs = "6"', "[optimizer]\nlr = '3e-4'", "epochs = 1e3"])
def test_a_number_of_another_kind_is_refused(extracted: Path, tmp_path: Path, text: str) -> None:
    config = tmp_path / "train.toml"
    config.write_text(text)
    outcome = run("train", "--shards", extracted, "--out", tmp_path / "drafter", "--config", config)
    fails_cleanly(outcome, "lr" if "lr" in text else "epochs")


def test_more_anchors_than_the_memory_holds(extracted: Path, tmp_path: Path) -> None:
    flags = ["--num-anchors", 10**9, "--block-size", 16, "--max-steps", 1]
    fails_cleanly(run("train", "--shards", extracted, "--out", tmp_path / "drafter", *flags), "num_anchors")
