"""Where blocks start and what their slots stand for."""

import itertools

import pytest
import torch
from drafter_cases import anchors_at
from torch import Tensor

from dflash_cache.drafter.anchors import Anchors, all_anchors, block_slots, eligible_anchors, sample_anchors
from dflash_cache.errors import ConfigError


def doc_ids_of(*lengths: int, padding: int = 0) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])


def sample(
    loss_mask: Tensor, doc_ids: Tensor, num_anchors: int, *, seed: int = 0, block_size: int = 4
) -> tuple[Anchors, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    anchors = sample_anchors(loss_mask, doc_ids, block_size=block_size, num_anchors=num_anchors, generator=generator)
    return anchors, anchors.positions[anchors.valid].tolist()


@pytest.mark.parametrize("block_size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(1,), (2,), (3,), (4,), (5,), (2, 3), (1, 1, 3)])
def test_eligible_anchors_by_exhaustion(lengths: tuple[int, ...], block_size: int) -> None:
    doc_ids = doc_ids_of(*lengths, padding=1)
    for bits in itertools.product([False, True], repeat=len(doc_ids)):
        mask = torch.tensor(bits)
        expected = [
            bits[p]
            and doc_ids[p] >= 0
            and any(p + s < len(bits) and bits[p + s] and doc_ids[p + s] == doc_ids[p] for s in range(1, block_size))
            for p in range(len(bits))
        ]
        assert eligible_anchors(mask, doc_ids, block_size).tolist() == [bool(e) for e in expected]


def test_a_block_size_beyond_the_row_is_no_obstacle() -> None:
    assert eligible_anchors(torch.ones(3, dtype=torch.bool), doc_ids_of(3), 16).tolist() == [True, True, False]


def test_nothing_supervised_gives_padding_only() -> None:
    anchors, chosen = sample(torch.zeros(8, dtype=torch.bool), doc_ids_of(8), 3)
    assert chosen == []
    assert anchors.positions.tolist() == [0, 0, 0]
    assert len(all_anchors(torch.zeros(8, dtype=torch.bool), doc_ids_of(8), 4).positions) == 0


def test_sampling_is_without_replacement_ascending_padded_and_eligible() -> None:
    mask = torch.rand(200, generator=torch.Generator().manual_seed(5)) < 0.5
    doc_ids = doc_ids_of(90, 20, 60, padding=30)
    eligible = set(eligible_anchors(mask, doc_ids, 4).nonzero()[:, 0].tolist())
    for num_anchors in (1, 7, len(eligible) - 1, len(eligible), len(eligible) + 9):
        anchors, chosen = sample(mask, doc_ids, num_anchors)
        assert anchors.positions.shape == anchors.valid.shape == (num_anchors,)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(num_anchors, len(eligible))
        assert set(chosen) <= eligible
        assert anchors.positions[len(chosen) :].eq(0).all()
        assert not anchors.valid[len(chosen) :].any()


def test_all_anchors_are_the_eligible_positions_and_come_in_equal_chunks() -> None:
    mask, doc_ids = torch.ones(9, dtype=torch.bool), doc_ids_of(5, 4)
    anchors = all_anchors(mask, doc_ids, 4)
    assert anchors.positions.tolist() == [0, 1, 2, 3, 5, 6, 7]
    chunks = list(anchors.chunks(3))
    assert [chunk.positions.tolist() for chunk in chunks] == [[0, 1, 2], [3, 5, 6], [7, 0, 0]]
    assert [chunk.valid.tolist() for chunk in chunks] == [[True] * 3, [True] * 3, [True, False, False]]
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        list(anchors.chunks(0))


def test_short_documents_get_their_share_of_a_packed_row() -> None:
    """speculators spends a row's anchors by length, which starves short chats."""
    doc_ids = doc_ids_of(800, 60, 60, 60, 60)
    mask = torch.ones(len(doc_ids), dtype=torch.bool)
    for seed in range(5):
        anchors, _ = sample(mask, doc_ids, 32 * 5, seed=seed)
        assert anchors.coverage(mask, doc_ids, 4).used == (32,) * 5


def test_what_a_short_document_cannot_use_goes_to_the_others() -> None:
    doc_ids = doc_ids_of(100, 3, 11, 50)
    mask = torch.ones(len(doc_ids), dtype=torch.bool)
    coverage = sample(mask, doc_ids, 60)[0].coverage(mask, doc_ids, 4)
    assert coverage.eligible == (99, 2, 10, 49)
    assert coverage.used == (24, 2, 10, 24)
    assert (coverage.num_eligible, coverage.num_used) == (160, 60)


def test_a_remainder_is_drawn_by_lot() -> None:
    doc_ids = doc_ids_of(30, 30, 30)
    mask = torch.ones(len(doc_ids), dtype=torch.bool)
    used = [sample(mask, doc_ids, 10, seed=seed)[0].coverage(mask, doc_ids, 4).used for seed in range(40)]
    assert set(used) == {(4, 3, 3), (3, 4, 3), (3, 3, 4)}


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 13, 20, 31, 40])
def test_no_document_could_have_more_without_another_having_less_than_it(budget: int) -> None:
    doc_ids = doc_ids_of(2, 4, 4, 9, 1, 20)
    mask = torch.ones(len(doc_ids), dtype=torch.bool)
    coverage = sample(mask, doc_ids, budget)[0].coverage(mask, doc_ids, 4)
    assert coverage.num_used == min(budget, coverage.num_eligible)
    hungry = [used for used, eligible in zip(coverage.used, coverage.eligible, strict=True) if used < eligible]
    assert all(max(coverage.used) - used <= 1 for used in hungry)


def test_each_eligible_position_is_equally_likely() -> None:
    mask, doc_ids = torch.ones(11, dtype=torch.bool), doc_ids_of(11)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(11)
    for _ in range(500):
        drawn = sample_anchors(mask, doc_ids, block_size=4, num_anchors=3, generator=generator)
        counts[drawn.positions] += 1
    assert counts[10] == 0
    assert ((counts[:10] - 150).abs() < 50).all()


def test_the_generator_alone_decides() -> None:
    mask, doc_ids = torch.ones(300, dtype=torch.bool), doc_ids_of(100, 200)
    torch.manual_seed(1)
    first = sample(mask, doc_ids, 20, seed=3)[1]
    torch.manual_seed(2)
    assert sample(mask, doc_ids, 20, seed=3)[1] == first
    assert sample(mask, doc_ids, 20, seed=4)[1] != first
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    draws = [sample_anchors(mask, doc_ids, block_size=4, num_anchors=20, generator=generator) for _ in range(2)]
    assert not torch.equal(draws[0].positions, draws[1].positions)
    resumed = torch.Generator()
    resumed.set_state(state)
    again = [sample_anchors(mask, doc_ids, block_size=4, num_anchors=20, generator=resumed) for _ in range(2)]
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(draws, again, strict=True))


def test_no_anchors_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_anchors must be at least 1, got 0"):
        sample(torch.ones(8, dtype=torch.bool), doc_ids_of(8), 0)


def test_a_block_never_leaves_its_document() -> None:
    doc_ids = doc_ids_of(4, 4, padding=2)
    slots = block_slots(anchors_at([2, 6, 7]), torch.ones(10, dtype=torch.bool), doc_ids, 4)
    assert slots.supervised.tolist() == [
        [False, True, False, False],
        [False, True, False, False],
        [False, False, False, False],
    ]


def test_slots_past_the_end_of_the_row_are_held_inside_it_and_unsupervised() -> None:
    slots = block_slots(anchors_at([1]), torch.ones(3, dtype=torch.bool), doc_ids_of(3), 4)
    assert slots.token_index.tolist() == [[1, 2, 2, 2]]
    assert slots.supervised.tolist() == [[False, True, False, False]]


def test_a_hole_in_the_mask_is_unsupervised_and_what_follows_is_again() -> None:
    mask = torch.tensor([True, False, False, True])
    assert eligible_anchors(mask, doc_ids_of(4), 4).tolist() == [True, False, False, False]
    assert eligible_anchors(mask, doc_ids_of(4), 3).tolist() == [False] * 4
    slots = block_slots(anchors_at([0]), mask, doc_ids_of(4), 4)
    assert slots.supervised.tolist() == [[False, False, False, True]]


def test_padding_tokens_are_in_no_block_whatever_their_mask() -> None:
    mask, doc_ids = torch.ones(8, dtype=torch.bool), doc_ids_of(3, padding=5)
    assert not block_slots(anchors_at([3, 4]), mask, doc_ids, 4).supervised.any()
    assert eligible_anchors(mask, doc_ids, 4).tolist() == [True, True] + [False] * 6


def test_padding_anchors_supervise_nothing() -> None:
    slots = block_slots(anchors_at([1], padding=2), torch.ones(8, dtype=torch.bool), doc_ids_of(8), 4)
    assert slots.supervised.sum(1).tolist() == [3, 0, 0]
