"""A packed row is checked once, and says what is wrong and where."""

from dataclasses import replace

import pytest
import torch

from dflash_cache.stream.batch import PackedBatch


def make_batch(**changes):
    batch = PackedBatch(
        input_ids=torch.tensor([5, 6, 7, 8, 9, 0]),
        positions=torch.tensor([0, 1, 2, 40, 41, 0]),
        doc_ids=torch.tensor([0, 0, 0, 1, 1, -1]),
        loss_mask=torch.tensor([False, True, True, True, True, False]),
        fc_features=torch.ones(6, 2, 4, dtype=torch.bfloat16),
        last_hidden_states=torch.ones(6, 4, dtype=torch.bfloat16),
        corpus_ids=(11, 23),
    )
    return replace(batch, **changes)


def test_a_sound_row_passes_with_pieces_that_begin_inside_their_document():
    batch = make_batch()
    assert batch.check(vocab_size=10) is batch
    assert len(batch) == 6
    assert batch.describe() == "corpus documents 11, 23"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.tensor([5, 6, 7, 8, 10, 0])}, r"input_ids lie in \[0, 10\], expected \[0, 9\]"),
        ({"input_ids": torch.tensor([5, 6, -7, 8, 9, 0])}, r"input_ids lie in \[-7, 9\]"),
        ({"input_ids": torch.tensor([5, 6, 7, 8, 9, 0], dtype=torch.int32)}, "input_ids is torch.int32"),
        ({"positions": torch.tensor([0, 1, 2, 3, 5, 0])}, "positions of corpus document 23"),
        ({"positions": torch.tensor([0, 1, 2, -1, 0, 0])}, "positions of corpus document 23"),
        ({"positions": torch.arange(5)}, "positions is torch.int64"),
        ({"doc_ids": torch.tensor([0, 0, 0, 2, 2, -1])}, r"doc_ids run through \[0, 2, -1\]"),
        ({"doc_ids": torch.tensor([0, 0, 1, 0, 0, -1])}, "doc_ids run through"),
        ({"doc_ids": torch.tensor([-1, 0, 0, 1, 1, 1])}, "doc_ids run through"),
        ({"loss_mask": torch.ones(6, dtype=torch.bool)}, "padding is marked as supervised"),
        ({"loss_mask": torch.ones(6)}, "loss_mask is torch.float32"),
        ({"fc_features": torch.ones(6, 2, 4)}, "fc_features is torch.float32"),
        ({"fc_features": torch.ones(6, 2, 5, dtype=torch.bfloat16)}, "fc_features are 5 wide"),
        ({"fc_features": torch.ones(7, 2, 4, dtype=torch.bfloat16)}, "fc_features is"),
        ({"last_hidden_states": torch.ones(6, 2, 4, dtype=torch.bfloat16)}, "last_hidden_states is"),
    ],
)
def test_a_faulty_row_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        make_batch(**changes).check(vocab_size=10)


def test_replacing_features_leaves_targets_alone():
    batch = make_batch()
    noised = batch.with_fc_features(batch.fc_features + 1)
    assert noised.last_hidden_states is batch.last_hidden_states
    assert noised.input_ids is batch.input_ids
