"""The self-check notices every way in which stored states were seen to be wrong (B05 to B19, trap 3)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.extraction import small_config
from support.families import build_glm4_moe, build_qwen3_moe
from support.targets import build_dense
from torch import nn

from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.corpus.tokenize import tokenize_corpus
from dflash_cache.errors import DflashCacheError, NonFiniteError, SelfCheckError
from dflash_cache.extract.features import FeatureExtractor
from dflash_cache.extract.head import FoundHead, find_head
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.mask_token import MaskTokenProposal
from dflash_cache.extract.selfcheck import SelfCheckReport, run_self_check, spread_over_lengths
from dflash_cache.extract.target import TargetFiles, open_target
from dflash_cache.format.manifest import CacheIdentity, CorpusSpec, ExtractSettings
from dflash_cache.format.shard import ShardData
from dflash_cache.format.writer import CacheWriter
from dflash_cache.spec import FeatureSpec, FinalNormSpec
from dflash_cache.target_head import TargetHead

Opened = Callable[[str], tuple[TargetFiles, LoadedTarget]]
NAMES = ["dense", "hybrid", "gemma3"]
Rows = torch.Tensor


class Bench:
    """Computes, stores and checks the first documents of a corpus, with a place to spoil each step."""

    def __init__(self, files: TargetFiles, target: LoadedTarget, corpus: TokenizedCorpus, folder: Path) -> None:
        self.files, self.target, self.corpus, self.folder = files, target, corpus, folder
        self.found = find_head(target)
        self.features = FeatureSpec.for_layers((0, 1, 3), num_layers=files.num_layers, hidden_size=files.hidden_size)
        self.documents = [corpus.document(i) for i in range(6)]

    def rows(self, target: LoadedTarget | None = None) -> Rows:
        with FeatureExtractor(target or self.target, self.features, 0) as extractor:
            return extractor.run([document.input_ids for document in self.documents]).clone()

    def check(self, rows: Rows, found: FoundHead | None = None, target: LoadedTarget | None = None) -> SelfCheckReport:
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        lengths = [len(document.input_ids) for document in self.documents]
        data = ShardData(
            input_ids=np.concatenate([document.input_ids for document in self.documents]),
            loss_mask=np.concatenate([document.loss_mask for document in self.documents]),
            positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
            doc_lengths=np.array(lengths, dtype=np.int32),
            doc_ids=np.array([document.doc_id for document in self.documents], dtype=np.int64),
            fc_features=np.ascontiguousarray(bits[:, :-1]),
            last_hidden_states=np.ascontiguousarray(bits[:, -1]),
        )
        with CacheWriter(self.folder, self._identity()) as writer, ExitStack() as stack:
            reader = writer.open_staged(writer.stage(0, 0, data))
            stack.callback(reader.close)
            return run_self_check(target or self.target, found or self.found, self.features, reader, 6)

    def with_norm(self, norm: FinalNormSpec) -> FoundHead:
        head = self.found.head
        spoilt = TargetHead(
            head.spec.model_copy(update={"final_norm": norm}),
            embedding=head.embedding,
            norm_weight=head.norm_weight,
            lm_head_weight=head.lm_head_weight,
        )
        return replace(self.found, head=spoilt)

    def _identity(self) -> CacheIdentity:
        return CacheIdentity(
            target=self.files.spec(MaskTokenProposal(3, "test", 0), self.found.head.spec.final_norm, tied=False),
            features=self.features,
            corpus=CorpusSpec(
                digest="0" * 32,
                num_documents=6,
                num_tokens=9,
                supervised_tokens=3,
                max_length=99,
                template_digest=None,
                template_kwargs={},
                mask_token_uses=0,
                dropped={},
                truncated=0,
            ),
            settings=ExtractSettings(
                codec="compact",
                batch_tokens=1,
                shard_tokens=1,
                window_tokens=1,
                attention="sdpa",
                device_type="cpu",
            ),
        )


@pytest.fixture(params=NAMES)
def bench(
    request: pytest.FixtureRequest, opened: Opened, corpus_files: tuple[Path, ...], tmp_path: Path
) -> Iterator[Bench]:
    files, target = opened(request.param)
    corpus = tokenize_corpus(
        small_config(Path("unused"), corpus_files, Path("unused")).corpus, files.tokenizer, tmp_path / "tokens"
    )
    (tmp_path / "cache").mkdir()
    yield Bench(files, target, corpus, tmp_path / "cache")


def _expect(bench: Bench, message: str, rows: Rows, kind: type[DflashCacheError] = SelfCheckError) -> None:
    with pytest.raises(kind, match=message):
        bench.check(rows)


def test_honest_states_pass(bench: Bench) -> None:
    report = bench.check(bench.rows())
    assert report.agreement == 1.0
    assert report.decisive > 0.5 * report.positions > 50
    assert report.worst.error < 1e-3
    assert [plane.layer for plane in report.planes] == [0, 1, 3, len(bench.target.layers) - 1]


def test_hooks_one_layer_too_deep(bench: Bench) -> None:
    layers = bench.target.layers
    shifted = replace(bench.target, layers=nn.ModuleList([*layers[1:], layers[0]]))
    rows = bench.rows(shifted)
    rows[:, -1] = bench.rows()[:, -1]  # the last layer as it should be: the fc features alone are wrong
    _expect(bench, r"fc features of layer 0 are not what.*relative error .*tolerance", rows)


def test_the_last_states_one_layer_too_early(bench: Bench) -> None:
    last = len(bench.target.layers) - 1
    early = FeatureSpec.for_layers((last - 1,), num_layers=last + 1, hidden_size=bench.files.hidden_size)
    with FeatureExtractor(bench.target, early, 0) as extractor:
        rows = bench.rows()
        rows[:, -1] = extractor.run([document.input_ids for document in bench.documents])[:, 0]
    _expect(bench, f"last hidden states of layer {last} are not what", rows)


def test_last_states_after_the_final_norm(bench: Bench) -> None:
    rows = bench.rows()
    rows[:, -1] = bench.found.head.final_norm(rows[:, -1]).to(torch.bfloat16)
    _expect(bench, "last hidden states of layer", rows)


def test_a_norm_taken_for_another_kind(bench: Bench) -> None:
    own = bench.found.head.spec.final_norm
    other = own.model_copy(update={"kind": "rms" if own.kind == "rms_one_plus" else "rms_one_plus"})
    with pytest.raises(SelfCheckError, match="the final norm of the stored"):
        bench.check(bench.rows(), bench.with_norm(other))
    wrong_eps = own.model_copy(update={"eps": 1e4})
    with pytest.raises(SelfCheckError, match="the final norm of the stored"):
        bench.check(bench.rows(), bench.with_norm(wrong_eps))


def test_an_lm_head_that_is_not_the_targets(bench: Bench) -> None:
    head = bench.found.head
    other = TargetHead(
        head.spec,
        embedding=head.embedding,
        norm_weight=head.norm_weight,
        lm_head_weight=head.lm_head_weight.roll(1, dims=0),
    )
    with pytest.raises(SelfCheckError, match="clear positions"):
        bench.check(bench.rows(), replace(bench.found, head=other))


def test_rows_of_another_document(bench: Bench) -> None:
    rows = bench.rows()
    lengths = [len(document.input_ids) for document in bench.documents]
    a, b = rows[0].clone(), rows[lengths[0]].clone()
    rows[0], rows[lengths[0]] = b, a  # one token of each
    _expect(bench, "worst token", rows)


def test_rows_shifted_by_one(bench: Bench) -> None:
    _expect(bench, "are not what", bench.rows().roll(1, dims=0))


@pytest.mark.parametrize("plane", [0, 3])
def test_zeros(bench: Bench, plane: int) -> None:
    rows = bench.rows()
    rows[5, plane] = 0
    _expect(bench, "rows of zeros", rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity(bench: Bench, value: float) -> None:
    rows = bench.rows()
    rows[2, 1, 7] = value
    _expect(bench, "fc features of layer 1 are stored with NaN or infinity", rows, NonFiniteError)


def test_one_layer_stored_twice(bench: Bench) -> None:
    rows = bench.rows()
    rows[:, 1] = rows[:, 0]
    _expect(bench, "fc features of layer 0", rows)


def _disturb(layers: nn.ModuleList, stack: ExitStack) -> None:
    """Round what enters each layer another way, as other kernels would: some routers then choose otherwise."""
    generator = torch.Generator().manual_seed(0)

    def jitter(module: nn.Module, args: tuple[Rows, ...]) -> tuple[Rows, ...]:
        noise = torch.randn(args[0].shape, generator=generator).to(args[0].dtype) * 2.0**-9
        return (args[0] * (1 + noise), *args[1:])

    for layer in layers:
        stack.callback(layer.register_forward_pre_hook(jitter).remove)


def _bench_of(folder: Path, corpus_files: tuple[Path, ...], scratch: Path, dtype: str) -> Bench:
    config = small_config(folder, corpus_files, Path("unused"), dtype=dtype)
    files = open_target(config)
    corpus = tokenize_corpus(config.corpus, files.tokenizer, scratch / "tokens")
    (scratch / "cache").mkdir()
    return Bench(files, load_target(files, "sdpa"), corpus, scratch / "cache")


@pytest.fixture(params=[build_qwen3_moe, build_glm4_moe])
def rerouted(request: pytest.FixtureRequest, corpus_files: tuple[Path, ...], tmp_path: Path) -> tuple[Bench, Rows]:
    """A target with experts in bfloat16, and states of it in which some tokens went through other experts."""
    bench = _bench_of(request.param(tmp_path / "target", update_gain=0.5), corpus_files, tmp_path, "bfloat16")
    with ExitStack() as stack:
        _disturb(bench.target.layers, stack)
        rows = bench.rows()
    return bench, rows


def test_tokens_that_went_through_other_experts_pass(rerouted: tuple[Bench, Rows]) -> None:
    bench, rows = rerouted
    report = bench.check(rows)
    assert sum(plane.astray for plane in report.planes) > 0
    assert report.agreement > 0.999


def test_swapped_and_shifted_rows_are_noticed_among_them(rerouted: tuple[Bench, Rows]) -> None:
    bench, rows = rerouted
    length = len(bench.documents[0].input_ids)
    swapped = rows.clone()
    swapped[[3, length + 3]] = rows[[length + 3, 3]]  # one token of each of two documents
    _expect(bench, "not explained by another choice of experts", swapped)
    within = rows.clone()
    within[[2, 7], 1] = rows[[7, 2], 1]  # two tokens of one document, in one plane
    _expect(bench, "not explained by another choice of experts", within)
    _expect(bench, "not explained by another choice of experts", rows.roll(1, dims=0))
    shifted = rows.clone()
    shifted[:, 1] = rows[:, 2]
    _expect(bench, "fc features of layer 1", shifted)


def test_a_layer_that_adds_little_is_not_taken_for_its_neighbour(
    corpus_files: tuple[Path, ...], tmp_path: Path
) -> None:
    folder = build_dense(tmp_path / "target", update_gain=0.03)
    bench = _bench_of(folder, corpus_files, tmp_path, "bfloat16")
    bench.check(bench.rows())
    layers = bench.target.layers
    deeper = bench.rows(replace(bench.target, layers=nn.ModuleList([*layers[1:], layers[0]])))
    for plane, layer in ((1, 1), (2, 3)):
        rows = bench.rows()
        rows[:, plane] = deeper[:, plane]
        _expect(bench, f"fc features of layer {layer} are nearer to the output of layer {layer + 1}", rows)
    rows = bench.rows()
    with FeatureExtractor(bench.target, FeatureSpec.for_layers((4,), num_layers=6, hidden_size=64), 0) as extractor:
        rows[:, -1] = extractor.run([document.input_ids for document in bench.documents])[:, 0]
    _expect(bench, "last hidden states of layer 5 are nearer to the output of layer 4", rows)


def test_documents_are_spread_over_lengths() -> None:
    lengths = [50, 3, 900, 10, 400]
    assert [lengths[i] for i in spread_over_lengths(lengths, 3)] == [50, 3, 900]
    assert spread_over_lengths([7], 4) == [0]
    assert len(spread_over_lengths(list(range(100)), 4)) == 4
