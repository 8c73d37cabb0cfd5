"""The network: what reaches a block, and that it computes what the published one does."""

import math

import pytest
import torch
from drafter_cases import TinyRow, anchors_at, drafter_config, new_drafter, new_row
from torch import Tensor

from dflash_cache.drafter.anchors import Anchors
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.layers import RMSNorm, rotary_tables
from dflash_cache.drafter.model import DraftContext, Drafter

CONFIG = drafter_config()
ROW = new_row((9, 14), CONFIG, padding=3)


def draft(drafter: Drafter, row: TinyRow, anchors: Anchors, *, seed: int = 7) -> Tensor:
    """Drafts with embeddings that depend on the block's place only."""
    shape = (len(anchors.positions), drafter.config.block_size, drafter.config.hidden_size)
    embeddings = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drafter(DraftContext(row.fc_features, row.positions, row.doc_ids), anchors, embeddings).detach()


def perturbed(row: TinyRow, index: slice | int) -> TinyRow:
    fc_features = row.fc_features.clone()
    fc_features[index] += 1.0
    return row.changed(fc_features=fc_features)


def test_state_has_the_published_names_and_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(CONFIG).state_dict().items()}
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    expected = {f"layers.{i}.{name}": shape for i in range(3) for name, shape in layer.items()}
    assert shapes == expected | {"fc.weight": (32, 160), "hidden_norm.weight": (32,), "norm.weight": (32,)}


def test_a_new_drafter_is_nan_until_initialized_and_then_depends_on_the_generator_only() -> None:
    drafter = Drafter(CONFIG)
    assert drafter.fc.weight.isnan().all()
    states = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        drafter = Drafter(CONFIG)
        drafter.initialize(torch.Generator().manual_seed(0))
        states.append(drafter.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert states[0]["norm.weight"].eq(1).all()


def test_nothing_at_or_after_an_anchor_reaches_its_block() -> None:
    drafter, anchors = new_drafter(CONFIG), anchors_at([4, 12, 15])
    before = draft(drafter, ROW, anchors)
    for block, position in enumerate([4, 12, 15]):
        assert torch.equal(draft(drafter, perturbed(ROW, slice(position, None)), anchors)[block], before[block])
        changed = draft(drafter, perturbed(ROW, position - 1), anchors)[block]
        assert not torch.isclose(changed, before[block]).all(-1).any(), "every slot sees the token before the anchor"


def test_overlapping_blocks_do_not_leak_into_each_other() -> None:
    config = drafter_config(block_size=8, sliding_window=8)
    drafter, row = new_drafter(config), new_row((40,), config)
    anchors = anchors_at([20, 21, 23])
    together = draft(drafter, row, anchors)
    changed = draft(drafter, perturbed(row, slice(20, None)), anchors)
    assert torch.equal(changed[0], together[0])
    context = DraftContext(row.fc_features, row.positions, row.doc_ids)
    embeddings = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(7))
    alone = drafter(context, anchors_at([21]), embeddings[1:2])
    torch.testing.assert_close(alone[0], together[1], rtol=1e-4, atol=1e-5)


def test_other_documents_do_not_reach_a_block() -> None:
    drafter, anchors = new_drafter(CONFIG), anchors_at([4, 12, 15])
    before = draft(drafter, ROW, anchors)
    after = draft(drafter, perturbed(ROW, slice(0, 9)), anchors)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])


def test_a_document_drafts_alike_wherever_it_is_packed() -> None:
    drafter = new_drafter(CONFIG)
    packed, alone = draft(drafter, ROW, anchors_at([12, 15])), draft(drafter, ROW.cut(9, 23), anchors_at([3, 6]))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["query", "anchor"])
def test_decoding_a_block_equals_training_on_it(rule: str) -> None:
    config = drafter_config(sliding_window_rule=rule)
    drafter, row = new_drafter(config), new_row((14,), config)
    embeddings = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(7))
    decoded = drafter.draft_block(drafter.encode_context(row.fc_features[:10]), embeddings[0])
    trained = draft(drafter, row, anchors_at([10]))[0]
    torch.testing.assert_close(decoded.detach(), trained, rtol=1e-4, atol=1e-5)


def test_padding_anchors_are_finite_and_change_no_other_block() -> None:
    drafter = new_drafter(CONFIG)
    padded = draft(drafter, ROW, anchors_at([4, 12], padding=3))
    assert padded.isfinite().all()
    shape = (5, CONFIG.block_size, CONFIG.hidden_size)
    embeddings = torch.randn(shape, generator=torch.Generator().manual_seed(7))[:2]
    alone = drafter(DraftContext(ROW.fc_features, ROW.positions, ROW.doc_ids), anchors_at([4, 12]), embeddings)
    torch.testing.assert_close(padded[:2], alone, rtol=1e-4, atol=1e-5)


def test_an_anchor_that_is_not_valid_sees_no_context_wherever_it_points() -> None:
    drafter, anchors = new_drafter(CONFIG), Anchors(torch.tensor([12]), torch.tensor([False]))
    assert torch.equal(draft(drafter, ROW, anchors), draft(drafter, perturbed(ROW, slice(0, 12)), anchors))


def test_no_anchors_give_no_blocks() -> None:
    assert draft(new_drafter(CONFIG), ROW, anchors_at([])).shape == (0, 4, 32)


def reference_block(state: dict[str, Tensor], config: DrafterConfig, fc_features: Tensor, embeddings: Tensor) -> Tensor:
    """One block after its context, from the formulas of dflash.md 1.1, head by head; all layers full."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * state[name]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / config.head_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
        return out

    context = norm(fc_features.flatten(1) @ state["fc.weight"].T, "hidden_norm.weight")
    stream, size, num_context = embeddings, config.head_dim, len(context)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        normed = norm(stream, at + "input_layernorm.weight")
        sources = torch.cat([context, normed])
        mixed = []
        for head in range(config.num_attention_heads):
            kv_head = head * config.num_key_value_heads // config.num_attention_heads
            of_q, of_kv = slice(head * size, (head + 1) * size), slice(kv_head * size, (kv_head + 1) * size)
            query = norm(normed @ state[at + "self_attn.q_proj.weight"][of_q].T, at + "self_attn.q_norm.weight")
            key = norm(sources @ state[at + "self_attn.k_proj.weight"][of_kv].T, at + "self_attn.k_norm.weight")
            value = sources @ state[at + "self_attn.v_proj.weight"][of_kv].T
            query = torch.stack([rotate(x, num_context + i) for i, x in enumerate(query)])
            key = torch.stack([rotate(x, i) for i, x in enumerate(key)])
            mixed.append((query @ key.T / size**0.5).softmax(-1) @ value)
        stream = stream + torch.cat(mixed, dim=-1) @ state[at + "self_attn.o_proj.weight"].T
        normed = norm(stream, at + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(normed @ state[at + "mlp.gate_proj.weight"].T)
        stream = stream + (gate * (normed @ state[at + "mlp.up_proj.weight"].T)) @ state[at + "mlp.down_proj.weight"].T
    return norm(stream, "norm.weight")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_context_is_normed_once_and_its_keys_per_head(scale: float) -> None:
    """A context that each layer normed again would not feel the scale; keys left unnormed would feel it twice."""
    config = drafter_config(layer_types=("full_attention",) * 3, sliding_window=None)
    drafter = new_drafter(config).double()
    with torch.no_grad():
        drafter.hidden_norm.weight.mul_(scale)
    fc_features = new_row((10,), config).to(torch.float64).fc_features
    embeddings = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    drafted = drafter.draft_block(drafter.encode_context(fc_features), embeddings)
    expected = reference_block(drafter.state_dict(), config, fc_features, embeddings)
    # Angles are float32 by design.
    torch.testing.assert_close(drafted.detach(), expected, rtol=1e-5, atol=1e-6)


def test_rotary_frequencies_survive_a_cast_to_bfloat16() -> None:
    positions = torch.tensor([0, 1, 30_000])
    tables = rotary_tables(positions, 128, 1e7)
    assert tables.cos.dtype == torch.float32
    frequencies = 1.0 / (1e7 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    assert torch.allclose(tables.cos[2, :64], (30_000 * frequencies).cos(), atol=1e-6)
    assert torch.equal(tables.cos[:, :64], tables.cos[:, 64:])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary_tables(positions, 128, 1e7).sin, tables.sin)
    assert not list(Drafter(CONFIG).buffers()), "a buffer would be cast along with the module"


def test_a_bfloat16_drafter_agrees_with_the_float32_one_at_distant_positions() -> None:
    drafter, anchors = new_drafter(CONFIG), anchors_at([4, 12])
    row = ROW.changed(positions=ROW.positions + 30_000)
    exact = draft(drafter, row, anchors)
    rounded = draft(drafter.to(torch.bfloat16), row, anchors).float()
    assert ((rounded - exact).norm() / exact.norm()).item() < 0.05


def test_autocast_leaves_weights_and_stream_in_float32() -> None:
    drafter, anchors = new_drafter(CONFIG), anchors_at([4, 12])
    exact = draft(drafter, ROW, anchors)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = draft(drafter, ROW.to(torch.bfloat16), anchors)
    assert rounded.dtype == torch.float32
    assert ((rounded - exact).norm() / exact.norm()).item() < 0.05


def test_cached_bfloat16_features_meet_float32_weights() -> None:
    drafter, anchors, row = new_drafter(CONFIG), anchors_at([4]), ROW.to(torch.bfloat16)
    assert torch.equal(draft(drafter, row, anchors), draft(drafter, row.to(torch.float32), anchors))


def test_norm_of_bfloat16_is_taken_in_float32() -> None:
    norm = RMSNorm(64, 1e-6)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = hidden.double() / (hidden.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(hidden), expected.to(torch.bfloat16))
