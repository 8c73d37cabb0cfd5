"""Whole runs on tiny caches: what they leave, what they learn, what they refuse."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.caches import MASK_TOKEN_ID, make_cache, make_documents, make_head
from support.training import TINY_DRAFTER, read_metrics, tiny_config

from dflash_cache.config import LossConfig, OptimizerConfig
from dflash_cache.device import choose_device
from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import CacheDamagedError, CacheFormatError, ConfigError, NonFiniteError
from dflash_cache.export.zlab import read_zlab_checkpoint
from dflash_cache.format.cache import FeatureCache
from dflash_cache.spec import LayerSpec
from dflash_cache.stream.loader import RowReader
from dflash_cache.stream.packing import pack_documents
from dflash_cache.train.checkpoint import CheckpointRecord
from dflash_cache.train.contract import RunRecord
from dflash_cache.train.evaluation import Evaluator
from dflash_cache.train.events import EvaluationDone, RunStarted, StepDone, Warned
from dflash_cache.train.loop import implausible_accuracy, train
from dflash_cache.train.setup import prepare_run

LENGTHS = (40, 12, 25, 33, 50, 8, 100)


def collect(config):
    events = []
    return train(config, events.append), events


def test_what_a_run_leaves_behind(tmp_path):
    contents = make_cache(tmp_path / "cache", lengths=LENGTHS)
    config = tiny_config(contents.folder, tmp_path / "run", eval_fraction=0.2, save_every=3, eval_every=2)
    report, events = collect(config)
    assert sorted(path.name for path in config.out.iterdir()) == [
        ".lock",
        "checkpoints",
        "final",
        "metrics.jsonl",
        "run.json",
        "tensorboard",
    ]
    assert list((config.out / "tensorboard").glob("events.out.tfevents.*"))
    run = RunRecord.model_validate_json((config.out / "run.json").read_text())
    assert run.config == config and run.contract.cache == contents.identity
    checkpoint = CheckpointRecord.model_validate_json((report.checkpoint / "checkpoint.json").read_text())
    assert checkpoint.progress.step == report.step == report.total_steps
    lines = read_metrics(config.out)
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, report.step + 1))
    evaluated = [line["step"] for line in lines if line["kind"] == "evaluation"]
    assert evaluated == [*range(2, report.step, 2), report.step]
    started = next(event for event in events if isinstance(event, RunStarted))
    assert (started.num_train_documents + started.num_held_out_documents, started.first_step) == (len(LENGTHS), 0)
    assert report.held_out.step == report.step and not report.interrupted


def test_every_step_reports_its_figures(tmp_path):
    config = tiny_config(make_cache(tmp_path / "cache", lengths=LENGTHS).folder, tmp_path / "run")
    _, events = collect(config)
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(lines) == len(steps)
    for line, event in zip(lines, steps, strict=True):
        for name in ("loss", "accuracy", "eal", "streak", "num_slots"):
            assert line[name] == getattr(event.metrics, name)
        for name in ("lr", "grad_norm", "coverage", "fill", "tokens_per_second", "data_wait_share"):
            assert line[name] == getattr(event, name)
        assert 0 < line["fill"] <= 1 and 0 < line["coverage"] <= 1 and 0 <= line["data_wait_share"] <= 1
    first_epoch = [event.num_tokens for event in steps if event.epoch == 0]
    assert sum(first_epoch) == sum(LENGTHS)


def test_the_final_drafter_is_the_trained_one_and_has_a_card(tmp_path):
    config = tiny_config(make_cache(tmp_path / "cache", lengths=LENGTHS).folder, tmp_path / "run")
    report, _ = collect(config)
    drafter_config, drafter = read_zlab_checkpoint(report.final)
    assert drafter_config == prepare_run(config).contract.drafter
    trained = load_file(report.checkpoint / "drafter.safetensors")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, trained[name].to(torch.bfloat16).to(tensor.dtype)), name
    assert "tiny/target" in (report.final / "README.md").read_text()


@pytest.mark.parametrize("label", ["target_argmax", "data_token"])
def test_one_document_is_memorised(tmp_path, label):
    # B31: labels, context and slots line up, or this cannot be learnt.
    documents = make_documents((48,), seed=3)
    contents = make_cache(tmp_path / "cache", documents)
    config = tiny_config(
        contents.folder,
        tmp_path / "run",
        epochs=80,
        num_anchors=48,
        noise_half_width=0.0,
        loss=LossConfig(label=label, gamma=None),
        optimizer=OptimizerConfig(lr=2e-2, weight_decay=0.0),
        drafter=TINY_DRAFTER.model_copy(update={"intermediate_size": 64, "head_dim": 16}),
    )
    report, events = collect(config)
    assert report.training.accuracy > 0.95
    assert report.training.eal > 3.7  # of at most 4: three drafted slots and the bonus token
    losses = [event.metrics.loss for event in events if isinstance(event, StepDone)]
    assert losses[-1] < losses[0] / 10


def predictable_documents(count, seed=0):
    """Documents whose features alone tell what the target says next: one token all along, unlike the random text."""
    rng = np.random.default_rng(seed)
    documents = make_documents((24,) * count, seed=seed)
    codes = np.random.default_rng(99).normal(size=(MASK_TOKEN_ID, 3, 16)).astype(np.float32)
    head = make_head()
    for document in documents:
        token = int(rng.integers(0, 12))
        document.input_ids[:] = rng.integers(20, 60, 24)
        document.fc_features[:] = codes[token] + 0.05 * document.fc_features
        document.last_hidden_states[:] = (head.lm_head_weight[token] / head.norm_weight).numpy()
    return documents


def test_features_decide_what_is_drafted(tmp_path):
    # B47: with features shuffled between documents, held-out acceptance must fall.
    documents = predictable_documents(40)
    contents = make_cache(tmp_path / "cache", documents)
    config = tiny_config(
        contents.folder, tmp_path / "run", epochs=4, eval_fraction=0.2, optimizer=OptimizerConfig(lr=2e-2)
    )
    report, _ = collect(config)
    assert report.held_out.eal > 3.0
    shuffled = [
        type(document)(
            document.input_ids,
            document.loss_mask,
            documents[(number + 7) % len(documents)].fc_features,
            document.last_hidden_states,
        )
        for number, document in enumerate(documents)
    ]
    cache = FeatureCache.open(make_cache(tmp_path / "shuffled", shuffled).folder)
    setup = prepare_run(config)
    drafter = Drafter(setup.contract.drafter)
    drafter.load_state_dict(read_zlab_checkpoint(report.final)[1].state_dict())
    rows = pack_documents(setup.split.held_out, cache.index.length, row_tokens=64)
    control = Evaluator(setup.objective, RowReader(cache), rows, torch.device("cpu"), 16)(drafter.float())
    assert control.eal < 2.0


def test_implausible_accuracy_is_warned_of_once(tmp_path):
    # B47: every document is the same, so the first epoch already knows its own end.
    documents = predictable_documents(1) * 60
    contents = make_cache(tmp_path / "cache", documents)
    config = tiny_config(
        contents.folder, tmp_path / "run", epochs=1, row_tokens=48, optimizer=OptimizerConfig(lr=3e-2, warmup_ratio=0)
    )
    _, events = collect(config)
    warnings = [event.message for event in events if isinstance(event, Warned) and "implausible" in event.message]
    assert len(warnings) == 1 and "training accuracy is already" in warnings[0]


@pytest.mark.parametrize(
    ("step", "epoch", "accuracy", "expected"),
    [(3, 0, 0.95, True), (3, 0, 0.5, False), (51, 0, 0.95, False), (3, 1, 0.95, False), (3, 0, None, False)],
)
def test_when_accuracy_is_implausible(step, epoch, accuracy, expected):
    assert implausible_accuracy(step, epoch, accuracy) is expected


def test_a_head_that_predicts_nothing_is_warned_of(tmp_path):
    # B06: the random head of these caches knows nothing of the next token.
    config = tiny_config(make_cache(tmp_path / "cache", lengths=LENGTHS).folder, tmp_path / "run", max_steps=1)
    _, events = collect(config)
    assert any(isinstance(event, Warned) and "names the next token at" in event.message for event in events)


def test_short_documents_are_covered(tmp_path):
    # B35 through the loop: a row of one long and four short documents, with anchors for a third of its tokens.
    contents = make_cache(tmp_path / "cache", make_documents((240, 18, 18, 18, 18)), documents_per_shard=5)
    config = tiny_config(contents.folder, tmp_path / "run", row_tokens=400, num_anchors=100, max_steps=1)
    _, events = collect(config)
    (done,) = (event for event in events if isinstance(event, StepDone))
    assert done.metrics.num_blocks == 100
    assert done.coverage == pytest.approx(100 / (238 + 4 * 16))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_bad_features_stop_the_run_before_they_are_trained_on(tmp_path, value):
    # B12, B13: never skipped, never trained on.
    documents = make_documents(LENGTHS)
    documents[3].fc_features[5, 1] = value
    contents = make_cache(tmp_path / "cache", documents)
    with pytest.raises(
        NonFiniteError, match=r"shard-00001.zarr, corpus document 4: fc_features of layer 3 at position 5"
    ):
        train(tiny_config(contents.folder, tmp_path / "run"))


def test_a_damaged_shard_stops_the_run(tmp_path):
    contents = make_cache(tmp_path / "cache", lengths=LENGTHS)
    path = contents.folder / "shard-00001.zarr" / "last_hidden_states" / "c.0.0"
    data = bytearray(path.read_bytes())
    data[50] ^= 4
    path.write_bytes(data)
    with pytest.raises(CacheDamagedError, match=r"shard-00001\.zarr/last_hidden_states"):
        train(tiny_config(contents.folder, tmp_path / "run"))


@pytest.mark.parametrize("key", ["fc_layers", "last_layer"])
def test_a_manifest_without_its_layers_is_refused(tmp_path, key):
    # B03: never guessed.
    contents = make_cache(tmp_path / "cache", lengths=LENGTHS)
    path = contents.folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["identity"]["features"][key]
    path.write_text(json.dumps(document))
    with pytest.raises(CacheDamagedError, match="cut short or edited"):
        train(tiny_config(contents.folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_states_stored_after_the_final_norm_are_refused(tmp_path):
    # B05, B07: such states would be normed twice, which costs acceptance and raises nothing.
    normed = LayerSpec(index=7, final_norm_applied=True)
    contents = make_cache(tmp_path / "cache", lengths=LENGTHS, features={"last_layer": normed})
    with pytest.raises(CacheFormatError, match=r"last_layer \(layer 7\) was stored after the target's final norm"):
        train(tiny_config(contents.folder, tmp_path / "run"))


def test_fc_takes_every_stored_layer(tmp_path):
    # B09, and the reason for it: the fc is as wide as what is stored, all of it.
    for count in (1, 3):
        contents = make_cache(tmp_path / f"cache{count}", make_documents((30, 20), num_fc_layers=count))
        setup = prepare_run(tiny_config(contents.folder, tmp_path / "run"))
        assert setup.new_state().drafter.fc.weight.shape == (16, 16 * count)
        assert len(setup.contract.drafter.target_layer_ids) == count


def test_an_unfinished_cache_is_trained_on_only_when_asked(tmp_path):
    contents = make_cache(tmp_path / "cache", lengths=LENGTHS, complete=False)
    config = tiny_config(contents.folder, tmp_path / "run", max_steps=1)
    with pytest.raises(CacheFormatError, match="is not complete"):
        train(config)
    assert train(config.model_copy(update={"allow_incomplete": True})).step == 1


def test_mask_token_in_the_corpus_is_refused(tmp_path):
    # B48: as counted by stage one, and as found in a row for any other id.
    contents = make_cache(tmp_path / "counted", lengths=LENGTHS, corpus={"mask_token_uses": 2})
    with pytest.raises(ConfigError, match="mask token 63 of tiny/target occurs 2 times"):
        train(tiny_config(contents.folder, tmp_path / "run"))
    documents = make_documents(LENGTHS)
    for other in documents:
        other.input_ids[other.input_ids == 62] = 61
    documents[2].input_ids[9] = 62
    contents = make_cache(tmp_path / "found", documents)
    chosen = TINY_DRAFTER.model_copy(update={"mask_token_id": 62})
    with pytest.raises(ConfigError, match=r"mask token 62 occurs in the text itself \(corpus document 2, position 9\)"):
        train(tiny_config(contents.folder, tmp_path / "other", drafter=chosen))


def test_a_corpus_without_anything_to_train_on_is_refused(tmp_path):
    contents = make_cache(tmp_path / "cache", make_documents((20, 30), prompt_tokens=30))
    with pytest.raises(ConfigError, match=r"no training document .* has two supervised tokens within 4 tokens"):
        train(tiny_config(contents.folder, tmp_path / "run"))
    assert not (tmp_path / "run" / "final").exists()


def test_held_out_documents_are_never_trained_on(tmp_path):
    contents = make_cache(tmp_path / "cache", lengths=(20,) * 30)
    config = tiny_config(contents.folder, tmp_path / "run", eval_fraction=0.3, epochs=1)
    report, events = collect(config)
    trained = sum(event.num_tokens for event in events if isinstance(event, StepDone))
    held_out = sum(event.metrics.num_blocks for event in events if isinstance(event, EvaluationDone))
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.num_held_out_documents > 3
    assert trained == 20 * started.num_train_documents
    assert held_out == 18 * started.num_held_out_documents
    assert report.best == report.held_out


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ConfigError, match="device"):
        choose_device(name)
