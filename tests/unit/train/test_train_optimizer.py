"""What AdamW decays, and that its state survives exactly."""

import pytest
import torch
from support.caches import make_documents
from support.training import tiny_config, tiny_state

from dflash_cache.config import OptimizerConfig
from dflash_cache.errors import CheckpointError
from dflash_cache.train.optimizer import clip_gradients, divide_gradients, optimizer_tensors, restore_optimizer


@pytest.fixture
def state(tmp_path):
    return tiny_state(
        make_documents((20,)), tiny_config(tmp_path, tmp_path, optimizer=OptimizerConfig(weight_decay=0.5, lr=0.1))
    )


def step_once(state, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    state.optimizer.step()


def test_matrices_are_decayed_and_gains_are_not(state):
    # Trap 24.
    before = {name: parameter.detach().clone() for name, parameter in state.drafter.named_parameters()}
    for parameter in state.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    for name, parameter in state.drafter.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim == 2 else before[name]
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=0), name


def test_every_weight_is_optimised_once(state):
    optimised = [id(parameter) for group in state.optimizer.param_groups for parameter in group["params"]]
    assert sorted(optimised) == sorted(id(parameter) for parameter in state.drafter.parameters())


def test_state_round_trips_bit_for_bit_in_float32(state, tmp_path):
    # Trap 25.
    step_once(state)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(state.drafter, state.optimizer).items()}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    other = tiny_state(
        make_documents((20,)), tiny_config(tmp_path, tmp_path, optimizer=OptimizerConfig(weight_decay=0.5, lr=0.1))
    )
    other.drafter.load_state_dict(state.drafter.state_dict())
    restore_optimizer(other.drafter, other.optimizer, saved)
    for one in (state, other):
        step_once(one, seed=1)
    for ours, theirs in zip(other.drafter.parameters(), state.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_that_does_not_fit_is_refused_by_name(state):
    step_once(state)
    tensors = optimizer_tensors(state.drafter, state.optimizer)
    missing = {name: tensor for name, tensor in tensors.items() if name != "exp_avg.fc.weight"}
    with pytest.raises(CheckpointError, match=r"lacks \['exp_avg.fc.weight'\]"):
        restore_optimizer(state.drafter, state.optimizer, missing)
    with pytest.raises(CheckpointError, match=r"exp_avg.fc.weight is \[3\]"):
        restore_optimizer(state.drafter, state.optimizer, {**tensors, "exp_avg.fc.weight": torch.zeros(3)})


def test_dividing_and_clipping(state):
    for parameter in state.drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in state.drafter.parameters())
    divide_gradients(state.optimizer, torch.tensor(4.0, dtype=torch.float64))
    assert float(clip_gradients(state.optimizer, 1.0)) == pytest.approx(count**0.5 / 4, rel=1e-5)
    assert float(clip_gradients(state.optimizer, 1.0)) == pytest.approx(1.0, rel=1e-4)
