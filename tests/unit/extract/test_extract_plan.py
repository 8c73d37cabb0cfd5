"""Shards, windows and batches are pure functions of the lengths."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.extract.plan import (
    default_shard_tokens,
    default_window_tokens,
    pending_batches,
    plan_extraction,
)

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 150), st.integers(1, 400))
def test_shards_are_whole_consecutive_documents_within_their_size(
    lengths: list[int], shard_tokens: int, window_tokens: int
) -> None:
    plan = plan_extraction(np.array(lengths), shard_tokens, window_tokens)
    covered = []
    for number, shard in enumerate(plan.shards):
        documents = range(shard.first_document, shard.end_document)
        covered += documents
        assert shard.number == number
        assert shard.num_tokens == sum(lengths[i] for i in documents)
        assert shard.num_tokens <= shard_tokens or shard.num_documents == 1
        # full: the next document would not have fitted
        if shard.end_document < len(lengths):
            assert shard.num_tokens + lengths[shard.end_document] > shard_tokens
    assert covered == list(range(len(lengths)))
    for window in plan.windows:
        assert sum(s.num_tokens for s in window.shards) <= window_tokens or len(window.shards) == 1


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 150), st.integers(1, 400), st.integers(1, 200), st.data())
def test_a_continued_run_makes_the_same_batches(
    lengths: list[int], shard_tokens: int, window_tokens: int, batch_tokens: int, data: st.DataObject
) -> None:
    array = np.array(lengths)
    plan = plan_extraction(array, shard_tokens, window_tokens)
    sealed_shards = data.draw(st.integers(0, len(plan.shards)))
    num_sealed = sum(s.num_documents for s in plan.shards[:sealed_shards])
    for window in plan.windows:
        whole = [batch.tolist() for batch in pending_batches(window, array, batch_tokens, 0)]
        continued = [batch.tolist() for batch in pending_batches(window, array, batch_tokens, num_sealed)]
        assert sorted(i for batch in whole for i in batch) == list(range(window.first_document, window.end_document))
        assert continued == [batch for batch in whole if any(i >= num_sealed for i in batch)]


def test_the_defaults_for_qwen36_27b() -> None:
    per_token = 6 * 5120 * 2
    assert default_shard_tokens(per_token) * per_token <= 512 << 20 < (default_shard_tokens(per_token) + 1) * per_token
    assert default_window_tokens(8192, per_token) == (8 << 30) // per_token
    assert default_window_tokens(8192, 100) == 32 * 8192
