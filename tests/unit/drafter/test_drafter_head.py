"""From hidden states to loss in chunks."""

from dataclasses import dataclass, field

import pytest
import torch
from drafter_cases import TinyTarget, drafter_config, new_target
from torch import Tensor

from dflash_cache.config import LossConfig
from dflash_cache.drafter.head import HeadResult, SupervisedRows, default_chunk_rows, head_loss, target_ids

CONFIG = drafter_config()
LOSSES = {
    "ce": LossConfig(),
    "data_token": LossConfig(label="data_token"),
    "kl": LossConfig(terms={"kl_div": 1.0}, temperature=2.0),
    "mixture": LossConfig(terms={"kl_div": 0.7, "ce": 0.3}, temperature=2.0),
    "mixture_of_labels": LossConfig(terms={"kl_div": 0.7, "ce": 0.3}, label="data_token"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def some_rows(num_rows: int = 23, *, dtype: torch.dtype = torch.float32) -> SupervisedRows:
    generator = torch.Generator().manual_seed(4)
    return SupervisedRows(
        hidden=torch.randn(num_rows, 32, generator=generator).to(dtype).requires_grad_(),
        weight=torch.rand(num_rows, generator=generator),
        data_ids=torch.randint(60, (num_rows,), generator=generator),
        target_index=torch.randint(40, (num_rows,), generator=generator),
        last_hidden_states=torch.randn(40, 32, generator=generator).to(dtype),
    )


def gradient(result: HeadResult, rows: SupervisedRows) -> Tensor:
    return torch.autograd.grad(result.numerator, rows.hidden)[0]


def dense(rows: SupervisedRows, target: TinyTarget, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """All logits at once in float64, from textbook formulas."""
    target, hidden = target.to(torch.float64), rows.hidden.detach().double().requires_grad_()
    q_log = (hidden @ target.lm_head_weight.T).log_softmax(-1)
    target_logits = target.logits(rows.last_hidden_states.double()[rows.target_index])
    labels = rows.data_ids if loss.label == "data_token" else target_logits.argmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    if "ce" in loss.terms:
        total = total - loss.terms["ce"] * (rows.weight * q_log[torch.arange(len(labels)), labels]).sum()
    if "kl_div" in loss.terms:
        t = loss.temperature
        p = (target_logits / t).softmax(-1)
        q_log_t = (hidden @ target.lm_head_weight.T / t).log_softmax(-1)
        total = total + loss.terms["kl_div"] * t**2 * (rows.weight * (p * (p.log() - q_log_t)).sum(-1)).sum()
    return total.detach(), torch.autograd.grad(total, hidden)[0]


@every_loss
@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 100])
def test_chunks_equal_the_dense_loss_and_gradient(loss: LossConfig, chunk_rows: int) -> None:
    rows, target = some_rows(), new_target(CONFIG)
    result = head_loss(rows, target, loss, chunk_rows=chunk_rows)
    value, expected_gradient = dense(rows, target, loss)
    assert result.numerator.item() == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(gradient(result, rows).double(), expected_gradient, rtol=1e-4, atol=1e-6)


@every_loss
def test_chunks_in_float64_are_exact(loss: LossConfig) -> None:
    rows, target = some_rows(dtype=torch.float64), new_target(CONFIG).to(torch.float64)
    result = head_loss(rows, target, loss, chunk_rows=4)
    value, expected_gradient = dense(rows, target, loss)
    assert result.numerator.dtype == torch.float64
    assert result.numerator.item() == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(gradient(result, rows), expected_gradient, rtol=1e-10, atol=1e-12)


def test_a_scaled_loss_scales_the_gradient() -> None:
    rows, target = some_rows(), new_target(CONFIG)
    plain = gradient(head_loss(rows, target, LOSSES["ce"]), rows)
    result = head_loss(rows, target, LOSSES["ce"])
    torch.testing.assert_close(torch.autograd.grad(result.numerator / 8, rows.hidden)[0], plain / 8)


def test_terms_add_up_to_the_whole() -> None:
    result = head_loss(some_rows(), new_target(CONFIG), LOSSES["mixture"])
    kl, ce = result.term_numerators.tolist()
    assert result.numerator.item() == pytest.approx(0.7 * kl + 0.3 * ce, rel=1e-6)


def test_evaluation_without_gradients_gives_the_same_figures() -> None:
    rows, target = some_rows(), new_target(CONFIG)
    trained = head_loss(rows, target, LOSSES["mixture"], chunk_rows=4)
    with torch.no_grad():
        scored = head_loss(rows, target, LOSSES["mixture"], chunk_rows=4)
    assert not scored.numerator.requires_grad
    assert torch.equal(scored.numerator, trained.numerator.detach())
    assert torch.equal(scored.predicted_ids, trained.predicted_ids)


def test_labels_are_the_targets_choice_or_the_corpus_own() -> None:
    rows, target = some_rows(), new_target(CONFIG)
    chosen = target.logits(rows.last_hidden_states[rows.target_index]).argmax(-1)
    assert not torch.equal(chosen, rows.data_ids), "the two must differ for this test to say anything"
    by_target, by_corpus = (head_loss(rows, target, LOSSES[name]) for name in ("ce", "data_token"))
    assert torch.equal(by_target.label_ids, chosen)
    assert torch.equal(by_corpus.label_ids, rows.data_ids)
    assert by_target.numerator.item() != by_corpus.numerator.item()
    assert torch.equal(target_ids(rows.last_hidden_states[rows.target_index], target, chunk_rows=3), chosen)
    assert target_ids(rows.last_hidden_states[:0], target).shape == (0,)


def test_the_targets_head_gets_no_gradient_and_stays_as_it_is() -> None:
    target = new_target(CONFIG)
    before = target.lm_head_weight.clone()
    target.lm_head_weight.requires_grad_()
    rows = some_rows()
    head_loss(rows, target, LOSSES["mixture"]).numerator.backward()
    assert rows.hidden.grad is not None
    assert target.lm_head_weight.grad is None
    assert torch.equal(target.lm_head_weight.detach(), before)


def test_an_output_bias_counts_for_the_drafter_as_for_the_target() -> None:
    plain = new_target(CONFIG)
    bias = torch.zeros(61)
    bias[17] = 1000.0
    biased = TinyTarget(plain.embedding, plain.final_norm, plain.lm_head_weight, bias)
    result = head_loss(some_rows(), biased, LOSSES["ce"])
    assert result.predicted_ids.eq(17).all()
    assert result.label_ids.eq(17).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_are_a_zero_that_still_reaches_the_drafter(name: str) -> None:
    drafted = torch.randn(3, 4, 32, requires_grad=True)
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    rows = some_rows(0)
    rows = SupervisedRows(
        drafted[nothing], rows.weight, rows.data_ids, rows.target_index, some_rows().last_hidden_states
    )
    result = head_loss(rows, new_target(CONFIG), LOSSES[name])
    result.numerator.backward()
    assert result.numerator.item() == 0
    assert drafted.grad is not None
    assert drafted.grad.eq(0).all()


@dataclass(frozen=True)
class CountingTarget(TinyTarget):
    """Notes how many rows of logits are asked for at a time."""

    asked: list[int] = field(default_factory=list)

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        self.asked.append(len(last_hidden_states))
        return super().logits(last_hidden_states)


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    plain = new_target(CONFIG)
    target = CountingTarget(plain.embedding, plain.final_norm, plain.lm_head_weight)
    head_loss(some_rows(23), target, LOSSES["mixture"], chunk_rows=8)
    assert target.asked == [8, 8, 7]
    head_loss(some_rows(23), target, LOSSES["data_token"], chunk_rows=8)
    assert target.asked == [8, 8, 7], "the corpus' labels need no target"


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_vocabulary() -> None:
    rows = some_rows(23)
    result = head_loss(rows, new_target(CONFIG), LOSSES["mixture"], chunk_rows=4)
    assert result.numerator.grad_fn is not None
    assert sum(tensor.numel() for tensor in result.numerator.grad_fn.saved_tensors) == rows.hidden.numel()
    assert default_chunk_rows(248_320) * 248_320 * 4 <= 2**29
    assert default_chunk_rows(10**12) == 1


def test_bfloat16_head_under_autocast_stays_near_float64() -> None:
    rows, target = some_rows(200), new_target(CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        result = head_loss(rows, target.to(torch.bfloat16), LOSSES["data_token"], chunk_rows=64)
    assert result.numerator.dtype == torch.float32
    value, expected_gradient = dense(rows, target, LOSSES["data_token"])
    assert result.numerator.item() == pytest.approx(value.item(), rel=0.005)
    error = (gradient(result, rows).double() - expected_gradient).norm() / expected_gradient.norm()
    assert error.item() < 0.02


def test_a_bfloat16_head_meets_float32_hidden_states() -> None:
    rows = some_rows()
    result = head_loss(rows, new_target(CONFIG).to(torch.bfloat16), LOSSES["data_token"])
    assert gradient(result, rows).dtype == torch.float32
