"""Length batches: a partition, within budget, and the same every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.corpus.batches import length_batches


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=50), max_size=40), budget=st.integers(min_value=1, max_value=99)
)
@settings(deadline=None, max_examples=200)
def test_every_document_is_in_exactly_one_batch_and_every_batch_within_budget(lengths: list[int], budget: int) -> None:
    batches = length_batches(np.asarray(lengths, dtype=np.int64), budget)
    flat = [int(index) for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= budget or len(batch) == 1
    by_length = [lengths[i] for i in flat]
    assert by_length == sorted(lengths, reverse=True)


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=9), min_size=2, max_size=30),
    budget=st.integers(min_value=1, max_value=60),
)
@settings(deadline=None, max_examples=100)
def test_no_batch_could_take_the_first_document_of_the_next(lengths: list[int], budget: int) -> None:
    batches = length_batches(np.asarray(lengths, dtype=np.int64), budget)
    for batch in batches[:-1]:
        assert lengths[batch[0]] * (len(batch) + 1) > budget


def test_documents_of_equal_length_keep_their_order() -> None:
    batches = length_batches(np.asarray([3, 5, 3, 5, 3], dtype=np.int64), 10)
    assert [batch.tolist() for batch in batches] == [[1, 3], [0, 2, 4]]


def test_a_document_longer_than_the_budget_is_alone() -> None:
    batches = length_batches(np.asarray([2, 100, 2], dtype=np.int64), 8)
    assert [batch.tolist() for batch in batches] == [[1], [0, 2]]


def test_no_documents_give_no_batches() -> None:
    assert length_batches(np.zeros(0, dtype=np.int64), 8) == []


@pytest.mark.parametrize(("lengths", "budget", "named"), [([1], 0, "batch_tokens"), ([4, 0], 8, "document 1")])
def test_impossible_numbers_are_refused(lengths: list[int], budget: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        length_batches(np.asarray(lengths, dtype=np.int64), budget)
