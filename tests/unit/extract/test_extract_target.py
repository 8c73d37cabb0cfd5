"""Targets as they are opened: sizes, number formats, fingerprints, and what is refused."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from support.extraction import small_config

from dflash_cache.device import choose_device
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.extract import digests
from dflash_cache.extract.digests import config_digest, weights_digest
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.mask_token import MaskTokenProposal
from dflash_cache.extract.target import TargetFiles, choose_compute_dtype, open_target
from dflash_cache.spec import FinalNormSpec

Opened = Callable[[str], tuple[TargetFiles, LoadedTarget]]


def _open(folder: Path | str, **changes: Any) -> TargetFiles:
    return open_target(small_config(Path(folder), (Path("unused"),), Path("unused"), **changes))


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_sizes_come_from_the_nested_text_config(opened: Opened) -> None:
    files, target = opened("hybrid")
    spec = files.spec(MaskTokenProposal(5, "test", 0), FinalNormSpec(kind="rms_one_plus", eps=1e-6), tied=False)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.intermediate_size) == (8, 40, 512, 64)
    assert (spec.model_type, spec.rope_theta, spec.max_position_embeddings) == ("qwen3_5_text", 10000.0, 1024)
    assert len(target.layers) == 8
    assert target.decoder is not target.model


def test_a_wrapper_checkpoint_loads_its_text_weights(opened: Opened, target_folder: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    stored = load_file(target_folder("hybrid") / "model.safetensors")
    name = next(key for key in stored if key.endswith("layers.5.mlp.down_proj.weight"))
    assert "language_model" in name  # the wrapper's prefix
    _, target = opened("hybrid")
    assert torch.equal(target.layers[5].mlp.down_proj.weight, stored[name])


def test_eos_ids_join_generation_config_and_tokenizer(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert _open(folder).eos_token_ids == (2, 7, 9)
    (folder / "generation_config.json").unlink()
    assert _open(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("asked", "device", "checkpoint", "expected"),
    [
        ("auto", "cpu", torch.bfloat16, torch.float32),
        ("auto", "cpu", torch.float16, torch.float32),
        ("auto", "cuda", torch.float16, torch.bfloat16),
        ("auto", "cuda", torch.bfloat16, torch.bfloat16),
        ("auto", "cuda", torch.float32, torch.float32),
        ("auto", "cuda", None, torch.bfloat16),
        ("bfloat16", "cpu", torch.float16, torch.bfloat16),
        ("float32", "cuda", torch.float16, torch.float32),
    ],
)
def test_a_target_never_runs_in_float16(
    asked: str, device: str, checkpoint: torch.dtype | None, expected: torch.dtype
) -> None:
    assert choose_compute_dtype(asked, torch.device(device), checkpoint) == expected


def test_a_float16_checkpoint_runs_in_float32_here(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("llama"), tmp_path / "half")
    files = _open(folder)
    load_target(files, "sdpa").model.half().save_pretrained(folder)  # type: ignore[operator]
    half = _open(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert {p.dtype for p in load_target(half, "sdpa").model.parameters()} == {torch.float32}


def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not there"):
        choose_device("cuda:99")
    with pytest.raises(ConfigError, match="not known"):
        choose_device("gpu")
    with pytest.raises(ConfigError, match="not supported"):
        choose_device("meta")


def test_a_revision_of_a_folder_is_refused(target_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="no revisions"):
        _open(target_folder("dense"), revision="main")


def test_an_unreachable_hub_gives_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match="hub cannot be reached") as caught:
        _open("nobody/no-such-model-anywhere")
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_refused(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "not_a_model"}))
    with pytest.raises(TargetError, match="config cannot be loaded"):
        _open(folder)


def test_shipped_code_needs_consent(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "shipped", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran without consent')\n")
    with pytest.raises(TargetError, match="--trust-remote-code"):
        _open(folder)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path, target_folder: Callable[[str], Path]) -> None:
    from transformers import T5Config

    folder = _copy(target_folder("dense"), tmp_path / "model")
    T5Config(vocab_size=512, d_model=16, num_layers=2, num_heads=2).save_pretrained(folder)
    with pytest.raises(TargetError, match="causal language model"):
        load_target(_open(folder), "sdpa")


def test_missing_tensors_are_never_made_up(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _copy(target_folder("dense"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lack tensors.*lm_head\.weight"):
        load_target(_open(folder), "sdpa")


@pytest.mark.parametrize("damage", ["cut", "empty", "wrong_shape"])
def test_damaged_weights_are_one_message(damage: str, target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    path = folder / "model.safetensors"
    if damage == "wrong_shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else 5000])
    with pytest.raises(TargetError, match=str(folder)):
        load_target(_open(folder), "sdpa")


def test_a_folder_without_weights_is_refused(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="has no weights"):
        _open(folder)


def test_one_changed_byte_changes_the_weights_digest(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    before = weights_digest(folder)
    assert weights_digest(_copy(folder, tmp_path / "again")) == before
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-777] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != before


@pytest.mark.parametrize("tensor", ["a", "b", "c"])
def test_large_files_are_sampled_in_every_tensor(tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(digests, "WHOLE_FILE_BYTES", 1000)
    tensors = {"a": torch.zeros(3), "b": torch.zeros(70_000), "c": torch.zeros(9_000)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    save_file({**tensors, tensor: tensors[tensor] + 1}, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != before


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WHOLE_FILE_BYTES", 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(TargetError, match="not a whole safetensors file"):
        weights_digest(tmp_path)


def test_the_config_digest_ignores_who_wrote_it_and_nothing_else() -> None:
    config = {"hidden_size": 4, "rope": {"theta": 1.0}}
    assert config_digest(config) == config_digest({**config, "transformers_version": "9", "_commit_hash": "x"})
    assert config_digest(config) != config_digest({**config, "rope": {"theta": 2.0}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_position_embeddings": "x"}, "max_position_embeddings"),
        ({"num_hidden_layers": 4}, "layer_types"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_a_config_that_was_edited_wrongly_is_one_clear_message(
    target_folder: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    _edit(folder / "config.json", **changes)
    with pytest.raises(TargetError, match=words) as caught:
        _open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["x", ["x"], [[1]], {"a": 1}, 1.5])
def test_an_eos_id_that_is_no_number_is_refused(
    target_folder: Callable[[str], Path], tmp_path: Path, eos: object
) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(TargetError, match="eos_token_id"):
        _open(folder)


def test_a_folder_without_its_tokenizer_is_refused(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers makes up an empty tokenizer then, and every document would be too short."""
    folder = _copy(target_folder("dense"), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TargetError, match="no vocabulary"):
        _open(folder)


def test_odd_but_usable_configs_open(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    _edit(folder / "config.json", architectures=5, max_position_embeddings=-1)
    spec = _open(folder).spec(MaskTokenProposal(5, "test", 0), FinalNormSpec(kind="rms", eps=1e-6), tied=False)
    assert (spec.architecture, spec.max_position_embeddings) == ("Qwen3Config", None)


def test_a_config_that_no_model_can_be_built_from_is_refused(
    target_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = _copy(target_folder("dense"), tmp_path / "model")
    _edit(folder / "config.json", head_dim=0)
    with pytest.raises(TargetError, match="weights cannot be loaded"):
        load_target(_open(folder), "sdpa")


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
