"""Embedding, final norm and lm_head are found by what they do (B05, B06, B52, trap 3)."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.extraction import small_config
from torch import nn

from dflash_cache.errors import TargetError
from dflash_cache.extract.head import find_head, identify_norm
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.target import TargetFiles, open_target

Opened = Callable[[str], tuple[TargetFiles, LoadedTarget]]

KINDS = {
    "dense": ("rms", 1e-6),
    "tied": ("rms", 1e-6),
    "llama": ("rms", 1e-5),
    "hybrid": ("rms_one_plus", 1e-6),
    "gemma3": ("rms_one_plus", 1e-6),
    "gpt2": ("layer_norm", 1e-5),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_head_gives_the_targets_own_logits(name: str, opened: Opened) -> None:
    _, target = opened(name)
    found = find_head(target)
    assert (found.head.spec.final_norm.kind, found.head.spec.final_norm.eps) == KINDS[name]
    input_ids = torch.randint(0, 391, (1, 23), generator=torch.Generator().manual_seed(1))
    outputs = []
    handle = target.layers[-1].register_forward_hook(
        lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.inference_mode():
        expected = target.model(input_ids=input_ids).logits
        logits = found.head.logits(outputs[0])
        normed_twice = found.head.logits(found.head.final_norm(outputs[0]))
    handle.remove()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(normed_twice, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", KINDS)
def test_the_head_embeds_as_the_target_does(name: str, opened: Opened) -> None:
    _, target = opened(name)
    head = find_head(target).head
    seen = []
    handle = target.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    input_ids = torch.arange(11)[None]
    with torch.inference_mode():
        target.decode(input_ids)
    handle.remove()
    expected = seen[0]
    if name == "gpt2":  # adds learned positions, which are no part of the embedding
        expected = expected - target.decoder.wpe.weight[:11]
    torch.testing.assert_close(head.embed(input_ids), expected, rtol=1e-5, atol=1e-5)
    assert head.spec.tied == (name in ("tied", "gemma3", "gpt2"))


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-6, 1e-5, 3e-4])
def test_eps_is_measured(eps: float) -> None:
    norm = nn.RMSNorm(48, eps=eps)
    assert identify_norm(norm, 48, "test").eps == pytest.approx(eps, rel=1e-2)
    layer_norm = nn.LayerNorm(48, eps=eps)
    nn.init.normal_(layer_norm.bias)
    spec = identify_norm(layer_norm, 48, "test")
    assert (spec.kind, spec.eps) == ("layer_norm", pytest.approx(eps, rel=1e-2))


def test_another_function_is_no_norm() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * self.weight

    with pytest.raises(TargetError, match="neither an RMS norm"):
        identify_norm(Gate(), 8, "test")


class _Silent(nn.Module):
    """A model that does not say where its matrices are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.renamed = model.model.embed_tokens
        self.projection = model.lm_head
        self.body = model.model

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_renamed_matrices_are_found_by_their_shape(opened: Opened) -> None:
    _, target = opened("dense")
    silent = replace(target, model=_Silent(target.model))
    head = find_head(silent).head
    assert head.embedding.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    assert head.lm_head_weight.data_ptr() == target.model.lm_head.weight.data_ptr()


def test_a_missing_lm_head_lists_what_there_is(opened: Opened) -> None:
    _, target = opened("dense")
    silent = _Silent(target.model)
    del silent.projection
    with pytest.raises(TargetError, match=r"no lm_head of shape \[512, 64\].*renamed\.weight \(512, 64\)"):
        find_head(replace(target, model=silent))


def test_a_decoder_without_a_final_norm_lists_its_parts(opened: Opened) -> None:
    _, target = opened("dense")

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = target.layers
            self.inner = nn.ModuleDict({"decoder": target.decoder})

        def forward(self, **inputs: object) -> object:
            return self.inner["decoder"](**inputs)

    with pytest.raises(TargetError, match=r"all parts: layers \(ModuleList\), inner"):
        find_head(replace(target, decoder=Bare()))


def test_weights_that_give_nan_are_called_damaged(opened: Opened) -> None:
    _, target = opened("dense")
    broken = replace(target, model=copy.deepcopy(target.model))
    broken = replace(broken, decoder=broken.model.model, layers=broken.model.model.layers)
    broken.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(TargetError, match="NaN or infinite: its weights are damaged"):
        find_head(broken)


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_a_nan_row_that_training_would_refuse_is_refused_before_extraction(opened: Opened, part: str) -> None:
    _, target = opened("dense")
    model = copy.deepcopy(target.model)
    broken = replace(target, model=model, decoder=model.model, layers=model.model.layers)
    matrix = model.lm_head if part == "lm_head" else model.model.embed_tokens
    matrix.weight[-1, 0] = float("nan")
    with pytest.raises(TargetError, match="holds NaN or infinity"):
        find_head(broken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_scale_gives_the_very_bits(dtype: str, target_folder: Callable[[str], Path]) -> None:
    """In bfloat16 Gemma's factor is sqrt(H) rounded to it; measured over rounded rows it comes out in between."""
    files = open_target(small_config(target_folder("gemma3"), (Path("unused"),), Path("unused"), dtype=dtype))
    target = load_target(files, "sdpa")
    head = find_head(target).head
    input_ids = torch.arange(4, 470)[None]
    with torch.inference_mode():
        entered = target.model(input_ids=input_ids, output_hidden_states=True).hidden_states[0]
    assert torch.equal(head.embed(input_ids), entered)
