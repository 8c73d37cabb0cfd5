"""Caches that training refuses: nothing is guessed."""

import pytest
import torch
from support.caches import make_documents, make_head, make_identity
from support.training import packed_row, tiny_drafter_config

from dflash_cache.errors import CacheDamagedError, CacheFormatError, NonFiniteError
from dflash_cache.format.manifest import CacheManifest
from dflash_cache.spec import FinalNormSpec, LayerSpec
from dflash_cache.target_head import HeadSpec, TargetHead
from dflash_cache.train.cache_checks import check_features, check_head, implausible_head


def manifest_with(**features):
    identity = make_identity(make_documents((10,)), features=features)
    return CacheManifest.model_construct(identity=identity, complete=True, shards=())


@pytest.mark.parametrize(
    ("features", "message"),
    [
        # B05, B07
        (
            {"last_layer": LayerSpec(index=7, final_norm_applied=True)},
            r"features.last_layer \(layer 7\) was stored after the target's final norm",
        ),
        (
            {"fc_layers": (LayerSpec(index=1, final_norm_applied=False), LayerSpec(index=7, final_norm_applied=True))},
            r"features.fc_layers\[1\] \(layer 7\) was stored after the target's final norm",
        ),
        (
            {"last_layer": LayerSpec(index=4, final_norm_applied=False)},
            "features.last_layer is layer 4, expected the last one, 7",
        ),
        (
            {"fc_layers": (LayerSpec(index=40, final_norm_applied=False),)},
            r"features.fc_layers\[0\] is layer 40, but tiny/target has layers 0 to 7",
        ),
        ({"fc_layers": ()}, "features.fc_layers is empty"),
        ({"hidden_size": 32}, "features.hidden_size is 32, the target's is 16"),
    ],
)
def test_tensors_that_training_is_not_defined_on_are_refused(tmp_path, features, message):
    with pytest.raises(CacheFormatError, match=message):
        check_features(tmp_path, manifest_with(**features), allow_incomplete=False)


def test_a_missing_norm_flag_is_not_a_default():
    # B07
    with pytest.raises(ValueError, match="final_norm_applied"):
        LayerSpec(index=3)


def test_an_unfinished_cache_is_refused_unless_allowed(tmp_path):
    manifest = manifest_with().model_copy(update={"complete": False})
    with pytest.raises(CacheFormatError, match="0 of 1 documents are extracted"):
        check_features(tmp_path, manifest, allow_incomplete=False)
    check_features(tmp_path, manifest, allow_incomplete=True)


@pytest.fixture
def documents():
    return make_documents((40, 30))


def checked(tmp_path, documents, head):
    manifest = CacheManifest.model_construct(identity=make_identity(documents), complete=True)
    check_head(tmp_path / "target_head.safetensors", head, manifest, tiny_drafter_config(documents))


def head_with(**changes):
    head = make_head()
    tensors = {"embedding": head.embedding, "norm_weight": head.norm_weight, "lm_head_weight": head.lm_head_weight}
    return TargetHead(changes.pop("spec", head.spec), **{**tensors, **changes})


def test_a_head_of_another_target_is_refused_by_tensor(tmp_path, documents):
    checked(tmp_path, documents, head_with())
    for name, tensor in (("embedding", torch.ones(60, 16)), ("lm_head_weight", torch.ones(64, 8))):
        with pytest.raises(CacheDamagedError, match=rf"{name} is .* implies \[64, 16\]"):
            checked(tmp_path, documents, head_with(**{name: tensor}))
    spec = HeadSpec(final_norm=FinalNormSpec(kind="rms_one_plus", eps=1e-6), embedding_scale=1.0, tied=False)
    with pytest.raises(CacheDamagedError, match="its final norm is kind='rms_one_plus'"):
        checked(tmp_path, documents, head_with(spec=spec))


def test_a_head_that_is_not_finite_is_refused(tmp_path, documents):
    broken = make_head().norm_weight.clone()
    broken[3] = float("nan")
    with pytest.raises(NonFiniteError, match="norm_weight holds NaN"):
        checked(tmp_path, documents, head_with(norm_weight=broken))


def test_head_and_states_that_do_not_belong_together_are_noticed(documents):
    # B06: here states are made so that the head names the next token; then the head is another one.
    head = make_head()
    row = packed_row(documents)
    last = torch.zeros_like(row.last_hidden_states)
    # Any state whose projection is largest at the next token: that token's own row, as random rows hardly correlate.
    last[:-1] = (head.lm_head_weight[row.input_ids[1:]] / head.norm_weight).to(torch.bfloat16)
    last[-1] = 1
    predicting = row.__class__(**{**vars(row), "last_hidden_states": last})
    assert implausible_head(predicting, head) is None
    assert "names the next token at" in implausible_head(predicting, make_head(seed=5))
    silent = row.__class__(**{**vars(row), "loss_mask": torch.zeros_like(row.loss_mask)})
    assert implausible_head(silent, head) is None
