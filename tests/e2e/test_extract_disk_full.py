"""A disk that is, or becomes, too small stops the run and damages nothing (B60)."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from support.corpora import write_texts
from support.extraction import files_of, small_config
from support.targets import build_dense

from dflash_cache.errors import DiskSpaceError
from dflash_cache.extract.progress import ExtractEvent, Phase, ShardSealed
from dflash_cache.extract.runner import extract
from dflash_cache.format.cache import FeatureCache

transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_weights_are_loaded(small_disk: Path, tmp_path: Path) -> None:
    model, data = build_dense(tmp_path / "model"), write_texts(tmp_path / "data.jsonl", 300, shortest=60)
    events: list[ExtractEvent] = []
    with pytest.raises(DiskSpaceError, match=r"are needed.*are free"):
        extract(small_config(model, (data,), small_disk / "cache"), events.append)
    assert Phase("load_weights") not in events


def test_a_disk_that_fills_up_stops_cleanly_and_the_run_continues(small_disk: Path, tmp_path: Path) -> None:
    model, data = build_dense(tmp_path / "model"), write_texts(tmp_path / "data.jsonl", 60, shortest=40)
    whole = small_config(model, (data,), tmp_path / "whole", shard_tokens=1500, window_tokens=1500)
    extract(whole)
    filler = small_disk / "somebody else's file"

    def fill(event: ExtractEvent) -> None:
        if isinstance(event, ShardSealed) and not filler.exists():
            usage = os.statvfs(small_disk)
            filler.write_bytes(b"\0" * max(0, usage.f_bavail * usage.f_frsize - 100_000))

    config = small_config(model, (data,), small_disk / "cache", shard_tokens=1500, window_tokens=1500)
    with pytest.raises(DiskSpaceError, match="run the same command again"):
        extract(config, fill)
    partial = FeatureCache.open(config.out)
    for document in range(len(partial.index.length)):
        partial.read(document)
    assert not partial.manifest.complete
    filler.unlink()
    assert extract(config).manifest.complete
    assert files_of(config.out) == files_of(whole.out)
