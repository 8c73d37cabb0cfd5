"""Who may look at whom."""

import pytest
import torch
from torch import Tensor

from dflash_cache.drafter.attention import BlockPlacement, SlidingWindow, attend, visibility

WINDOWS = [None, SlidingWindow(6, "query"), SlidingWindow(6, "anchor")]


def place(
    anchor_index: list[int], doc_lengths: tuple[int, ...], *, block_size: int = 4, valid: list[bool] | None = None
) -> BlockPlacement:
    doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(doc_lengths)] + [torch.tensor([-1, -1])])
    index = torch.tensor(anchor_index)
    anchor_doc = doc_ids[index].masked_fill(~torch.tensor(valid or [True] * len(anchor_index)), -1)
    return BlockPlacement(index, anchor_doc, doc_ids, block_size)


def by_element(placement: BlockPlacement, window: SlidingWindow | None) -> Tensor:
    """dflash.md section 3, one pair of query and key at a time."""
    num_context, block_size = len(placement.doc_ids), placement.block_size
    num_slots = len(placement.anchor_index) * block_size
    visible = torch.zeros(num_slots, num_context + num_slots, dtype=torch.bool)
    for query in range(num_slots):
        block, slot = divmod(query, block_size)
        anchor, doc = int(placement.anchor_index[block]), int(placement.anchor_doc[block])
        for key in range(num_context):
            sees = key < anchor and doc != -1 and int(placement.doc_ids[key]) == doc
            if window is not None and window.rule == "query":
                sees = sees and (anchor + slot) - key < window.size
            elif window is not None:
                sees = sees and key >= anchor - window.size
            visible[query, key] = sees
        for key in range(num_slots):
            key_block, key_slot = divmod(key, block_size)
            visible[query, num_context + key] = key_block == block and (window is None or key_slot <= slot)
    return visible


@pytest.mark.parametrize("window", WINDOWS)
def test_visibility_element_by_element(window: SlidingWindow | None) -> None:
    placement = place([3, 4, 12, 13, 20, 0], (9, 14), valid=[True] * 5 + [False])
    assert torch.equal(visibility(placement, window), by_element(placement, window))


def test_windows_differ_only_in_later_slots_of_anchors_beyond_the_window() -> None:
    placement = place([10], (14,))
    query = visibility(placement, SlidingWindow(6, "query"))[:, :14].sum(1).tolist()
    anchor = visibility(placement, SlidingWindow(6, "anchor"))[:, :14].sum(1).tolist()
    assert (query, anchor) == ([5, 4, 3, 2], [6, 6, 6, 6])
    early = place([4], (14,))
    assert visibility(early, SlidingWindow(8, "query")).equal(visibility(early, SlidingWindow(8, "anchor")))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_anchors_own_state_and_other_documents_are_hidden(window: SlidingWindow | None) -> None:
    visible = visibility(place([12], (9, 14)), window)[:, :25]
    assert visible.any(0).nonzero()[:, 0].tolist() == [9, 10, 11]


def test_full_layers_see_their_block_both_ways_and_sliding_layers_only_back() -> None:
    placement = place([3], (9,))
    assert visibility(placement, None)[:, 11:].all()
    assert visibility(placement, WINDOWS[1])[:, 11:].equal(torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("window", WINDOWS)
def test_overlapping_and_equal_blocks_do_not_see_each_other(window: SlidingWindow | None) -> None:
    in_blocks = visibility(place([4, 5, 5, 7], (9,)), window)[:, 11:].view(4, 4, 4, 4)
    for query_block in range(4):
        for key_block in range(4):
            assert bool(in_blocks[query_block, :, key_block].any()) == (query_block == key_block)


@pytest.mark.parametrize("window", WINDOWS)
def test_padding_anchors_see_their_own_block_only(window: SlidingWindow | None) -> None:
    for index in (0, 5, 10):
        visible = visibility(place([index], (9,), valid=[False]), window)
        assert not visible[:, :11].any()
        assert visible[:, 11:].diagonal().all()


@pytest.mark.parametrize("window", WINDOWS)
def test_a_block_after_the_whole_context_sees_it(window: SlidingWindow | None) -> None:
    after = BlockPlacement(torch.tensor([9]), torch.tensor([0]), torch.zeros(9, dtype=torch.int64), 4)
    inside = place([9], (14,))
    expected = visibility(inside, window)
    assert visibility(after, window).equal(torch.cat([expected[:, :9], expected[:, 16:]], dim=1))


def test_attention_hides_what_is_not_visible_and_shares_key_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 10, 8, generator=generator, dtype=torch.float64)
    visible = torch.rand(6, 10, generator=generator) < 0.4
    visible[:, 0] = True
    expected = torch.empty_like(query)
    for head in range(4):
        scores = query[head] @ key[head // 2].T / 8**0.5
        weights = scores.exp() * visible
        expected[head] = weights / weights.sum(1, keepdim=True) @ value[head // 2]
    torch.testing.assert_close(attend(query, key, value, visible), expected)
