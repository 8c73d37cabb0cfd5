"""What is written is what is read, by us and by independent readers of zarr v3."""

import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from support.random_caches import CacheShape, all_shards, attach_files, cache_identity, make_cache

from dflash_cache.errors import IdentityMismatchError, OutputExistsError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.invariants import bfloat16_to_float32, float32_to_bfloat16
from dflash_cache.format.layout import ARRAY_NAMES
from dflash_cache.format.manifest import read_manifest
from dflash_cache.format.verify import verify_cache
from dflash_cache.format.writer import CacheWriter, prepare_folder

# Several inner chunks of fc features (1 MiB holds 2048 tokens of 5 x 32) and a padded last one.
LONG = CacheShape(doc_lengths=(5000, 300, 4100, 2), documents_per_shard=3)
# Every kind of bfloat16 that a lossy step would change: NaN, infinities, zeros, subnormals, the largest.
SPECIAL_BITS = np.array([0x7FC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x46C7], np.uint16)


def as_bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


@pytest.mark.parametrize("codec", ["compact", "fast"])
@pytest.mark.parametrize("shape", [CacheShape(), LONG], ids=["small", "chunked"])
def test_every_document_reads_back_exactly(tmp_path: Path, shape: CacheShape, codec: str) -> None:
    shape = CacheShape(doc_lengths=shape.doc_lengths, documents_per_shard=shape.documents_per_shard, codec=codec)
    cache = FeatureCache.open(make_cache(tmp_path / "cache", shape))
    document = 0
    for data in all_shards(shape):
        start = 0
        for length in data.doc_lengths:
            stop = start + int(length)
            got = cache.read(document)
            for name in ("input_ids", "loss_mask", "positions", "fc_features", "last_hidden_states"):
                np.testing.assert_array_equal(getattr(got, name), getattr(data, name)[start:stop])
            part = cache.read(document, 1, int(length))
            np.testing.assert_array_equal(part.fc_features, data.fc_features[start + 1 : stop])
            start, document = stop, document + 1
    assert document == len(shape.doc_lengths)
    assert verify_cache(cache).problems == ()


@pytest.mark.parametrize("codec", ["compact", "fast"])
def test_zarr_python_and_tensorstore_read_the_same_numbers(tmp_path: Path, codec: str) -> None:
    shape = CacheShape(doc_lengths=LONG.doc_lengths, codec=codec)
    folder = make_cache(tmp_path / "cache", shape)
    data = all_shards(shape)[0]
    group = zarr.open_group(folder / "shard-00000.zarr", mode="r")
    assert set(group.array_keys()) == set(ARRAY_NAMES)
    for name in ARRAY_NAMES:
        np.testing.assert_array_equal(as_bits(group[name][:]), getattr(data, name))
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "shard-00000.zarr" / name)}}
        np.testing.assert_array_equal(as_bits(tensorstore.open(spec).result().read().result()), getattr(data, name))


def test_a_fresh_process_reads_bfloat16_bits_through_zarr_alone(tmp_path: Path) -> None:
    """B62: the group opens without importing this package, and the numbers are bfloat16, not raw bytes."""
    shape = CacheShape(doc_lengths=(40, 7))
    shards = all_shards(shape)
    shards[0].fc_features[3, 2, : len(SPECIAL_BITS)] = SPECIAL_BITS
    folder = make_cache(tmp_path / "cache", shape, shards=shards)
    program = (
        f"import zarr; a = zarr.open_group({str(folder / 'shard-00000.zarr')!r}, mode='r')['fc_features']; "
        f"print(a.dtype, a[3, 2, :{len(SPECIAL_BITS)}].view('<u2').tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"bfloat16 {SPECIAL_BITS.tolist()}"


def test_stored_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    shape = LONG
    folders = []
    for threads in (1, 4):
        folder = tmp_path / f"threads{threads}"
        prepare_folder(folder, overwrite=False)
        with CacheWriter(folder, cache_identity(shape), encoder_threads=threads) as writer:
            writer.seal(writer.stage(0, 0, all_shards(shape)[0]))
        folders.append(folder)
    one, four = folders
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(four) for path in four.rglob("*") if path.is_file())
    for name in names:
        assert (one / name).read_bytes() == (four / name).read_bytes(), name


def test_compact_is_smaller_than_raw_and_fast_is_not_much_larger(tmp_path: Path) -> None:
    raw = LONG.num_tokens * (6 * 32 * 2)
    sizes = {}
    for codec in ("compact", "fast"):
        shape = CacheShape(doc_lengths=LONG.doc_lengths, documents_per_shard=4, codec=codec)
        manifest = read_manifest(make_cache(tmp_path / codec, shape))
        arrays = manifest.shards[0].arrays
        sizes[codec] = arrays["fc_features"].bytes + arrays["last_hidden_states"].bytes
    assert sizes["compact"] < 0.8 * raw
    assert raw < sizes["fast"] < 1.3 * raw  # whole chunks: the last one is padded


def test_reading_from_many_threads_gives_the_same_as_one(tmp_path: Path) -> None:
    shape = CacheShape(doc_lengths=tuple(range(5, 45)), documents_per_shard=1)  # 40 shards: more than stay open
    cache = FeatureCache.open(make_cache(tmp_path / "cache", shape))
    expected = [cache.read(document).fc_features for document in range(40)]
    wrong: list[int] = []

    def read_all(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(40).tolist()
        wrong.extend(d for d in order if not np.array_equal(cache.read(d).fc_features, expected[d]))

    threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_rounding_to_bfloat16_matches_ml_dtypes() -> None:
    generator = np.random.default_rng(1)
    values = generator.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ours = float32_to_bfloat16(values)
    with np.errstate(invalid="ignore"):
        reference = values.astype(ml_dtypes.bfloat16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(ours[finite], reference.view(np.uint16)[finite])
    assert np.isnan(bfloat16_to_float32(ours[~finite])).all()


class TestContinuing:
    def test_a_second_writer_continues_after_the_sealed_shards(self, tmp_path: Path) -> None:
        shape = CacheShape()
        whole = make_cache(tmp_path / "whole", shape)
        folder = tmp_path / "cache"
        first, second = all_shards(shape)
        prepare_folder(folder, overwrite=False)
        with CacheWriter(folder, cache_identity(shape)) as writer:
            attach_files(writer, shape)
            writer.seal(writer.stage(0, 0, first))
            writer.stage(1, 3, second)  # staged, never sealed: as if killed here
        assert prepare_folder(folder, overwrite=False)
        with CacheWriter(folder, cache_identity(shape)) as writer:
            assert len(writer.manifest.shards) == 1
            writer.seal(writer.stage(1, 3, second))
            writer.finish()
        for path in (p for p in whole.rglob("*") if p.is_file() and p.name != ".lock"):
            assert (folder / path.relative_to(whole)).read_bytes() == path.read_bytes(), path.name

    def test_a_shard_left_by_a_kill_before_the_manifest_is_replaced(self, tmp_path: Path) -> None:
        shape = CacheShape()
        folder = tmp_path / "cache"
        first, _ = all_shards(shape)
        prepare_folder(folder, overwrite=False)
        with CacheWriter(folder, cache_identity(shape)) as writer:
            writer.stage(0, 0, first).folder.rename(folder / "shard-00000.zarr")
            (folder / "shard-00000.zarr" / "zarr.json").write_text("cut sho")
            writer.seal(writer.stage(0, 0, first))
        assert FeatureCache.open(folder).read(0).input_ids.tolist() == first.input_ids[:40].tolist()

    def test_every_changed_setting_is_named(self, tmp_path: Path) -> None:
        """B54: old and new of each difference, all at once."""
        folder = make_cache(tmp_path / "cache")
        other = CacheShape(fc_layers=(0, 2, 4, 5, 6), codec="fast", seed=5)
        with pytest.raises(IdentityMismatchError) as caught:
            CacheWriter(folder, cache_identity(other))
        message = str(caught.value)
        assert "settings.codec: 'compact' -> 'fast'" in message
        assert "corpus.digest" in message
        assert "features.fc_layers" in message

    def test_two_writers_exclude_each_other(self, tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        prepare_folder(folder, overwrite=False)
        identity = cache_identity(CacheShape())
        with CacheWriter(folder, identity), pytest.raises(OutputExistsError, match="another process"):
            CacheWriter(folder, identity)


class TestOutputFolder:
    def test_a_folder_that_holds_something_else_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        for overwrite in (False, True):
            with pytest.raises(OutputExistsError, match=r"thesis\.tex"):
                prepare_folder(tmp_path, overwrite=overwrite)
        assert (tmp_path / "thesis.tex").read_text() == "years of work"

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("")
        with pytest.raises(OutputExistsError, match="is a file"):
            prepare_folder(tmp_path / "cache", overwrite=False)

    def test_overwrite_deletes_the_cache_and_nothing_else(self, tmp_path: Path) -> None:
        folder = make_cache(tmp_path / "cache")
        (folder / "notes.txt").write_text("mine")
        assert not prepare_folder(folder, overwrite=True)
        assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == ["notes.txt"]
