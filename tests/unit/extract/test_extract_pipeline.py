"""What lies in a finished cache is what the target computes, however the corpus was batched."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corpora import write_texts
from support.extraction import planes_of, small_config

from dflash_cache.errors import NonFiniteError, SelfCheckError
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.runner import extract
from dflash_cache.extract.target import TargetFiles
from dflash_cache.format.cache import FeatureCache

Opened = Callable[[str], tuple[TargetFiles, LoadedTarget]]
Folder = Callable[[str], Path]


def _oracle(target: LoadedTarget, input_ids: np.ndarray) -> np.ndarray:
    """Unbatched, unpadded, through transformers' own hidden states; the last layer by what its norm is given."""
    seen: list[torch.Tensor] = []
    handle = target.decoder.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        states = target.decoder(
            input_ids=torch.from_numpy(input_ids.astype(np.int64))[None], output_hidden_states=True
        ).hidden_states
    handle.remove()
    planes = [states[1], states[2], states[4], seen[0]]
    return torch.stack([plane[0] for plane in planes], dim=1).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("name", ["dense", "hybrid", "gemma3"])
def test_every_document_equals_the_oracle(
    name: str, opened: Opened, target_folder: Folder, corpus_files: tuple[Path, ...], tmp_path: Path
) -> None:
    # Documents of one batch never see each other, on recurrent layers either (B66); convention and norm (B01, B05).
    _, target = opened(name)
    extract(small_config(target_folder(name), corpus_files, tmp_path))
    cache = FeatureCache.open(tmp_path)
    stored = planes_of(tmp_path)
    assert len(stored) == cache.manifest.identity.corpus.num_documents
    for document in range(len(cache.index.length)):
        piece = cache.read(document)
        expected = _oracle(target, piece.input_ids)
        found = stored[int(cache.index.doc_id[document])]
        assert found.shape == expected.shape
        # rounding to bfloat16 may fall to the other side where float32 differs in its last bits
        assert np.isclose(found, expected, rtol=2**-7, atol=1e-4).all()
        assert (found == expected).mean() > 0.99


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_batching_changes_no_document(
    name: str, target_folder: Folder, corpus_files: tuple[Path, ...], tmp_path: Path
) -> None:
    # B14: batch 1, large batches, and another order of the same documents.
    one = small_config(target_folder(name), corpus_files, tmp_path / "one", batch_tokens=1)
    many = small_config(target_folder(name), corpus_files, tmp_path / "many", batch_tokens=4000, window_tokens=9000)
    turned = small_config(target_folder(name), corpus_files[::-1], tmp_path / "turned")
    for config in (one, many, turned):
        extract(config)
    first, second = planes_of(tmp_path / "one"), planes_of(tmp_path / "many")
    counts = [sum(1 for _ in path.open()) for path in corpus_files]
    third = {
        (doc_id - counts[1] if doc_id >= counts[1] else doc_id + counts[0]): rows
        for doc_id, rows in planes_of(tmp_path / "turned").items()
    }
    assert set(first) == set(second) == set(third)
    for doc_id, rows in first.items():
        for other in (second[doc_id], third[doc_id]):
            assert np.isclose(rows, other, rtol=2**-7, atol=1e-4).all()


def test_lengths_at_the_edge_agree_in_every_array(target_folder: Folder, tmp_path: Path) -> None:
    # B19: documents of exactly the maximum length, one longer, and the shortest.
    data = write_texts(tmp_path / "data.jsonl", 30, shortest=2, longest=40)
    report = extract(small_config(target_folder("dense"), (data,), tmp_path / "cache", corpus={"max_length": 24}))
    cache = FeatureCache.open(tmp_path / "cache")
    lengths = cache.index.length
    assert lengths.max() == 24 and (lengths == 24).sum() >= report.corpus.documents_truncated > 0
    for document, length in enumerate(lengths):
        piece = cache.read(document)
        for values in (piece.input_ids, piece.loss_mask, piece.positions, piece.fc_features, piece.last_hidden_states):
            assert len(values) == length


def test_the_manifest_says_that_no_norm_was_applied(target_folder: Folder, tmp_path: Path) -> None:
    # B07: a flag, not a default.
    data = write_texts(tmp_path / "data.jsonl", 4)
    manifest = extract(small_config(target_folder("dense"), (data,), tmp_path / "cache")).manifest
    features = manifest.identity.features
    assert [layer.final_norm_applied for layer in (*features.fc_layers, features.last_layer)] == [False] * 4
    assert (features.fc_layer_indices, features.last_layer.index) == ((0, 1, 3), 5)


def test_the_last_layer_may_be_an_fc_layer_too(target_folder: Folder, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data.jsonl", 6)
    extract(small_config(target_folder("dense"), (data,), tmp_path / "cache", fc_layers=(2, 5)))
    for rows in planes_of(tmp_path / "cache").values():
        assert np.array_equal(rows[:, 1], rows[:, 2]) and not np.array_equal(rows[:, 0], rows[:, 1])


def _spoilt(folder: Path, to: Path, spoil: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    spoil(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _overflow_for_token(token: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token] = 3.4e38  # a float32, infinite as bfloat16

    return spoil


def test_an_infinity_names_the_document_and_the_layer_and_seals_nothing_of_it(
    target_folder: Folder, opened: Opened, tmp_path: Path
) -> None:
    files, _ = opened("dense")
    token = files.tokenizer.encode("@", add_special_tokens=False)[0]
    folder = _spoilt(target_folder("dense"), tmp_path / "model", _overflow_for_token(token))
    data = write_texts(tmp_path / "data.jsonl", 30)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:25], '{"text": "all @ once"}', *lines[25:]]) + "\n")
    with pytest.raises(NonFiniteError, match=r"document 25 of the corpus, token \d+: the fc features of layer 0"):
        extract(small_config(folder, (data,), tmp_path / "cache"))
    sealed = FeatureCache.open(tmp_path / "cache")
    assert 0 < len(sealed.index.length) <= 25
    assert all(np.isfinite(rows).all() for rows in planes_of(tmp_path / "cache").values())


def test_rows_of_zeros_are_refused(target_folder: Folder, opened: Opened, tmp_path: Path) -> None:
    files, _ = opened("dense")
    token = files.tokenizer.encode("@", add_special_tokens=False)[0]

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token] = 0
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()

    folder = _spoilt(target_folder("dense"), tmp_path / "model", silence)
    data = write_texts(tmp_path / "data.jsonl", 4)
    data.write_text(data.read_text() + '{"text": "all @ once"}\n')
    with pytest.raises(SelfCheckError, match=r"document 4 of the corpus.*only zeros"):
        extract(small_config(folder, (data,), tmp_path / "cache"))


def test_bits_are_those_of_bfloat16_rounding(target_folder: Folder, opened: Opened, tmp_path: Path) -> None:
    # B62: known patterns survive; the first layer's output is compared as bits.
    _, target = opened("dense")
    data = write_texts(tmp_path / "data.jsonl", 1, shortest=20)
    extract(small_config(target_folder("dense"), (data,), tmp_path / "cache"))
    piece = FeatureCache.open(tmp_path / "cache").read(0)
    with torch.inference_mode():
        own = target.decoder(
            input_ids=torch.from_numpy(piece.input_ids.astype(np.int64))[None], output_hidden_states=True
        ).hidden_states[1][0]
    bits: Any = own.numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even
    assert np.array_equal(piece.fc_features[:, 0], rounded)
