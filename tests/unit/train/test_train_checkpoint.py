"""Checkpoints are whole or absent, few, and belong to one run."""

import json
import shutil

import pytest
import torch
from support.caches import make_documents, make_identity
from support.training import packed_row, tiny_config, tiny_drafter_config, tiny_objective, tiny_state

from dflash_cache.errors import CheckpointError, IdentityMismatchError
from dflash_cache.train.checkpoint import checkpoint_folders, latest_checkpoint, load_checkpoint, save_checkpoint
from dflash_cache.train.contract import RunContract, cache_digest, refuse_changes
from dflash_cache.train.state import Figures
from dflash_cache.train.step import TrainStep


@pytest.fixture
def documents():
    return make_documents((30, 20))


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path, tmp_path)


@pytest.fixture
def contract(documents, config):
    return RunContract(
        cache=make_identity(documents),
        cache_documents=2,
        drafter=tiny_drafter_config(documents),
        total_steps=8,
        device_type="cpu",
        recipe=config.recipe,
        seed=0,
        row_tokens=64,
        rows_per_step=1,
        num_anchors=12,
        noise_half_width=0.05,
        loss=config.loss,
        optimizer=config.optimizer,
        eval_fraction=0.0,
    )


@pytest.fixture
def state(documents, config):
    state = tiny_state(documents, config)
    TrainStep(tiny_objective(documents, config), config, torch.device("cpu"))(state, [packed_row(documents)], 1e-3)
    state.progress = state.progress.model_copy(update={"step": 1, "epoch": 1})
    return state


def save_at(folder, state, contract, step, keep=2):
    state.progress = state.progress.model_copy(update={"step": step})
    return save_checkpoint(folder, state, contract, keep=keep)


def test_a_checkpoint_restores_everything(tmp_path, state, contract, documents, config):
    figures = Figures(step=1, loss=0.1, accuracy=1 / 3, streak=None, eal=2.5)
    state.progress = state.progress.with_evaluation(figures)
    folder = save_checkpoint(tmp_path / "checkpoints", state, contract, keep=2)
    other = tiny_state(documents, config)
    load_checkpoint(folder, other, contract)
    assert other.progress == state.progress and other.progress.best == figures
    for name, tensor in state.drafter.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(other.drafter.state_dict()[name], tensor)
    row = packed_row(documents)
    step = TrainStep(tiny_objective(documents, config), config, torch.device("cpu"))
    for one in (state, other):
        step(one, [row], 1e-3)
    for ours, theirs in zip(other.drafter.parameters(), state.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_the_newest_are_kept_in_the_order_of_steps(tmp_path, state, contract):
    folder = tmp_path / "checkpoints"
    for step in (2, 10, 999_999, 1_000_000):
        save_at(folder, state, contract, step)
    assert [path.name for path in checkpoint_folders(folder)] == ["step-999999", "step-1000000"]
    assert latest_checkpoint(folder).name == "step-1000000"


def test_what_a_killed_run_left_half_written_is_ignored_and_swept_away(tmp_path, state, contract):
    folder = tmp_path / "checkpoints"
    first = save_at(folder, state, contract, 5)
    for leftover in (".writing-step-000006", ".deleting-step-000004"):
        shutil.copytree(first, folder / leftover)
    (folder / ".writing-step-000006" / "checkpoint.json").unlink()
    assert latest_checkpoint(folder) == first
    save_at(folder, state, contract, 7)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000005", "step-000007"]


def test_a_failing_write_leaves_the_earlier_checkpoint_alone(tmp_path, state, contract):
    folder = tmp_path / "checkpoints"
    first = save_at(folder, state, contract, 5, keep=1)

    class Unwritable:
        progress = state.progress.model_copy(update={"step": 6})

        def save(self, writing):
            (writing / "drafter.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder, Unwritable(), contract, keep=1)
    assert [path.name for path in folder.iterdir()] == [first.name]


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "generators.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_checkpoint_is_refused_by_file(tmp_path, state, contract, name, damage):
    folder = save_at(tmp_path / "checkpoints", state, contract, 5)
    data = (folder / name).read_bytes()
    if damage == "delete":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flip" else data[:-7])
    with pytest.raises(
        CheckpointError, match=rf"{name} is missing or not the file that was saved.*Delete .*step-000005"
    ):
        load_checkpoint(folder, state, contract)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"format": "other"}'])
def test_an_unreadable_record_is_refused(tmp_path, state, contract, text):
    folder = save_at(tmp_path / "checkpoints", state, contract, 5)
    (folder / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        load_checkpoint(folder, state, contract)


def test_the_record_holds_the_resolved_recipe_and_no_pickle(tmp_path, state, contract):
    folder = save_at(tmp_path / "checkpoints", state, contract, 5)
    record = json.loads((folder / "checkpoint.json").read_text())
    assert record["contract"]["loss"]["gamma"] == 4.0 and record["contract"]["recipe"] == "speculators"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def changed(contract, path, value):
    """A copy of a contract with one field, named by its dotted path, replaced."""
    document = contract.model_dump()
    *parents, last = path.split(".")
    target = document
    for parent in parents:
        target = target[parent]
    target[last] = value
    return RunContract.model_validate(document)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("cache.corpus.digest", "1" * 32, "cache.corpus.digest: '00000000000000000000000000000000' -> '1111"),
        ("cache.target.revision", "abc", "cache.target.revision: None -> 'abc'"),
        ("cache.features.hidden_size", 32, "cache.features.hidden_size: 16 -> 32"),
        ("cache_documents", 3, "cache_documents: 2 -> 3"),
        ("recipe", "paper", "recipe: 'speculators' -> 'paper'"),
        ("loss.gamma", 7.0, "loss.gamma: 4.0 -> 7.0"),
        ("loss.terms", {"kl_div": 1.0}, "loss.terms.kl_div: None -> 1.0"),
        ("loss.denominator", "mask_weight", "loss.denominator: 'mask' -> 'mask_weight'"),
        ("optimizer.lr", 1e-4, "optimizer.lr: 0.005 -> 0.0001"),
        ("drafter.mask_token_id", 62, "drafter.mask_token_id: 63 -> 62"),
        ("drafter.target_layer_ids", (0, 2, 4), r"drafter.target_layer_ids: \[1, 3, 4\] -> \[0, 2, 4\]"),
        ("drafter.block_size", 8, "drafter.block_size: 4 -> 8"),
        ("seed", 1, "seed: 0 -> 1"),
        ("row_tokens", 65, "row_tokens: 64 -> 65"),
        ("rows_per_step", 2, "rows_per_step: 1 -> 2"),
        ("num_anchors", 13, "num_anchors: 12 -> 13"),
        ("noise_half_width", 0.0, "noise_half_width: 0.05 -> 0.0"),
        ("eval_fraction", 0.1, "eval_fraction: 0.0 -> 0.1"),
        ("total_steps", 9, "total_steps: 8 -> 9\n.*follows from epochs, max_steps"),
        ("device_type", "cuda", "device_type: 'cpu' -> 'cuda'"),
    ],
)
def test_a_changed_setting_is_refused_with_old_and_new(tmp_path, state, contract, field, value, shown):
    # B03, B54, B57
    folder = save_at(tmp_path / "checkpoints", state, contract, 5)
    before = [parameter.detach().clone() for parameter in state.drafter.parameters()]
    with pytest.raises(IdentityMismatchError, match=shown):
        load_checkpoint(folder, state, changed(contract, field, value))
    assert all(torch.equal(a, b) for a, b in zip(state.drafter.parameters(), before, strict=True))


def test_all_differences_are_listed_at_once(contract, tmp_path):
    with pytest.raises(IdentityMismatchError) as caught:
        refuse_changes(contract, changed(changed(contract, "seed", 5), "loss.gamma", None), tmp_path)
    assert "seed: 0 -> 5" in str(caught.value) and "loss.gamma: 4.0 -> None" in str(caught.value)
    refuse_changes(contract, contract, tmp_path)


def test_cache_digest_follows_the_identity(contract):
    other = changed(contract, "cache.target.weights_digest", "other")
    assert cache_digest(contract.cache) != cache_digest(other.cache)
    assert cache_digest(contract.cache) == cache_digest(RunContract.model_validate(contract.model_dump()).cache)


@pytest.mark.parametrize("field", ["step", "row", "epoch"])
def test_an_edited_record_is_refused(tmp_path, state, contract, documents, config, field):
    """It would begin at another batch, or under another learning rate, and nothing would say so."""
    folder = save_checkpoint(tmp_path / "checkpoints", state, contract, keep=2)
    record = json.loads((folder / "checkpoint.json").read_text())
    record["progress"][field] += 1
    (folder / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="edited or damaged"):
        load_checkpoint(folder, tiny_state(documents, config), contract)
