"""Hostile caches: cut, flipped, deleted, swapped, edited. Each is found; none reads as data; nothing is repaired."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.random_caches import CacheShape, all_shards, make_cache

from dflash_cache.errors import CacheDamagedError, CacheFormatError, DflashCacheError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.layout import ARRAY_NAMES
from dflash_cache.format.manifest import CacheManifest, read_manifest, write_manifest
from dflash_cache.format.verify import verify_cache

SHAPE = CacheShape()
SHARD = "shard-00001.zarr"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", SHAPE)


def data_file(cache: Path, array: str, shard: str = SHARD) -> Path:
    return next((cache / shard / array).glob("c.*"))


def read_everything(cache: Path) -> None:
    opened = FeatureCache.open(cache)
    for document in range(len(opened.index.length)):
        opened.read(document)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("array", ARRAY_NAMES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_flipped_bit_is_found_by_reading_and_by_verify(cache: Path, array: str, where: float) -> None:
    path = data_file(cache, array)
    flip(path, int(where * (path.stat().st_size - 1)))
    with pytest.raises(CacheDamagedError, match=array):
        read_everything(cache)
    assert any(array in problem.message for problem in verify_cache(FeatureCache.open(cache)).problems)


@pytest.mark.parametrize("array", ARRAY_NAMES)
@pytest.mark.parametrize("damage", ["delete", "empty", "halve", "grow"])
def test_a_file_of_another_length_is_found_on_opening_the_shard(cache: Path, array: str, damage: str) -> None:
    """zarr itself reads a deleted or empty chunk as fill values, silently."""
    path = data_file(cache, array)
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "halve": content[: len(content) // 2], "grow": content + b"\0"}[damage])
    with pytest.raises(CacheDamagedError, match=array):
        FeatureCache.open(cache).shard(1)
    assert verify_cache(FeatureCache.open(cache)).problems


def test_a_deleted_shard_is_an_error_not_a_shorter_corpus(cache: Path) -> None:
    shutil.rmtree(cache / SHARD)
    with pytest.raises(CacheDamagedError, match=SHARD):
        read_everything(cache)


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    """Both shards are intact and of equal shape; only the digests tell."""
    cache = make_cache(
        tmp_path / "cache", CacheShape(doc_lengths=(30, 30, 30, 30), documents_per_shard=2, codec="fast")
    )
    (cache / "shard-00000.zarr").rename(cache / "aside")
    (cache / "shard-00001.zarr").rename(cache / "shard-00000.zarr")
    (cache / "aside").rename(cache / "shard-00001.zarr")
    assert len(verify_cache(FeatureCache.open(cache)).problems) >= 2 * 4


def test_a_shard_of_another_cache_is_found(cache: Path, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "other", CacheShape(seed=7))
    shutil.rmtree(cache / SHARD)
    shutil.copytree(other / SHARD, cache / SHARD)
    problems = verify_cache(FeatureCache.open(cache)).problems
    assert problems
    assert all(problem.shard == 1 for problem in problems)


def test_one_document_s_rows_missing(tmp_path: Path) -> None:
    """B16, B17, B19: fewer feature rows than tokens is found on opening, not in the middle of an epoch."""
    cache = make_cache(tmp_path / "cache", SHAPE)
    shape = CacheShape(doc_lengths=(*SHAPE.doc_lengths[:3], 24, *SHAPE.doc_lengths[4:]))
    short = make_cache(tmp_path / "short", shape)
    for array in ("fc_features", "last_hidden_states"):
        shutil.rmtree(cache / SHARD / array)
        shutil.copytree(short / SHARD / array, cache / SHARD / array)
    with pytest.raises(CacheDamagedError, match="fc_features"):
        FeatureCache.open(cache).shard(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", [98, 5, 16]),
        ("data_type", "float16"),
        ("fill_value", 0.0),
        ("attributes", {"note": "edited"}),
        ("codecs", []),
        ("consolidated_metadata", {}),
    ],
)
def test_edited_array_metadata_is_found(cache: Path, field: str, value: object) -> None:
    path = cache / SHARD / "fc_features" / "zarr.json"
    document = json.loads(path.read_text())
    document[field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CacheDamagedError, match=field):
        FeatureCache.open(cache).shard(1)


class TestZeros:
    """B12, B13: states that were never written, or are not numbers, pass no check."""

    @pytest.mark.parametrize(
        ("bits", "words"), [(0x0000, "all zero"), (0x8000, "all zero"), (0x7FC0, "NaN"), (0xFF80, "NaN")]
    )
    def test_verify_counts_rows_that_no_target_produces(self, tmp_path: Path, bits: int, words: str) -> None:
        shards = all_shards(SHAPE)
        shards[1].last_hidden_states[5:9] = bits
        cache = make_cache(tmp_path / "cache", SHAPE, shards=shards)
        messages = [problem.message for problem in verify_cache(FeatureCache.open(cache)).problems]
        assert len(messages) == 1
        assert "4 rows" in messages[0]
        assert words in messages[0]


class TestManifest:
    def edit(self, cache: Path, change: Callable[[dict], None]) -> None:
        path = cache / "manifest.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.update(complete=False),
            lambda m: m["shards"].pop(),
            lambda m: m["shards"][0].update(name="../../etc/shard-00000.zarr"),
            lambda m: m["identity"]["features"]["last_layer"].update(final_norm_applied=True),
            lambda m: m["identity"]["features"]["last_layer"].pop("final_norm_applied"),
            lambda m: m["identity"]["target"].update(vocab_size=10),
            lambda m: m.update(surprise=1),
            lambda m: m.pop("manifest_digest"),
        ],
    )
    def test_an_edit_by_hand_is_refused(self, cache: Path, change: Callable[[dict], None]) -> None:
        self.edit(cache, change)
        with pytest.raises(CacheDamagedError, match=r"manifest\.json.*edited"):
            FeatureCache.open(cache)

    @pytest.mark.parametrize(
        "name", ["../shard-00000.zarr", "/shard-00000.zarr", "shard-00000.zarr/..", "shard-00001.zarr"]
    )
    def test_a_path_escape_is_refused_even_with_a_right_digest(self, cache: Path, name: str) -> None:
        manifest = read_manifest(cache)
        entry = manifest.shards[0].model_copy(update={"name": name})
        write_manifest(cache, manifest.model_copy(update={"shards": (entry, *manifest.shards[1:])}))
        with pytest.raises(CacheDamagedError, match="name"):
            FeatureCache.open(cache)

    def test_a_missing_convention_is_an_error_not_a_default(self, cache: Path) -> None:
        """B03, B07: where a manifest with a right digest lacks the convention, nothing is guessed."""
        document = read_manifest(cache).model_dump(mode="json")
        del document["identity"]["features"]["last_layer"]["final_norm_applied"]
        with pytest.raises(ValueError, match="final_norm_applied"):
            CacheManifest.model_validate(document)

    @pytest.mark.parametrize("version", [0, 2, "1", None, True])
    def test_another_format_version(self, cache: Path, version: object) -> None:
        self.edit(cache, lambda m: m.update(format_version=version))
        with pytest.raises(CacheFormatError, match="format_version"):
            FeatureCache.open(cache)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', "\x00\x01"])
    def test_something_that_is_no_manifest(self, cache: Path, text: str) -> None:
        (cache / "manifest.json").write_text(text)
        with pytest.raises((CacheFormatError, CacheDamagedError), match=r"manifest\.json"):
            FeatureCache.open(cache)

    def test_a_cut_manifest(self, cache: Path) -> None:
        path = cache / "manifest.json"
        text = path.read_text()
        for share in (0.1, 0.5, 0.99):
            path.write_text(text[: int(share * len(text))])
            with pytest.raises(CacheDamagedError):
                FeatureCache.open(cache)

    def test_a_folder_without_a_manifest(self, tmp_path: Path) -> None:
        with pytest.raises(CacheFormatError, match="not a cache"):
            FeatureCache.open(tmp_path)

    def test_a_cache_without_a_shard(self, cache: Path) -> None:
        manifest = read_manifest(cache)
        write_manifest(cache, manifest.model_copy(update={"shards": (), "complete": False}))
        with pytest.raises(CacheFormatError, match="no sealed shard"):
            FeatureCache.open(cache)


def test_an_altered_attached_file_is_found(cache: Path) -> None:
    flip(cache / "target_head.safetensors", -5)
    with pytest.raises(CacheDamagedError, match="target_head"):
        FeatureCache.open(cache).attached("target_head.safetensors")
    assert any("target_head" in problem.message for problem in verify_cache(FeatureCache.open(cache)).problems)


def test_random_damage_is_always_found(tmp_path: Path) -> None:
    """Flip, cut or delete at random places of a pristine cache, one at a time; verify finds each."""
    pristine = make_cache(tmp_path / "pristine", SHAPE)
    randomness = random.Random(11)
    files = [path.relative_to(pristine) for path in pristine.rglob("*") if path.is_file() and path.name != ".lock"]
    for _ in range(120):
        name = randomness.choice(files)
        path = pristine / name
        content = path.read_bytes()
        kind = randomness.choice(["flip", "cut", "delete"])
        if kind == "flip":
            flip(path, randomness.randrange(len(content)), randomness.randrange(8))
        elif kind == "cut":
            path.write_bytes(content[: randomness.randrange(len(content))])
        else:
            path.unlink()
        try:
            found = bool(verify_cache(FeatureCache.open(pristine)).problems)
        except DflashCacheError:
            found = True
        harmless = name.name.endswith(".json") and _same_json(path, content)
        path.write_bytes(content)
        assert found or harmless, f"{kind} of {name}"
    assert not verify_cache(FeatureCache.open(pristine)).problems


def _same_json(path: Path, original: bytes) -> bool:
    """Whether a damaged JSON file still says the same (a flipped blank, a lost newline at its end)."""
    try:
        return json.loads(path.read_text()) == json.loads(original)
    except (OSError, ValueError):
        return False


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "[" * 100_000,
        lambda text: text.replace('"written_by": "', '"written_by": "\\ud800'),
        lambda text: text.replace('"complete": true', '"complete": ' + "9" * 5000),
    ],
    ids=["nested", "surrogate", "digits"],
)
def test_json_that_no_program_writes_is_damage(cache: Path, edit: Callable[[str], str]) -> None:
    path = cache / "manifest.json"
    path.write_text(edit(path.read_text()))
    with pytest.raises((CacheDamagedError, CacheFormatError), match="manifest"):
        FeatureCache.open(cache)


def test_nested_zarr_metadata_is_damage(cache: Path) -> None:
    (cache / SHARD / "zarr.json").write_text("[" * 100_000)
    with pytest.raises(CacheDamagedError, match="zarr metadata"):
        FeatureCache.open(cache).shard(1)
