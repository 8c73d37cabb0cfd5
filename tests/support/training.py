"""Tiny training runs for tests, and the one proof that a run resumes exactly."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from support.caches import VOCAB_SIZE, Document, make_head, make_identity

from dflash_cache.config import DrafterSettings, OptimizerConfig, TrainConfig
from dflash_cache.drafter.config import DrafterConfig, derive_drafter_config
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import Objective
from dflash_cache.stream.batch import PackedBatch
from dflash_cache.train.events import StepDone, TrainReport
from dflash_cache.train.generators import Generators
from dflash_cache.train.loop import train
from dflash_cache.train.optimizer import build_optimizer
from dflash_cache.train.state import Progress, TrainState

# Figures of a step that differ from run to run: times and what is computed from them.
TIMINGS = {"seconds", "data_wait_seconds", "tokens_per_second", "data_wait_share"}

TINY_DRAFTER = DrafterSettings(
    num_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, block_size=4, sliding_window=8
)


def tiny_config(cache: Path, out: Path, **changes) -> TrainConfig:
    """Settings of a run that takes a second."""
    settings = {
        "shards": cache,
        "out": out,
        "epochs": 2,
        "row_tokens": 64,
        "num_anchors": 12,
        "optimizer": OptimizerConfig(lr=5e-3),
        "drafter": TINY_DRAFTER,
        "eval_fraction": 0.0,
        "save_every": 1000,
        "device": "cpu",
    }
    return TrainConfig(**{**settings, **changes})


def packed_row(documents: list[Document]) -> PackedBatch:
    """Pack whole documents, in order, without a cache between."""
    lengths = [len(document.input_ids) for document in documents]

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(document, name) for document in documents]))

    return PackedBatch(
        input_ids=joined("input_ids").to(torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        doc_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        loss_mask=joined("loss_mask"),
        fc_features=joined("fc_features").to(torch.bfloat16),
        last_hidden_states=joined("last_hidden_states").to(torch.bfloat16),
        corpus_ids=tuple(range(len(documents))),
    ).check(vocab_size=VOCAB_SIZE)


def tiny_drafter_config(documents: list[Document], settings: DrafterSettings = TINY_DRAFTER) -> DrafterConfig:
    """The drafter of a cache of these documents."""
    identity = make_identity(documents)
    return derive_drafter_config(identity.target, identity.features, settings)


def tiny_objective(documents: list[Document], config: TrainConfig) -> Objective:
    """The objective of a cache of these documents with a random target head."""
    head = make_head(hidden_size=documents[0].last_hidden_states.shape[1])
    return Objective(tiny_drafter_config(documents, config.drafter), config.loss, head)


def tiny_state(documents: list[Document], config: TrainConfig) -> TrainState:
    """A run before its first step."""
    generators = Generators.from_seed(config.seed, torch.device("cpu"))
    drafter = Drafter(tiny_drafter_config(documents, config.drafter))
    drafter.initialize(generators.weights)
    return TrainState(drafter, build_optimizer(drafter, config.optimizer), generators, Progress())


def read_metrics(out: Path) -> list[dict]:
    """The lines of a run's ``metrics.jsonl`` without their timings."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMINGS} for line in lines]


def train_until(config: TrainConfig, step: int) -> TrainReport:
    """Train and ask the run to stop after a step, as Ctrl-C does."""

    def stop(event):
        if isinstance(event, StepDone) and event.step == step:
            raise KeyboardInterrupt

    return train(config, stop)


def assert_resumes_identically(config: TrainConfig, stop_after: list[int]) -> None:
    """Prove that a run stopped after each of some steps, and resumed, equals the uninterrupted one bit for bit.

    Compares everything in the last checkpoint (weights, both moments, generators, position, best figures), every line
    of the metrics, and the bytes of the exported drafter.

    Args:
      config: Of the run; trained twice, beside ``config.out``.
      stop_after: Steps, ascending; each resumes from the one before.
    """
    whole = config.model_copy(update={"out": config.out.with_name(config.out.name + "-whole")})
    expected = train(whole)
    assert not expected.interrupted
    for number, step in enumerate(stop_after):
        report = train_until(config.model_copy(update={"resume": number > 0}), step)
        assert report.interrupted and report.step == step
        assert report.how_to_continue is not None and "--resume" in report.how_to_continue
    resumed = train(config.model_copy(update={"resume": True}))
    assert (resumed.step, resumed.training, resumed.held_out, resumed.best) == (
        expected.step,
        expected.training,
        expected.held_out,
        expected.best,
    )
    assert resumed.checkpoint.name == expected.checkpoint.name
    for file in sorted(expected.checkpoint.glob("*.safetensors")):
        ours, theirs = load_file(resumed.checkpoint / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    progress = [json.loads((r.checkpoint / "checkpoint.json").read_text())["progress"] for r in (resumed, expected)]
    assert progress[0] == progress[1]
    assert read_metrics(config.out) == read_metrics(whole.out)
    assert resumed.final is not None and expected.final is not None
    for file in ("model.safetensors", "config.json"):
        assert (resumed.final / file).read_bytes() == (expected.final / file).read_bytes()
