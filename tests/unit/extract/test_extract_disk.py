"""The size is estimated before anything expensive begins (B60)."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError
from support.corpora import write_texts
from support.extraction import small_config

from dflash_cache.errors import DiskSpaceError
from dflash_cache.extract.disk import SizeEstimate, check_disk_space, estimate_size, format_bytes
from dflash_cache.extract.runner import extract
from dflash_cache.spec import FeatureSpec
from dflash_cache.target_head import TargetHead

FEATURES = FeatureSpec.for_layers((1, 16, 31, 46, 61), num_layers=64, hidden_size=5120)


def test_a_million_tokens_of_qwen36_27b_are_61_gb() -> None:
    estimate = estimate_size(1_000_000, FEATURES, "fast", vocab_size=0, bytes_per_weight=2)
    assert estimate.raw_bytes == 61_440_000_000
    assert estimate.raw_bytes < estimate.expected_bytes < 1.02 * estimate.raw_bytes
    compact = estimate_size(1_000_000, FEATURES, "compact", vocab_size=0, bytes_per_weight=2)
    assert 0.72 * compact.raw_bytes < compact.expected_bytes < compact.raw_bytes


def test_the_head_is_counted_until_it_is_there() -> None:
    with_head = estimate_size(0, FEATURES, "fast", vocab_size=248320, bytes_per_weight=2)
    assert with_head.expected_bytes == 2 * 248320 * 5120 * 2


def test_too_little_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    too_much = SizeEstimate(free * 3, free * 2)
    with pytest.raises(DiskSpaceError, match=r"are needed.*are free"):
        check_disk_space(tmp_path, too_much)
    check_disk_space(tmp_path, too_much, freed_bytes=free * 2)
    check_disk_space(tmp_path, SizeEstimate(10, 10))


def test_bytes_in_words() -> None:
    assert [format_bytes(n) for n in (12, 61_440, 61_440_000_000, 38 * 10**12)] == [
        "12 bytes",
        "61.4 kB",
        "61.4 GB",
        "38.00 TB",
    ]


@pytest.mark.parametrize("words", ["os error 28", "Os { code: 28, kind: StorageFull }"])
def test_a_disk_that_fills_under_the_target_head_is_explained(
    target_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """safetensors hides the system's error in its text, and words it differently from version to version."""

    def full(head: TargetHead, path: Path) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {words}")

    monkeypatch.setattr(TargetHead, "save", full)
    data = write_texts(tmp_path / "texts.jsonl", 3)
    with pytest.raises(DiskSpaceError, match="the disk is full"):
        extract(small_config(target_folder("dense"), (data,), tmp_path / "cache"))
