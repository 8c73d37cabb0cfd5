"""Rows as they come out of a cache, and what happens when the cache is not sound."""

import threading

import numpy as np
import pytest
import torch
from support.caches import bfloat16_bits, make_cache, make_documents

from dflash_cache.errors import CacheDamagedError, NonFiniteError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.stream.loader import RowPrefetcher, RowReader
from dflash_cache.stream.packing import Piece


def open_reader(contents):
    return RowReader(FeatureCache.open(contents.folder))


def test_row_holds_exactly_the_stored_numbers(tmp_path):
    contents = make_cache(tmp_path / "cache")
    pieces = (Piece(3, 5, 20), Piece(0, 0, 40), Piece(1, 11, 12))
    batch = open_reader(contents).read(pieces)
    stored = [contents.documents[piece.document] for piece in pieces]

    def expected(name):
        return np.concatenate([getattr(d, name)[p.start : p.stop] for d, p in zip(stored, pieces, strict=True)])

    assert np.array_equal(batch.input_ids.numpy(), expected("input_ids"))
    assert np.array_equal(batch.loss_mask.numpy(), expected("loss_mask"))
    assert np.array_equal(batch.fc_features.view(torch.uint16).numpy(), bfloat16_bits(expected("fc_features")))
    assert np.array_equal(
        batch.last_hidden_states.view(torch.uint16).numpy(), bfloat16_bits(expected("last_hidden_states"))
    )
    assert batch.positions.tolist() == [*range(5, 20), *range(40), 11]
    assert batch.doc_ids.tolist() == [0] * 15 + [1] * 40 + [2]
    assert batch.corpus_ids == tuple(contents.doc_ids[piece.document] for piece in pieces)


def test_a_document_is_the_same_alone_and_packed(tmp_path):
    # B21, B22: nothing is padded, whatever a document shares its row with.
    reader = open_reader(make_cache(tmp_path / "cache"))
    alone, packed = reader.read((Piece(2, 0, 25),)), reader.read((Piece(0, 0, 40), Piece(2, 0, 25)))
    assert len(alone) == 25 and len(packed) == 65
    for name in ("input_ids", "positions", "loss_mask", "fc_features", "last_hidden_states"):
        assert torch.equal(getattr(packed, name)[40:], getattr(alone, name))


@pytest.mark.parametrize(
    ("plane", "layer", "value", "message"),
    [
        ("fc_features", 1, np.nan, "fc_features of layer 3 at position 7 hold NaN or infinity"),
        ("fc_features", 2, -np.inf, "fc_features of layer 4 at position 7 hold NaN or infinity"),
        ("fc_features", 0, 0.0, "fc_features of layer 1 at position 7 are all zero"),
        ("last_hidden_states", None, np.nan, "last_hidden_states of layer 7 at position 7 hold NaN or infinity"),
        ("last_hidden_states", None, -0.0, "last_hidden_states of layer 7 at position 7 are all zero"),
    ],
)
def test_bad_states_are_refused_naming_cache_shard_and_document(tmp_path, plane, layer, value, message):
    # B12, B13
    documents = make_documents((40, 12, 25, 33, 20))
    states = getattr(documents[4], plane)
    state = states[7] if layer is None else states[7, layer]
    if value == 0.0:
        state[:] = value
    else:
        state[3] = value
    contents = make_cache(tmp_path / "cache", documents)
    reader = open_reader(contents)
    with pytest.raises(NonFiniteError, match=message) as caught:
        reader.read((Piece(0, 0, 40), Piece(4, 2, 20)))
    assert "shard-00001.zarr, corpus document 5:" in str(caught.value)
    assert str(contents.folder) in str(caught.value)
    reader.read((Piece(0, 0, 40), Piece(4, 8, 20)))  # what is sound stays readable


def test_states_with_single_zeros_and_large_values_are_fine(tmp_path):
    documents = make_documents((10,))
    documents[0].fc_features[:, :, 1:] = 0.0
    documents[0].last_hidden_states[3, 2] = 3e38
    open_reader(make_cache(tmp_path / "cache", documents)).read((Piece(0, 0, 10),))


def test_a_flipped_bit_is_an_error_that_names_file_and_document(tmp_path):
    contents = make_cache(tmp_path / "cache")
    path = contents.folder / "shard-00000.zarr" / "fc_features" / "c.0.0.0"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheDamagedError, match=r"corpus document 0 of the cache .*fc_features.*checksum"):
        open_reader(contents).read((Piece(0, 0, 40),))


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    documents = make_documents((10,))
    documents[0].input_ids[4] = 64
    with pytest.raises(CacheDamagedError, match=r"input_ids lie in .* expected \[0, 63\] in corpus document 0"):
        open_reader(make_cache(tmp_path / "cache", documents)).read((Piece(0, 0, 10),))


def test_prefetcher_keeps_the_order_and_reads_only_so_far_ahead(tmp_path):
    reader = open_reader(make_cache(tmp_path / "cache"))
    asked = []

    def rows():
        for number in range(20):
            asked.append(number)
            yield (Piece(0, number, number + 5),)

    with RowPrefetcher(reader, rows(), depth=3) as prefetcher:
        for number in range(20):
            assert next(prefetcher).positions[0] == number
            assert len(asked) <= number + 1 + 3
        with pytest.raises(StopIteration):
            next(prefetcher)


def test_prefetcher_raises_a_readers_error_in_its_place_in_the_order(tmp_path):
    documents = make_documents((10, 10, 10))
    documents[1].fc_features[5] = np.nan
    reader = open_reader(make_cache(tmp_path / "cache", documents))
    with RowPrefetcher(reader, [(Piece(i, 0, 10),) for i in range(3)]) as prefetcher:
        next(prefetcher)
        with pytest.raises(NonFiniteError, match="corpus document 1:"):
            next(prefetcher)


def test_leaving_early_ends_the_reading_threads(tmp_path):
    reader = open_reader(make_cache(tmp_path / "cache"))
    before = threading.active_count()
    with RowPrefetcher(reader, ((Piece(0, 0, 40),) for _ in range(10_000))) as prefetcher:
        next(prefetcher)
        assert threading.active_count() > before
    assert threading.active_count() == before
