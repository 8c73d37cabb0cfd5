"""`inspect` on whole, unfinished and damaged caches."""

import json
import shutil
from pathlib import Path

import pytest
from support.program import fails_cleanly, run
from support.random_caches import CacheShape, all_shards, attach_files, cache_identity, make_cache

from dflash_cache.format.writer import CacheWriter, prepare_folder

SHAPE = CacheShape()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", SHAPE)


def test_cache_shows_identity_sizes_and_the_layer_convention_in_words(cache: Path) -> None:
    outcome = run("inspect", "cache", cache)
    assert outcome.code == 0
    assert "OUTPUT of that layer" in outcome.stdout
    for words in ("tiny-random", "1, 2, 4, 5, 6", "bfloat16", "blosc(zstd-1, shuffle)", "before the final norm"):
        assert words in " ".join(outcome.stdout.split()), words
    assert "235" in outcome.stdout  # tokens


def test_json_is_whole_and_says_the_same(cache: Path) -> None:
    document = json.loads(run("inspect", "cache", cache, "--json").stdout)
    facts = document["facts"]
    assert facts["manifest"]["identity"]["features"]["last_layer"]["final_norm_applied"] is False
    assert facts["lengths"]["tokens"] == SHAPE.num_tokens
    assert [layer["layer"] for layer in facts["layers"]] == [1, 2, 4, 5, 6, 7]
    assert all(0.9 < layer["rms"] < 1.1 and layer["zero_rows"] == 0 for layer in facts["layers"])


def test_shard_by_folder_and_by_number(cache: Path) -> None:
    by_folder = json.loads(run("inspect", "shard", cache / "shard-00001.zarr", "--json").stdout)
    by_number = json.loads(run("inspect", "shard", 1, "--cache", cache, "--json").stdout)
    assert by_folder == by_number
    assert by_folder["facts"]["doc_lengths"] == [25, 61, 12]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shard", "5", "--cache", "{cache}"], "0 to 1"),
        (["shard", "1"], "--cache"),
        (["shard", "9" * 5000, "--cache", "{cache}"], "0 to 1"),
        (["shard", "{cache}/shard-00009.zarr"], "0 to 1"),
        (["doc", "{cache}", "6"], "0 to 5"),
        (["doc", "{cache}", "99999999999999999999"], "0 to 5"),
        (["cache", "{cache}/nowhere"], "not a cache"),
        (["cache", "{cache}/manifest.json"], "not a cache"),
        (["cache", "{cache}", "--plot", "{cache}/no/such/folder.png"], "folder.png"),
        (["cache", "{cache}", "--plot", "{cache}/picture.xyz"], "xyz"),
        (["cache", "{cache}", "--plot", "{cache}"], "no suffix"),
    ],
)
def test_a_wrong_place_is_one_clear_message(cache: Path, arguments: list[str], words: str) -> None:
    fails_cleanly(run("inspect", *(argument.format(cache=cache) for argument in arguments)), words)


def test_doc_shows_the_text_with_its_supervised_part_marked(cache: Path) -> None:
    outcome = run("inspect", "doc", cache, 1)
    first, *rest = all_shards(SHAPE)[0].input_ids[40:47].tolist()
    assert outcome.code == 0
    assert f"w{first}\u300a" in outcome.stdout.replace("\n", "")
    assert f"w{rest[-1]}\u300b" in outcome.stdout.replace("\n", "")
    assert "7 tokens, 85.7% supervised" in outcome.stdout


def test_verify_of_an_intact_cache(cache: Path) -> None:
    outcome = run("inspect", "cache", cache, "--verify")
    assert outcome.code == 0
    assert "every checksum matches" in outcome.stderr


def test_verify_lists_every_problem_and_fails(cache: Path) -> None:
    path = cache / "shard-00001.zarr" / "fc_features" / "c.0.0.0"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    shutil.rmtree(cache / "shard-00000.zarr")
    outcome = run("inspect", "cache", cache, "--verify")
    assert outcome.code == 1
    assert "Traceback" not in outcome.stderr
    assert "shard-00000.zarr" in outcome.stderr
    assert "fc_features" in outcome.stderr


def test_an_unfinished_cache_can_be_inspected(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    prepare_folder(folder, overwrite=False)
    with CacheWriter(folder, cache_identity(SHAPE)) as writer:
        attach_files(writer, SHAPE)
        writer.seal(writer.stage(0, 0, all_shards(SHAPE)[0]))
    outcome = run("inspect", "cache", folder)
    assert outcome.code == 0
    assert "NOT complete" in outcome.stdout
    assert "3 of 6 documents" in outcome.stdout


@pytest.mark.parametrize("what", [["cache", "{cache}"], ["shard", "{cache}/shard-00000.zarr"]])
def test_plot_draws_a_picture(cache: Path, tmp_path: Path, what: list[str]) -> None:
    picture = tmp_path / "picture.png"
    assert run("inspect", *(w.format(cache=cache) for w in what), "--plot", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
