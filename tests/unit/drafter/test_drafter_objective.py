"""A packed row and its anchors in, loss and figures out."""

import itertools

import pytest
import torch
from drafter_cases import TinyRow, anchors_at, drafter_config, new_drafter, new_row, new_target
from torch import Tensor

from dflash_cache.config import LossConfig
from dflash_cache.drafter.anchors import Anchors, all_anchors
from dflash_cache.drafter.loss import effective_denominator
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import Objective, ObjectiveResult, block_token_ids

CONFIG = drafter_config()
TARGET = new_target(CONFIG)
ROW = new_row((9, 14, 6), CONFIG, padding=3)
ANCHORS = [1, 4, 5, 7, 10, 16, 21, 25, 26]
LOSSES = [
    LossConfig(),
    LossConfig(gamma=None, denominator="mask_weight", label="data_token"),
    LossConfig(terms={"kl_div": 0.7, "ce": 0.3}, temperature=2.0, denominator="mask_weight"),
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["speculators", "paper", "mixture"])


def run(loss: LossConfig, parts: list[tuple[TinyRow, Anchors]]) -> tuple[list[ObjectiveResult], dict[str, Tensor]]:
    """Judge rows one after the other; the gradients of their exact common loss."""
    drafter, objective = new_drafter(CONFIG), Objective(CONFIG, loss, TARGET, chunk_rows=5)
    results = [objective(drafter, row, anchors) for row, anchors in parts]
    denominator = effective_denominator(sum((r.denominator for r in results), torch.zeros(())), loss)
    for result in results:
        (result.numerator / denominator).backward()
    return results, {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def assert_same_training(
    one: tuple[list[ObjectiveResult], dict[str, Tensor]], other: tuple[list[ObjectiveResult], dict[str, Tensor]]
) -> None:
    totals = [
        [sum(float(getattr(r, name).detach()) for r in results) for name in ("numerator", "denominator")]
        for results, _ in (one, other)
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-3, atol=1e-5, msg=name)


@every_loss
def test_packed_documents_train_as_they_would_alone(loss: LossConfig) -> None:
    starts = [0, 9, 23, 29]
    alone = []
    for start, stop in itertools.pairwise(starts):
        inside = [p - start for p in ANCHORS if start <= p < stop]
        alone.append((ROW.cut(start, stop), anchors_at(inside)))
    assert_same_training(run(loss, [(ROW, anchors_at(ANCHORS))]), run(loss, alone))


@every_loss
@pytest.mark.parametrize("split", [1, 4, 8])
def test_the_loss_does_not_depend_on_how_a_step_is_split(loss: LossConfig, split: int) -> None:
    parts = [(ROW, anchors_at(ANCHORS[:split])), (ROW, anchors_at(ANCHORS[split:]))]
    assert_same_training(run(loss, [(ROW, anchors_at(ANCHORS))]), run(loss, parts))


@every_loss
def test_padding_anchors_change_nothing(loss: LossConfig) -> None:
    plain, padded = run(loss, [(ROW, anchors_at(ANCHORS))]), run(loss, [(ROW, anchors_at(ANCHORS, padding=40))])
    assert_same_training(plain, padded)
    for name, value in vars(plain[0][0].sums).items():
        torch.testing.assert_close(value, getattr(padded[0][0].sums, name), rtol=1e-5, atol=1e-5)


@every_loss
def test_a_row_with_nothing_to_learn_gives_every_parameter_a_zero_gradient(loss: LossConfig) -> None:
    results, gradients = run(loss, [(ROW, anchors_at([], padding=4))])
    assert float(results[0].numerator.detach()) == float(results[0].denominator) == 0
    assert gradients.keys() == dict(Drafter(CONFIG).named_parameters()).keys()
    assert all(gradient.eq(0).all() for gradient in gradients.values())


def test_evaluation_in_chunks_of_anchors_adds_up() -> None:
    drafter, objective = new_drafter(CONFIG), Objective(CONFIG, LossConfig(), TARGET)
    anchors = all_anchors(ROW.loss_mask, ROW.doc_ids, CONFIG.block_size)
    with torch.no_grad():
        whole = objective(drafter, ROW, anchors).sums
        first, *others = [objective(drafter, ROW, chunk).sums for chunk in anchors.chunks(4)]
    joined = sum(others, first)
    assert torch.equal(joined.streaks, whole.streaks)
    assert torch.equal(joined.correct, whole.correct)
    torch.testing.assert_close(joined.numerator, whole.numerator, rtol=1e-5, atol=1e-5)


def test_the_denominator_is_known_before_the_forward_pass() -> None:
    for loss in LOSSES:
        objective = Objective(CONFIG, loss, TARGET)
        result = objective(new_drafter(CONFIG), ROW, anchors_at(ANCHORS, padding=2))
        assert torch.equal(objective.denominator(ROW, anchors_at(ANCHORS, padding=2)), result.denominator)


def test_each_slot_is_predicted_by_the_token_before_it() -> None:
    """A target that always continues with the successor of the token it is at."""
    row = ROW.changed(
        input_ids=torch.arange(32), last_hidden_states=torch.nn.functional.one_hot(torch.arange(32), 32).float()
    )
    lm_head = torch.zeros(61, 32)
    lm_head[torch.arange(1, 33), torch.arange(32)] = 1.0
    target = type(TARGET)(TARGET.embedding, torch.ones(32), lm_head)
    by_target, by_corpus = (
        Objective(CONFIG, LossConfig(label=label), target)(new_drafter(CONFIG), row, anchors_at(ANCHORS))
        for label in ("target_argmax", "data_token")
    )
    assert torch.equal(by_target.numerator, by_corpus.numerator)


def test_the_first_token_of_a_row_does_not_reach_round_to_its_last() -> None:
    row = new_row((12,), CONFIG)
    row = row.changed(loss_mask=torch.ones(12, dtype=torch.bool), fc_features=row.fc_features.requires_grad_())
    objective, drafter = Objective(CONFIG, LossConfig(), TARGET), new_drafter(CONFIG)
    before = objective(drafter, row, anchors_at([0]))
    (gradient,) = torch.autograd.grad(before.numerator, row.fc_features, allow_unused=True)
    assert gradient is None or gradient.eq(0).all(), "an anchor at 0 has no context at all"
    last_hidden_states = row.last_hidden_states.clone()
    last_hidden_states[-1] += 5.0
    after = objective(drafter, row.changed(last_hidden_states=last_hidden_states), anchors_at([0]))
    assert torch.equal(after.numerator, before.numerator)


def test_only_states_that_predict_a_supervised_slot_matter() -> None:
    objective, drafter = Objective(CONFIG, LossConfig(), TARGET), new_drafter(CONFIG)
    before = objective(drafter, ROW, anchors_at([4])).numerator
    for index in range(len(ROW.input_ids)):
        last_hidden_states = ROW.last_hidden_states.clone()
        last_hidden_states[index] *= -1
        after = objective(drafter, ROW.changed(last_hidden_states=last_hidden_states), anchors_at([4])).numerator
        assert torch.equal(after, before) == (index not in (4, 5, 6))


def test_a_block_shows_the_anchors_token_and_masks() -> None:
    shown = block_token_ids(ROW.input_ids, anchors_at([3, 9]), CONFIG)
    assert shown.tolist() == [[int(ROW.input_ids[3]), 60, 60, 60], [int(ROW.input_ids[9]), 60, 60, 60]]


def test_tokens_after_an_anchor_are_labels_only() -> None:
    drafter, objective = new_drafter(CONFIG), Objective(CONFIG, LossConfig(), TARGET)
    before = objective(drafter, ROW, anchors_at([4]))
    after = objective(drafter, ROW.changed(input_ids=(ROW.input_ids + 1) % 60), anchors_at([10]))
    input_ids = ROW.input_ids.clone()
    input_ids[5:] = 0
    assert torch.equal(
        objective(drafter, ROW.changed(input_ids=input_ids), anchors_at([4])).numerator, before.numerator
    )
    assert after.numerator.isfinite()


def test_nothing_but_the_drafter_is_trained() -> None:
    target = new_target(CONFIG)
    for part in (target.embedding, target.lm_head_weight, target.final_norm):
        part.requires_grad_()
    drafter = new_drafter(CONFIG)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1, weight_decay=0.5)
    before = [part.detach().clone() for part in (target.embedding, target.lm_head_weight, target.final_norm)]
    fc_before = drafter.fc.weight.detach().clone()
    Objective(CONFIG, LOSSES[2], target)(drafter, ROW, anchors_at(ANCHORS)).numerator.backward()
    optimizer.step()
    for part, old in zip((target.embedding, target.lm_head_weight, target.final_norm), before, strict=True):
        assert part.grad is None
        assert torch.equal(part.detach(), old)
    assert not torch.equal(drafter.fc.weight.detach(), fc_before)


def test_a_drafter_learns_a_row_by_heart() -> None:
    drafter = Drafter(CONFIG)
    drafter.initialize(torch.Generator().manual_seed(0))
    objective, anchors = Objective(CONFIG, LossConfig(), TARGET), anchors_at(ANCHORS)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        result = objective(drafter, ROW, anchors)
        (result.numerator / effective_denominator(result.denominator, LossConfig())).backward()
        optimizer.step()
    metrics = result.sums.finalize(LossConfig())
    assert metrics.accuracy is not None
    assert metrics.accuracy > 0.95
