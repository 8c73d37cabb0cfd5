"""Packing documents into rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.stream.packing import Piece, pack_documents


def pack(lengths, row_tokens, order=None, **kwargs):
    order = np.arange(len(lengths)) if order is None else np.asarray(order)
    return pack_documents(order.astype(np.int64), np.asarray(lengths, dtype=np.int64), row_tokens=row_tokens, **kwargs)


def rows_of(plans):
    return [plans.row(number) for number in range(len(plans))]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    row_tokens=st.integers(1, 30),
    lookahead=st.integers(1, 8),
)
def test_every_token_is_in_exactly_one_row_and_no_row_overflows(lengths, row_tokens, lookahead):
    plans = pack(lengths, row_tokens, lookahead=lookahead)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for row in rows_of(plans):
        assert 0 < sum(piece.stop - piece.start for piece in row) <= row_tokens
        for piece in row:
            seen[piece.document][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in seen)
    assert plans.num_tokens == sum(lengths)


def test_long_documents_are_cut_into_row_sized_pieces_at_their_true_positions():
    rows = rows_of(pack([25], 10))
    assert rows == [(Piece(0, 0, 10),), (Piece(0, 10, 20),), (Piece(0, 20, 25),)]


def test_longest_fitting_piece_fills_a_row_and_ties_keep_the_given_order():
    rows = rows_of(pack([6, 3, 4, 4, 2], 10))
    assert rows == [(Piece(0, 0, 6), Piece(2, 0, 4)), (Piece(1, 0, 3), Piece(3, 0, 4), Piece(4, 0, 2))]


def test_only_the_given_documents_are_packed_and_the_oldest_opens_a_row():
    rows = rows_of(pack([5, 9, 7, 3], 10, order=[3, 1, 2]))
    assert rows == [(Piece(3, 0, 3), Piece(2, 0, 7)), (Piece(1, 0, 9),)]


def test_lookahead_bounds_how_far_a_document_is_moved():
    lengths = [6] * 50 + [4]
    assert rows_of(pack(lengths, 10, lookahead=4))[0] == (Piece(0, 0, 6),)
    assert rows_of(pack(lengths, 10, lookahead=64))[0] == (Piece(0, 0, 6), Piece(50, 0, 4))


def test_no_piece_waits_while_others_pass_it_for_ever():
    # Six-token documents fit nowhere beside an eight-token one: they still open rows in their turn.
    rows = rows_of(pack([8, 6, 8, 8, 8, 8], 10, lookahead=3))
    assert rows[1] == (Piece(1, 0, 6),)


def test_mixed_lengths_fill_rows_well():
    lengths = np.random.default_rng(0).integers(20, 900, 2000)
    plans = pack(lengths, 2048)
    assert plans.fill > 0.98


def test_packing_is_deterministic():
    lengths = np.random.default_rng(1).integers(1, 300, 500)
    assert rows_of(pack(lengths, 512)) == rows_of(pack(lengths, 512))


def test_nothing_to_pack():
    plans = pack([], 10)
    assert len(plans) == 0 and plans.fill == 0.0 and plans.num_tokens == 0


@pytest.mark.parametrize("row_tokens", [10, 11])
def test_fill_counts_capacity(row_tokens):
    assert pack([10, 10], row_tokens).fill == pytest.approx(10 / row_tokens)
