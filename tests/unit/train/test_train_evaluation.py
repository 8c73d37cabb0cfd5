"""Held-out evaluation: no chance in it, and no trace of it in the run."""

import pytest
import torch
from support.caches import make_cache, make_documents
from support.training import packed_row, tiny_config, tiny_objective, tiny_state

from dflash_cache.drafter.anchors import all_anchors
from dflash_cache.format.cache import FeatureCache
from dflash_cache.stream.loader import RowReader
from dflash_cache.stream.packing import pack_documents
from dflash_cache.train.evaluation import Evaluator, evaluate_row

CPU = torch.device("cpu")


@pytest.fixture
def documents():
    return make_documents((30, 9, 21), prompt_tokens=2)


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path / "cache", tmp_path / "out", noise_half_width=0.5)


def make_evaluator(tmp_path, documents, config, anchors_at_once=8):
    cache = FeatureCache.open(make_cache(tmp_path / "cache", documents).folder)
    rows = pack_documents(torch.arange(len(documents)).numpy(), cache.index.length, row_tokens=32)
    return Evaluator(tiny_objective(documents, config), RowReader(cache), rows, CPU, anchors_at_once)


def test_every_eligible_anchor_is_scored_without_noise(tmp_path, documents, config):
    evaluator, drafter = make_evaluator(tmp_path, documents, config), tiny_state(documents, config).drafter
    metrics = evaluator(drafter)
    row = packed_row(documents)
    anchors = all_anchors(row.loss_mask, row.doc_ids, 4)
    expected = evaluator.objective(drafter, row, anchors).sums.finalize(config.loss)
    assert metrics.num_blocks == len(anchors.positions) == 27 + 6 + 18
    assert (metrics.num_slots, metrics.accuracy, metrics.eal) == (
        expected.num_slots,
        expected.accuracy,
        expected.eal,
    )
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-6)
    assert len(metrics.accuracy_by_slot) == 3


def test_evaluation_repeats_and_touches_no_generator(tmp_path, documents, config):
    # Trap 20.
    state, evaluator = tiny_state(documents, config), make_evaluator(tmp_path, documents, config)
    before, default = state.generators.state_tensors(), torch.get_rng_state()
    assert evaluator(state.drafter) == evaluator(state.drafter)
    assert torch.equal(torch.get_rng_state(), default)
    for name, tensor in state.generators.state_tensors().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in state.drafter.parameters())


def test_number_of_anchors_at_once_changes_nothing_but_rounding(documents, config):
    objective, drafter = tiny_objective(documents, config), tiny_state(documents, config).drafter
    row = packed_row(documents)
    results = [evaluate_row(objective, drafter, row, size).finalize(config.loss) for size in (1, 7, 500)]
    for result in results[1:]:
        assert result.accuracy_by_slot == results[0].accuracy_by_slot and result.eal == results[0].eal
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_drafter_is_left_as_it_was(tmp_path, documents, config, training):
    drafter = tiny_state(documents, config).drafter
    drafter.train(training)
    make_evaluator(tmp_path, documents, config)(drafter)
    assert drafter.training is training


def test_it_can_be_stopped_between_rows(tmp_path, documents, config):
    seen = []

    def stop_after_first(rows_done):
        seen.append(rows_done)
        return False

    evaluator = make_evaluator(tmp_path, documents, config)
    assert evaluator(tiny_state(documents, config).drafter, stop_after_first) is None
    assert seen == [1]


def test_documents_without_anchors_give_no_figures(tmp_path, config):
    documents = make_documents((6, 5), prompt_tokens=6)
    metrics = make_evaluator(tmp_path, documents, config)(tiny_state(documents, config).drafter)
    assert (metrics.num_blocks, metrics.loss, metrics.eal) == (0, None, None)
