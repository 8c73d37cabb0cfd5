"""Parity with speculators 0.9.0 and z-lab's inference model, in float32 on the CPU."""

import json
from functools import cache

import pytest
import torch
from drafter_cases import GOLDEN, SPECULATORS_CASES, GoldenCase, load_golden
from safetensors.torch import load_file

from dflash_cache.config import LossConfig
from dflash_cache.drafter.anchors import block_slots
from dflash_cache.drafter.attention import BlockPlacement, SlidingWindow, visibility
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.head import target_ids
from dflash_cache.drafter.loss import effective_denominator
from dflash_cache.drafter.metrics import Metrics
from dflash_cache.drafter.model import DraftContext, Drafter
from dflash_cache.drafter.objective import Objective, ObjectiveResult, block_token_ids

cases = pytest.mark.parametrize("name", SPECULATORS_CASES)
gammas = pytest.mark.parametrize("gamma", [4, 7])
terms = pytest.mark.parametrize("term", ["ce", "kl_div"])

golden = cache(load_golden)


def judge(case: GoldenCase, term: str, gamma: int) -> tuple[ObjectiveResult, LossConfig]:
    loss = LossConfig(terms={term: 1.0}, gamma=gamma)
    return Objective(case.config, loss, case.target, chunk_rows=37)(case.drafter, case.row, case.anchors), loss


@cases
def test_weights_are_those_of_the_published_architecture(name: str) -> None:
    case = golden(name)
    assert len(case.drafter.state_dict()) == 11 * case.config.num_hidden_layers + 3


@cases
@pytest.mark.parametrize("kind", ["full", "slide"])
def test_attention_visibility_is_exact(name: str, kind: str) -> None:
    case = golden(name)
    if kind == "slide" and case.config.sliding_window is None:
        assert "out.attention_visible.slide" not in case.out
        return
    window = SlidingWindow(case.config.sliding_window, "anchor") if kind == "slide" else None
    anchor_doc = case.row.doc_ids[case.anchors.positions]
    placement = BlockPlacement(case.anchors.positions, anchor_doc, case.row.doc_ids, case.config.block_size)
    assert torch.equal(visibility(placement, window), case.out[f"out.attention_visible.{kind}"].bool())


@cases
def test_supervised_slots_and_their_tokens_are_exact(name: str) -> None:
    case = golden(name)
    slots = block_slots(case.anchors, case.row.loss_mask, case.row.doc_ids, case.config.block_size)
    assert torch.equal(slots.supervised.flatten(), case.out["out.block_loss_mask"].bool())
    assert torch.equal(slots.token_index.flatten(), case.out["out.block_token_index"].long())


@cases
def test_target_ids_are_exact(name: str) -> None:
    case = golden(name)
    supervised = case.out["out.block_loss_mask"].bool()
    before = case.out["out.block_token_index"].long()[supervised] - 1
    ids = target_ids(case.row.last_hidden_states[before], case.target, chunk_rows=10)
    assert torch.equal(ids, case.out["out.target_ids"].long()[supervised])


@cases
def test_draft_hidden_states_and_logits(name: str) -> None:
    case = golden(name)
    context = DraftContext(case.row.fc_features, case.row.positions, case.row.doc_ids)
    embeddings = case.target.embed(block_token_ids(case.row.input_ids, case.anchors, case.config))
    with torch.no_grad():
        drafted = case.drafter(context, case.anchors, embeddings)[case.anchors.valid].flatten(0, 1)
    valid = case.anchors.valid.repeat_interleave(case.config.block_size)
    torch.testing.assert_close(drafted, case.out["out.draft_hidden"][valid], rtol=1e-4, atol=1e-4)
    logits = drafted @ case.target.lm_head_weight.T
    torch.testing.assert_close(logits, case.out["out.draft_logits"][valid], rtol=1e-4, atol=1e-4)


@cases
@terms
@gammas
def test_loss(name: str, term: str, gamma: int) -> None:
    case = golden(name)
    result, loss = judge(case, term, gamma)
    value = result.numerator / effective_denominator(result.denominator, loss)
    assert value.item() == pytest.approx(case.losses[f"{term}.gamma{gamma}"]["loss"], rel=1e-5)


@cases
@terms
@gammas
def test_metrics(name: str, term: str, gamma: int) -> None:
    case = golden(name)
    result, loss = judge(case, term, gamma)
    expected = case.losses[f"{term}.gamma{gamma}"]
    metrics: Metrics = result.sums.finalize(loss)
    for slot in range(1, case.config.block_size):
        assert int(result.sums.correct[slot]) == expected[f"position_{slot}_acc_sum"]
        assert int(result.sums.total[slot]) == expected[f"position_{slot}_acc_total"]
    assert metrics.num_slots == expected["full_acc_total"]
    assert metrics.accuracy == pytest.approx(expected["full_acc_sum"] / expected["full_acc_total"])
    assert metrics.num_blocks == expected["eal_total"]
    assert metrics.eal == pytest.approx(expected["eal_sum"] / expected["eal_total"])
    assert metrics.loss == pytest.approx(expected["loss"], rel=1e-5)


@cases
@gammas
def test_gradients(name: str, gamma: int) -> None:
    case = load_golden(name)
    features = case.row.fc_features.requires_grad_()
    result, loss = judge(case, "ce", gamma)
    (result.numerator / effective_denominator(result.denominator, loss)).backward()
    gradients = {
        "fc.weight": case.drafter.fc.weight.grad,
        "layers.0.self_attn.k_proj.weight": case.drafter.get_parameter("layers.0.self_attn.k_proj.weight").grad,
        "fc_features": features.grad,
    }
    for part, gradient in gradients.items():
        expected = case.out[f"grad.ce.gamma{gamma}.{part}"]
        assert gradient is not None
        assert float((gradient - expected).norm() / expected.norm()) < 1e-4, part


def test_zlab_inference_model() -> None:
    described = json.loads((GOLDEN / "zlab_full.json").read_text())["config"]
    shared = DrafterConfig.model_fields.keys() & described.keys()
    config = DrafterConfig(
        **{field: described[field] for field in shared},
        rope_theta=described["rope_parameters"]["rope_theta"],
        **described["dflash_config"],
    )
    drafter = Drafter(config)
    drafter.load_state_dict(load_file(GOLDEN / "zlab_full.weights.safetensors"))
    case = load_file(GOLDEN / "zlab_full.case.safetensors")
    with torch.no_grad():
        drafted = drafter.draft_block(drafter.encode_context(case["fc_features"]), case["block_embeddings"])
    torch.testing.assert_close(drafted, case["out.draft_hidden"], rtol=1e-5, atol=1e-5)
