"""Taps copy layer outputs, and only copy (B01, B09)."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dflash_cache.errors import TargetError
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.taps import LayerTaps
from dflash_cache.extract.target import TargetFiles

CPU = torch.device("cpu")
Opened = Callable[[str], tuple[TargetFiles, LoadedTarget]]


@pytest.mark.parametrize("name", ["dense", "hybrid", "gemma3", "gpt2"])
def test_plane_l_is_the_output_of_layer_l(name: str, opened: Opened) -> None:
    _, target = opened(name)
    last = len(target.layers) - 1
    input_ids = torch.randint(0, 391, (1, 17), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = target.decoder(input_ids=input_ids, output_hidden_states=True).hidden_states
        with LayerTaps(target.layers, [1, 3, last], target.hidden_size) as taps:
            taps.begin(17, CPU)
            normed = target.decode(input_ids)
            rows = taps.finish()
    for plane, layer in enumerate((1, 3)):
        assert torch.equal(rows[:, plane], expected[layer + 1][0].to(torch.bfloat16))
        assert not torch.equal(rows[:, plane], expected[layer][0].to(torch.bfloat16))
        assert not torch.equal(rows[:, plane], expected[layer + 2][0].to(torch.bfloat16))
    # hidden_states[-1] is after the final norm, the tap before it.
    assert torch.equal(expected[-1], normed)
    assert not torch.allclose(rows[:, 2].float(), normed[0], rtol=0.05)


def test_the_target_computes_the_same_with_taps(opened: Opened) -> None:
    _, target = opened("dense")
    input_ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = target.decode(input_ids)
        with LayerTaps(target.layers, [0, 5], target.hidden_size) as taps:
            taps.begin(9, CPU)
            during = target.decode(input_ids)
            taps.finish()
    assert torch.equal(before, during)


def test_hooks_are_removed_even_after_an_error(opened: Opened) -> None:
    _, target = opened("dense")
    before = [len(layer._forward_hooks) for layer in target.layers]
    with pytest.raises(RuntimeError, match="stop"), LayerTaps(target.layers, [0, 5], target.hidden_size):
        assert len(target.layers[5]._forward_hooks) == before[5] + 1
        raise RuntimeError("stop")
    assert [len(layer._forward_hooks) for layer in target.layers] == before


def test_a_layer_may_be_two_planes(opened: Opened) -> None:
    _, target = opened("dense")
    with torch.inference_mode(), LayerTaps(target.layers, [5, 2, 5], target.hidden_size) as taps:
        taps.begin(4, CPU)
        target.decode(torch.arange(4)[None])
        rows = taps.finish()
    assert torch.equal(rows[:, 0], rows[:, 2]) and not torch.equal(rows[:, 0], rows[:, 1])


class _Layer(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden: torch.Tensor) -> object:
        hidden.mul_(2)  # works in place on what the layer before returned
        return (hidden, None) if self.as_tuple else hidden


@pytest.mark.parametrize("as_tuple", [False, True])
def test_later_layers_that_work_in_place_do_not_reach_the_copy(as_tuple: bool) -> None:
    layers = nn.ModuleList([_Layer(as_tuple), _Layer(as_tuple)])
    hidden = torch.ones(1, 3, 4)
    with LayerTaps(layers, [0, 1], 4) as taps:
        taps.begin(2, CPU, torch.tensor([0, 2]))
        for layer in layers:
            output = layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        rows = taps.finish()
    assert rows.tolist() == [[[2.0] * 4, [4.0] * 4]] * 2


def test_a_layer_that_did_not_run_or_ran_twice_is_refused() -> None:
    layers = nn.ModuleList([_Layer(False), _Layer(False)])
    with LayerTaps(layers, [0, 1], 4) as taps:
        taps.begin(3, CPU)
        layers[0](torch.ones(1, 3, 4))
        with pytest.raises(TargetError, match="each run once"):
            taps.finish()
        taps.begin(3, CPU)
        for index in (0, 0, 1):
            layers[index](torch.ones(1, 3, 4))
        with pytest.raises(TargetError, match="each run once"):
            taps.finish()
