"""A cache that version 0.1.0 wrote still reads to the same numbers. Never regenerate it: it is what users have."""

from pathlib import Path

import numpy as np
from support.random_caches import CacheShape, all_shards

from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.verify import verify_cache
from dflash_cache.target_head import TargetHead

GOLDEN = Path(__file__).with_name("golden_v1")


def test_the_golden_cache_is_intact() -> None:
    assert verify_cache(FeatureCache.open(GOLDEN)).problems == ()


def test_every_number_is_what_it_was() -> None:
    cache = FeatureCache.open(GOLDEN)
    document = 0
    for data in all_shards(CacheShape()):
        stops = np.cumsum(data.doc_lengths)
        for start, stop in zip(stops - data.doc_lengths, stops, strict=True):
            got = cache.read(document)
            for name in ("input_ids", "loss_mask", "positions", "fc_features", "last_hidden_states"):
                np.testing.assert_array_equal(getattr(got, name), getattr(data, name)[start:stop])
            document += 1


def test_the_identity_and_the_head_are_what_they_were() -> None:
    cache = FeatureCache.open(GOLDEN)
    identity = cache.manifest.identity
    assert cache.manifest.complete
    assert identity.features.fc_layer_indices == (1, 2, 4, 5, 6)
    assert identity.features.last_layer.index == 7
    assert not any(layer.final_norm_applied for layer in (*identity.features.fc_layers, identity.features.last_layer))
    head = TargetHead.load(cache.attached("target_head.safetensors"))
    assert head.spec.final_norm == identity.target.final_norm
    assert tuple(head.lm_head_weight.shape) == (97, 32)


def test_fields_that_came_later_have_the_values_of_that_time() -> None:
    manifest = FeatureCache.open(GOLDEN).manifest
    assert (manifest.identity.corpus.long, manifest.identity.corpus.split) == ("truncate", 0)
    assert manifest.quarantined == ()
