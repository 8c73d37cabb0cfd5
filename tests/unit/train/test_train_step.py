"""One optimizer step: exact denominators, clean targets, and what must stop it."""

import pytest
import torch
from support.caches import MASK_TOKEN_ID, make_documents
from support.training import packed_row, tiny_config, tiny_objective, tiny_state

from dflash_cache.config import LossConfig, OptimizerConfig
from dflash_cache.drafter.anchors import all_anchors, sample_anchors
from dflash_cache.errors import ConfigError, NonFiniteError
from dflash_cache.train.step import TrainStep, refuse_mask_token

CPU = torch.device("cpu")
# Every eligible position becomes an anchor, so that nothing is left to chance.
ALL_ANCHORS = {"num_anchors": 200, "noise_half_width": 0.0}


def mixed_documents():
    """Documents of very different lengths and supervised shares."""
    documents = [*make_documents((30, 9), prompt_tokens=2), *make_documents((26,), seed=1, prompt_tokens=20)]
    documents[1].loss_mask[4:7] = False
    return documents


def take_step(rows, tmp_path, documents=None, lr=5e-3, **changes):
    """Take one step over packed rows of documents; returns the run and what came of the step."""
    config = tiny_config(tmp_path, tmp_path, **changes)
    documents = documents or rows[0]
    state = tiny_state(documents, config)
    step = TrainStep(tiny_objective(documents, config), config, CPU)
    return state, step(state, [packed_row(row) for row in rows], lr)


def gradients(state):
    return {name: parameter.grad.clone() for name, parameter in state.drafter.named_parameters()}


@pytest.mark.parametrize("denominator", ["mask", "mask_weight"])
def test_gradient_does_not_depend_on_how_documents_fall_into_rows(tmp_path, denominator):
    # Trap 8, B21, B22: documents singly, in pairs, and all in one row.
    first, second, third = mixed_documents()
    splits = [[[first, second, third]], [[first], [second], [third]], [[third, first], [second]]]
    loss = LossConfig(denominator=denominator, gamma=3.0)
    results = [take_step(rows, tmp_path, documents=mixed_documents(), loss=loss, **ALL_ANCHORS) for rows in splits]
    reference = gradients(results[0][0])
    assert any(gradient.abs().max() > 1e-3 for gradient in reference.values())
    for state, result in results[1:]:
        assert result.sums.finalize(loss).loss == pytest.approx(results[0][1].sums.finalize(loss).loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(results[0][1].grad_norm, rel=1e-5)
        for name, gradient in gradients(state).items():
            assert torch.allclose(gradient, reference[name], rtol=1e-4, atol=1e-6), name


def test_gradient_is_that_of_the_whole_loss_in_one_go(tmp_path):
    documents = mixed_documents()
    config = tiny_config(tmp_path, tmp_path, optimizer=OptimizerConfig(max_grad_norm=1e9), **ALL_ANCHORS)
    state, _ = take_step(
        [[d] for d in documents], tmp_path, documents=documents, **ALL_ANCHORS, optimizer=config.optimizer
    )
    objective, fresh = tiny_objective(documents, config), tiny_state(documents, config)
    row = packed_row(documents)
    result = objective(fresh.drafter, row, all_anchors(row.loss_mask, row.doc_ids, 4))
    (result.numerator / (result.denominator + 1e-5)).backward()
    for name, parameter in fresh.drafter.named_parameters():
        assert torch.allclose(gradients(state)[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_noise_reaches_the_features_and_never_the_targets(tmp_path):
    # Trap 20: with noise on, targets are bitwise those with noise off.
    documents = mixed_documents()
    seen = {}

    class Spy(torch.nn.Module):
        """Stands between step and objective and keeps what the objective is given."""

        def __init__(self, objective, key):
            super().__init__()
            self.objective, self.key = objective, key
            self.config, self.loss = objective.config, objective.loss

        def forward(self, drafter, row, anchors):
            seen[self.key] = row
            return self.objective(drafter, row, anchors)

    for half_width in (0.0, 0.05):
        config = tiny_config(tmp_path, tmp_path, num_anchors=200, noise_half_width=half_width)
        step = TrainStep(Spy(tiny_objective(documents, config), half_width), config, CPU)
        step(tiny_state(documents, config), [packed_row(documents)], 1e-3)
    clean, noised = seen[0.0], seen[0.05]
    for name in ("input_ids", "positions", "doc_ids", "loss_mask", "last_hidden_states"):
        assert torch.equal(getattr(clean, name), getattr(noised, name)), name
    difference = (noised.fc_features.float() - clean.fc_features.float()).abs()
    assert 0 < difference.max() < 0.05 + 2**-6 and (difference > 0).float().mean() > 0.5


def test_only_the_drafter_is_trained(tmp_path):
    # Trap 24.
    documents = mixed_documents()
    config = tiny_config(tmp_path, tmp_path)
    objective, state = tiny_objective(documents, config), tiny_state(documents, config)
    head = objective.target
    names = ("embedding", "norm_weight", "lm_head_weight")
    before = {name: getattr(head, name).clone() for name in names}
    drafter_before = {name: parameter.detach().clone() for name, parameter in state.drafter.named_parameters()}
    TrainStep(objective, config, CPU)(state, [packed_row(documents)], 1e-2)
    assert not list(head.parameters())
    for name in names:
        assert not getattr(head, name).requires_grad and getattr(head, name).grad is None
        assert torch.equal(getattr(head, name), before[name]), name
    unchanged = [n for n, p in state.drafter.named_parameters() if torch.equal(p, drafter_before[n])]
    assert unchanged == []


def test_a_row_without_anchors_adds_nothing_to_the_step(tmp_path):
    # Trap 27.
    documents, (silent,) = mixed_documents(), make_documents((15,), seed=4, prompt_tokens=15)
    alone, expected = take_step([documents], tmp_path, **ALL_ANCHORS)
    together, result = take_step([[silent], documents, [silent]], tmp_path, documents=documents, **ALL_ANCHORS)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    assert result.num_tokens == expected.num_tokens + 30 and result.num_used == expected.num_used
    for name, gradient in gradients(together).items():
        assert torch.allclose(gradient, gradients(alone)[name], rtol=1e-5, atol=1e-7), name


def test_a_step_without_any_anchor_changes_nothing(tmp_path):
    (silent,) = make_documents((15,), prompt_tokens=15)
    state, result = take_step([[silent], [silent]], tmp_path)
    fresh = tiny_state([silent], tiny_config(tmp_path, tmp_path))
    assert result.grad_norm is None and result.sums.finalize(LossConfig()).loss is None
    assert not state.optimizer.state
    for ours, theirs in zip(state.drafter.parameters(), fresh.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_short_documents_get_their_share_of_anchors(tmp_path):
    # B35: one long document and four short ones; counted per row, the long one would take nearly all anchors.
    documents = make_documents((200, 14, 14, 14, 14))
    config = tiny_config(tmp_path, tmp_path, num_anchors=60)
    row = packed_row(documents)
    anchors = sample_anchors(
        row.loss_mask,
        row.doc_ids,
        block_size=4,
        num_anchors=60,
        generator=tiny_state(documents, config).generators.anchors,
    )
    assert anchors.coverage(row.loss_mask, row.doc_ids, 4).used == (12, 12, 12, 12, 12)
    _, result = take_step([documents], tmp_path, num_anchors=60)
    # Not eligible are the first token, which is unsupervised, and the last, which nothing follows.
    assert (result.num_used, result.num_eligible) == (60, 198 + 4 * 12)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_value_that_is_not_finite_stops_the_step_and_leaves_the_weights(tmp_path, where):
    # B67
    documents = mixed_documents()
    config = tiny_config(tmp_path, tmp_path, **ALL_ANCHORS)
    state = tiny_state(documents, config)
    if where == "loss":
        with torch.no_grad():
            state.drafter.norm.weight[0] = float("nan")
    else:
        state.drafter.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = [parameter.detach().clone() for parameter in state.drafter.parameters()]
    state.progress = state.progress.model_copy(update={"step": 239})
    rows = [packed_row([documents[0]]), packed_row(documents[1:])]
    step = TrainStep(tiny_objective(documents, config), config, CPU)
    with pytest.raises(NonFiniteError, match=rf"the {where} of step 240 is .*corpus document 0") as caught:
        step(state, rows, 1e-3)
    assert "corpus documents 0, 1" in str(caught.value)
    for ours, theirs in zip(state.drafter.parameters(), before, strict=True):
        assert torch.equal(ours, theirs) or (torch.isnan(theirs).any() and torch.isnan(ours).any())
    assert not state.optimizer.state


def test_the_mask_token_in_a_text_is_refused_naming_the_document(tmp_path):
    # B48
    documents = mixed_documents()
    documents[1].input_ids[6] = MASK_TOKEN_ID
    with pytest.raises(ConfigError, match=r"mask token 63 occurs in the text itself \(corpus document 1, position 6\)"):
        take_step([documents], tmp_path)
    refuse_mask_token(packed_row(documents), 62)


def test_chance_comes_from_the_run_alone(tmp_path):
    documents = mixed_documents()
    torch.manual_seed(1)
    first, _ = take_step([documents], tmp_path)
    torch.manual_seed(2)
    second, _ = take_step([documents], tmp_path)
    other, _ = take_step([documents], tmp_path, seed=1)
    weights = [torch.cat([p.detach().flatten() for p in s.drafter.parameters()]) for s in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_too_little_gpu_memory_says_which_settings_to_change(tmp_path):
    documents = mixed_documents()
    config = tiny_config(tmp_path, tmp_path)
    state = tiny_state(documents, config)

    def exhausted(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.")

    state.drafter.register_forward_pre_hook(exhausted)
    with pytest.raises(ConfigError, match=r"Tried to allocate 4 GiB\. Lower num_anchors or row_tokens"):
        TrainStep(tiny_objective(documents, config), config, CPU)(state, [packed_row(documents)], 1e-3)
