"""Fused pieces give what the stock modules give. Their kernels need a GPU; what can be checked here is checked here."""

import pytest
import torch
from support.targets import BUILDERS
from torch import nn

from dflash_cache.config import CorpusConfig, ExtractConfig
from dflash_cache.extract import fused
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.target import open_target


@pytest.fixture(params=["dense", "hybrid", "llama", "gemma3"])
def target(request: pytest.FixtureRequest, tmp_path) -> LoadedTarget:
    folder = BUILDERS[request.param](tmp_path / request.param)
    files = open_target(ExtractConfig(model=str(folder), corpus=CorpusConfig(files=(tmp_path / "unused",))))
    return load_target(files, "sdpa")


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the compiled functions as they are written: compiling for the CPU takes minutes and proves nothing."""
    for name in ("_compiled_rms_norm", "_compiled_swiglu", "_compiled_gated_norm"):
        monkeypatch.setattr(fused, name, getattr(fused, name)._torchdynamo_orig_callable)


@pytest.mark.usefixtures("eager_kernels")
def test_norms_and_mlps_give_the_stock_outputs_and_memory_does_not_grow(target: LoadedTarget) -> None:
    ids = torch.randint(0, 390, (3, 21), generator=torch.Generator().manual_seed(0))
    parameters = sum(p.numel() for p in target.model.parameters())
    with torch.inference_mode():
        stock = target.decode(ids)
    norms = fused._fuse_all(target, fused._fuse_norm)
    mlps = fused._fuse_all(target, fused._fuse_mlp)
    with torch.inference_mode():
        after = target.decode(ids)
    assert norms >= 2 * len(target.layers)
    is_silu = "gemma" not in target.name  # its MLP is gated by gelu, and keeps its own forward
    assert mlps == (len(target.layers) if is_silu else 0)
    torch.testing.assert_close(after, stock, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in target.model.parameters()) == parameters
    for module in target.layers.modules():
        if mlps and hasattr(module, "gate_proj"):
            assert (
                module.gate_proj.weight.untyped_storage().data_ptr()
                == module.up_proj.weight.untyped_storage().data_ptr()
            )


@pytest.mark.usefixtures("eager_kernels")
def test_the_gated_norm_is_qwen_s() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    norm = Qwen3_5RMSNormGated(16, eps=1e-5)
    nn.init.normal_(norm.weight)
    rows, gate = torch.randn(2, 9, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fused._compiled_gated_norm(rows, gate, norm.weight, 1e-5), norm(rows, gate))


def test_a_foreign_norm_keeps_its_own_forward() -> None:
    class TwistedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.weight

    module = TwistedRMSNorm()
    assert not fused._fuse_norm(module)
    assert "forward" not in vars(module)


def test_nothing_happens_on_the_cpu_and_classes_are_never_patched(target: LoadedTarget) -> None:
    kinds = {type(module): type(module).forward for module in target.layers.modules()}
    assert fused.fuse_target(target) == fused.Fusion()
    fused._fuse_all(target, fused._fuse_norm)
    assert {kind: kind.forward for kind in kinds} == kinds
