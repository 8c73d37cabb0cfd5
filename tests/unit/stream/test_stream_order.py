"""Which documents are held out, and the order of the others."""

import numpy as np
import pytest

from dflash_cache.stream.order import epoch_order, split_documents


def held_out_ids(doc_ids, **kwargs):
    doc_ids = np.asarray(doc_ids, dtype=np.int64)
    return set(doc_ids[split_documents(doc_ids, **kwargs).held_out].tolist())


def test_split_is_a_partition_in_ascending_order():
    split = split_documents(np.arange(1000, dtype=np.int64), eval_fraction=0.1, seed=3)
    assert sorted([*split.train, *split.held_out]) == list(range(1000))
    assert (np.diff(split.train) > 0).all() and (np.diff(split.held_out) > 0).all()
    assert 60 < len(split.held_out) < 140


def test_side_of_a_document_depends_on_its_id_alone():
    ids = np.arange(0, 3000, 3)
    settings = {"eval_fraction": 0.1, "seed": 5}
    shuffled = np.random.default_rng(0).permutation(ids)
    assert held_out_ids(ids, **settings) == held_out_ids(shuffled, **settings)
    assert held_out_ids(ids[:500], **settings) == held_out_ids(ids, **settings) & set(ids[:500].tolist())


def test_seed_changes_the_split():
    ids = np.arange(1000)
    assert held_out_ids(ids, eval_fraction=0.1, seed=0) != held_out_ids(ids, eval_fraction=0.1, seed=1)


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.999999999])
def test_both_sides_are_never_empty_when_something_is_held_out(count, fraction):
    for seed in range(20):
        split = split_documents(np.arange(count, dtype=np.int64), eval_fraction=fraction, seed=seed)
        assert len(split.train) >= 1 and len(split.held_out) >= 1
        assert len(split.train) + len(split.held_out) == count


def test_nothing_is_held_out_of_one_document_or_at_fraction_zero():
    assert len(split_documents(np.array([4]), eval_fraction=0.9, seed=0).held_out) == 0
    assert len(split_documents(np.arange(50), eval_fraction=0.0, seed=0).held_out) == 0


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.999999999])
def test_parts_of_a_document_stay_on_one_side(fraction):
    ids = np.repeat(np.arange(12), np.arange(1, 13))
    for seed in range(20):
        split = split_documents(ids, eval_fraction=fraction, seed=seed)
        sides = [set(ids[side].tolist()) for side in (split.train, split.held_out)]
        assert not sides[0] & sides[1] and all(sides)
    alone = split_documents(np.full(5, 3), eval_fraction=fraction, seed=0)
    assert (len(alone.train), len(alone.held_out)) == (5, 0)


def test_order_is_a_permutation_that_differs_by_epoch_and_seed_and_repeats():
    documents = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29], dtype=np.int64)
    orders = {(s, e): tuple(epoch_order(documents, seed=s, epoch=e).tolist()) for s in (0, 1) for e in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == documents.tolist() for order in orders.values())
    assert tuple(epoch_order(documents, seed=1, epoch=1).tolist()) == orders[1, 1]


def test_order_is_frozen():
    # A changed order would silently break the resume of every run begun before the change.
    assert epoch_order(np.arange(8, dtype=np.int64), seed=7, epoch=2).tolist() == [0, 3, 5, 1, 4, 2, 6, 7]
    assert held_out_ids(range(40), eval_fraction=0.1, seed=7) == {32, 37}
