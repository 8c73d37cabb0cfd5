"""The demo command, whole: on a tiny random target by default, on the real model with `pytest -m slow`."""

from pathlib import Path

import pytest
from support.program import run
from support.targets import build_llama

from dflash_cache.demo.model import demo_model_folder


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a tiny target where the demo keeps its model, so that nothing is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = demo_model_folder(tmp_path / "user" / "dflash-cache")
    folder.parent.mkdir(parents=True)
    build_llama(folder, num_layers=10)  # deep enough for five fc layers by the published rule


@pytest.mark.usefixtures("tiny_model")
def test_every_step_runs_and_the_output_equals_greedy_decoding(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    small = ["--out", out, "--tokens", 2000, "--steps", 4, "--prompts", 2, "--new-tokens", 12]
    outcome = run("demo", *small)
    assert outcome.code == 0, outcome.stderr
    assert "all 2 generations equal greedy decoding, token for token" in outcome.stdout
    assert "offline estimate" in outcome.stdout
    assert "now your own model" in outcome.stderr
    assert (out / "drafter" / "final" / "model.safetensors").is_file()
    again = run("demo", *small)
    assert again.code == 0, again.stderr
    assert "nothing to do" in again.stderr


@pytest.mark.slow
def test_the_real_model_ends_with_drafts_that_are_accepted(tmp_path: Path) -> None:
    """Minutes: fetches the model on first use."""
    outcome = run("demo", "--out", tmp_path / "demo")
    assert outcome.code == 0, outcome.stderr
    assert "equal greedy decoding, token for token" in outcome.stdout
    line = next(text for text in outcome.stdout.splitlines() if text.startswith("measured"))
    assert float(line.split()[-1]) > 1.1
