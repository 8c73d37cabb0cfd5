"""Checkpoints in z-lab's format: written whole, read exactly, refused by name."""

import json
from pathlib import Path

import pytest
import torch
from export_cases import drafter_config, full_attention_config, model_card, random_drafter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import CheckpointError, ConfigError, NonFiniteError, OutputExistsError
from dflash_cache.export.zlab import read_zlab_checkpoint, write_zlab_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config = drafter_config()
    write_zlab_checkpoint(tmp_path / "final", random_drafter(config), config, model_card())
    return tmp_path / "final"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_export_load_export_is_byte_identical(tmp_path: Path, dtype: torch.dtype) -> None:
    config = drafter_config(sliding_window_rule="anchor")
    write_zlab_checkpoint(tmp_path / "a" / "final", random_drafter(config), config, model_card(), dtype)
    read_config, drafter = read_zlab_checkpoint(tmp_path / "a" / "final")
    assert read_config == config
    write_zlab_checkpoint(tmp_path / "b" / "final", drafter, read_config, model_card(), dtype)
    assert contents(tmp_path / "a" / "final") == contents(tmp_path / "b" / "final")
    assert set(contents(tmp_path / "a" / "final")) == {"config.json", "model.safetensors", "README.md"}


def test_reloaded_drafter_drafts_the_same(tmp_path: Path) -> None:
    # B77.
    config = drafter_config()
    drafter = random_drafter(config)
    write_zlab_checkpoint(tmp_path / "final", drafter, config, model_card(), torch.float32)
    _, again = read_zlab_checkpoint(tmp_path / "final")
    features, block = torch.randn(40, 5, 32), torch.randn(16, 32)
    with torch.no_grad():
        expected = drafter.draft_block(drafter.encode_context(features), block)
        assert torch.equal(again.draft_block(again.encode_context(features), block), expected)


def test_published_form_gives_the_reference_output(tmp_path: Path) -> None:
    # z-lab's own config and weights, as its code writes them: block size at the top level, new rotary schema.
    described = json.loads((GOLDEN / "zlab_full.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "zlab_full.weights.safetensors").read_bytes())
    config, drafter = read_zlab_checkpoint(tmp_path)
    case = load_file(GOLDEN / "zlab_full.case.safetensors")
    for label, candidate in (("as published", drafter), ("exported again", _exported_again(tmp_path, config, drafter))):
        with torch.no_grad():
            drafted = candidate.draft_block(candidate.encode_context(case["fc_features"]), case["block_embeddings"])
        error = float((drafted - case["out.draft_hidden"]).abs().max())
        assert error < 1e-4, label


def _exported_again(tmp_path: Path, config: object, drafter: Drafter) -> Drafter:
    write_zlab_checkpoint(tmp_path / "again", drafter, drafter.config, model_card(), torch.float32)
    assert (
        load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(tmp_path / "model.safetensors").keys()
    )
    read_config, again = read_zlab_checkpoint(tmp_path / "again")
    assert read_config == config
    return again


def test_five_layers_are_58_tensors_without_the_targets(tmp_path: Path) -> None:
    config = drafter_config(num_hidden_layers=5, layer_types=("sliding_attention",) * 4 + ("full_attention",))
    write_zlab_checkpoint(tmp_path / "final", random_drafter(config), config, model_card())
    with safe_open(tmp_path / "final" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert file.get_slice("fc.weight").get_shape() == [32, 5 * 32]
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    layer = {name.removeprefix("layers.4.") for name in names if name.startswith("layers.4.")}
    assert layer == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }


def test_files_are_readable_by_whoever_may_read_the_folder(exported: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in exported.iterdir()} == {exported.stat().st_mode & 0o666}


def test_dtype_on_reading(exported: Path) -> None:
    assert {weight.dtype for weight in read_zlab_checkpoint(exported)[1].parameters()} == {torch.bfloat16}
    _, wide = read_zlab_checkpoint(exported, torch.float32)
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}
    assert all(weight.requires_grad for weight in wide.parameters())


def test_half_precision_is_refused(tmp_path: Path) -> None:
    # B70.
    config = drafter_config()
    with pytest.raises(ConfigError, match="bfloat16 or float32, got float16"):
        write_zlab_checkpoint(tmp_path / "final", random_drafter(config), config, model_card(), torch.float16)
    assert not list(tmp_path.iterdir())


def test_uninitialised_or_diverged_weights_are_refused(tmp_path: Path, exported: Path) -> None:
    # B67: a new drafter holds NaN until it is loaded or initialised.
    config = drafter_config()
    with pytest.raises(NonFiniteError, match=r"fc\.weight"):
        write_zlab_checkpoint(tmp_path / "other", Drafter(config), config, model_card())
    assert not (tmp_path / "other").exists()
    tensors = load_file(exported / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        read_zlab_checkpoint(exported)


def test_another_configuration_than_the_drafters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the one"):
        write_zlab_checkpoint(tmp_path / "x", random_drafter(drafter_config()), full_attention_config(), model_card())


def test_missing_unexpected_and_misshapen_tensors_are_named(exported: Path) -> None:
    # B11, B52.
    tensors = load_file(exported / "model.safetensors")
    norm = tensors.pop("hidden_norm.weight")
    tensors["embed_tokens.weight"] = torch.zeros(97, 32)
    tensors["norm.weight"] = torch.zeros(31)
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_zlab_checkpoint(exported)
    for part in ("missing are hidden_norm.weight", "unexpected are embed_tokens.weight", "norm.weight has shape [31]"):
        assert part in str(caught.value)
    del tensors["embed_tokens.weight"]
    tensors |= {"hidden_norm.weight": norm.half(), "norm.weight": norm}
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hidden_norm\.weight is float16"):
        read_zlab_checkpoint(exported)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_and_truncated_files_are_named(exported: Path, name: str) -> None:
    whole = (exported / name).read_bytes()
    (exported / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name):
        read_zlab_checkpoint(exported)
    (exported / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_zlab_checkpoint(exported)


def test_earlier_export_is_replaced_only_when_asked(exported: Path) -> None:
    config = full_attention_config()
    before = contents(exported)
    with pytest.raises(OutputExistsError, match="not empty"):
        write_zlab_checkpoint(exported, random_drafter(config), config, model_card())
    assert contents(exported) == before
    write_zlab_checkpoint(exported, random_drafter(config), config, model_card(), replace=True)
    assert read_zlab_checkpoint(exported)[0] == config
    assert [path.name for path in exported.parent.iterdir()] == ["final"]


def test_folders_that_are_no_checkpoint_are_never_replaced(exported: Path) -> None:
    config = drafter_config()
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        write_zlab_checkpoint(exported, random_drafter(config), config, model_card(), replace=True)
    (exported / "notes.txt").unlink()
    (exported / "config.json").write_text("{}")
    with pytest.raises(OutputExistsError):
        write_zlab_checkpoint(exported, random_drafter(config), config, model_card(), replace=True)
