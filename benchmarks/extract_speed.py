"""Stage one end to end against the bare forward of its target, in one run.

usage: python benchmarks/extract_speed.py TARGET OUT [--tokens N] [--batch-tokens N] [--lengths equal mixed]

TARGET is a folder or hub name, or `random-27b`: a text model of Qwen3.6-27B's shape with random weights, made on the
GPU (--layers shortens it). OUT is a folder on the disk to be measured; the cache in it is deleted in the end.

Three figures, each over the same batches: the bare forward (decoder alone, no hooks, nothing copied), the forward with
hooks and copies to the host, and the whole of stage one up to sealed, compressed, checksummed shards. The self-check
is left out of the rate, since it costs the same for a corpus of any size, and reported.
"""

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_cache.config import CorpusConfig, ExtractConfig
from dflash_cache.corpus.store import TokenizedCorpus, TokenizedDocument, TokenStoreWriter
from dflash_cache.corpus.summary import CorpusSummary
from dflash_cache.extract.features import FeatureExtractor, PaddedBatch
from dflash_cache.extract.fused import fuse_target
from dflash_cache.extract.head import FoundHead, find_head
from dflash_cache.extract.loading import LoadedTarget, load_target
from dflash_cache.extract.pipeline import ExtractionJob, run_extraction
from dflash_cache.extract.plan import default_shard_tokens, default_window_tokens, pending_batches, plan_extraction
from dflash_cache.extract.target import open_target
from dflash_cache.extract.transfer import RowTransfer
from dflash_cache.format.manifest import CacheIdentity, CorpusSpec, ExtractSettings
from dflash_cache.format.writer import CacheWriter, prepare_folder
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec, spread_fc_layers


@dataclass(frozen=True)
class Bench:
    target: LoadedTarget
    features: FeatureSpec
    corpus: TokenizedCorpus
    batch_tokens: int


def random_27b(num_layers: int) -> LoadedTarget:
    """Qwen3.6-27B's text model with random weights, in bfloat16 on the GPU."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=num_layers, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=248320, max_position_embeddings=262144,
        tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.02)
    model.eval().requires_grad_(False)
    decoder = model.get_decoder()
    device = torch.device("cuda:0")
    return LoadedTarget("random-27b", model, decoder, decoder.layers, device, torch.bfloat16, 5120, 248320)


def write_corpus(folder: Path, lengths: np.ndarray, vocab_size: int) -> TokenizedCorpus:
    generator = np.random.default_rng(0)
    with TokenStoreWriter(folder) as writer:
        for number, length in enumerate(lengths.tolist()):
            ids = generator.integers(0, min(vocab_size, 248000), length).astype(np.int32)
            mask = np.arange(length) > 0
            writer.append(TokenizedDocument(number, ids, mask))
        total = int(lengths.sum())
        return writer.seal(
            CorpusSummary(
                documents_read=len(lengths), documents_kept=len(lengths), chats_kept=0, documents_truncated=0,
                dropped=(), tokens=total, supervised_tokens=total - len(lengths), mean_mask_share=0.99,
            )
        )  # fmt: skip


def make_lengths(kind: str, tokens: int, longest: int) -> np.ndarray:
    """Equal documents of 1024 tokens, or a mix like chat data: log-normal, median 600, up to the longest."""
    if kind == "equal":
        return np.full(max(1, tokens // 1024), 1024, dtype=np.int64)
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(np.log(600), 0.9, 4 * tokens // 600), 16, longest).astype(np.int64)
    return lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]


def all_batches(bench: Bench, settings: ExtractSettings) -> list[np.ndarray]:
    plan = plan_extraction(bench.corpus.lengths, settings.shard_tokens, settings.window_tokens)
    return [
        batch
        for window in plan.windows
        for batch in pending_batches(window, bench.corpus.lengths, bench.batch_tokens, 0)
    ]


def synchronize(target: LoadedTarget) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def timed(target: LoadedTarget, task: Callable[[], None]) -> float:
    synchronize(target)
    start = time.perf_counter()
    task()
    synchronize(target)
    return time.perf_counter() - start


@torch.inference_mode()
def bare_forward(bench: Bench, batches: list[np.ndarray]) -> None:
    device = bench.target.device
    for batch in batches:
        padded = PaddedBatch.of([bench.corpus.document(int(i)).input_ids for i in batch], 0)
        bench.target.decode(padded.to(device).input_ids)


def hooked_forward(bench: Bench, batches: list[np.ndarray]) -> None:
    shape = (len(bench.features.fc_layers) + 1, bench.features.hidden_size)
    transfer = RowTransfer(bench.target.device, bench.batch_tokens, shape)
    previous = None
    with FeatureExtractor(bench.target, bench.features, 0) as extractor:
        for batch in batches:
            rows = extractor.run([bench.corpus.document(int(i)).input_ids for i in batch])
            pending = transfer.submit(rows)
            if previous is not None:
                previous.wait()
            previous = pending
        if previous is not None:
            previous.wait()


def settings_for(bench: Bench) -> ExtractSettings:
    per_token = bench.features.bytes_per_token
    return ExtractSettings(
        codec="compact", batch_tokens=bench.batch_tokens, shard_tokens=default_shard_tokens(per_token),
        window_tokens=default_window_tokens(bench.batch_tokens, per_token), attention="sdpa",
        device_type=bench.target.device.type,
    )  # fmt: skip


def identity_for(bench: Bench, norm: FinalNormSpec, settings: ExtractSettings) -> CacheIdentity:
    target, corpus = bench.target, bench.corpus
    spec = TargetSpec(
        name=target.name, revision=None, architecture="benchmark", model_type="benchmark", config_digest="",
        weights_digest="", tokenizer_digest="", compute_dtype=str(target.compute_dtype), quantization=None,
        num_layers=len(target.layers), hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        tokenizer_vocab_size=target.vocab_size, intermediate_size=None, max_position_embeddings=None, rope_theta=None,
        bos_token_id=None, pad_token_id=None, eos_token_ids=(), mask_token_id=None, mask_token_reason="",
        final_norm=norm, tied_embeddings=False,
    )  # fmt: skip
    corpus_spec = CorpusSpec(
        digest=corpus.digest, num_documents=corpus.num_documents, num_tokens=corpus.num_tokens,
        supervised_tokens=corpus.summary.supervised_tokens, max_length=1 << 20, template_digest=None,
        template_kwargs={}, mask_token_uses=0, dropped={}, truncated=0,
    )  # fmt: skip
    return CacheIdentity(target=spec, features=bench.features, corpus=corpus_spec, settings=settings)


@dataclass(frozen=True)
class EndToEnd:
    """Seconds without the self-check, the self-check's, and raw over stored bytes."""

    seconds: float
    self_check_seconds: float
    ratio: float


def end_to_end(bench: Bench, found: FoundHead, out: Path) -> EndToEnd:
    settings = settings_for(bench)
    prepare_folder(out, overwrite=False)
    with CacheWriter(out, identity_for(bench, found.head.spec.final_norm, settings)) as writer:
        job = ExtractionJob(
            target=bench.target, found=found, features=bench.features, corpus=bench.corpus,
            plan=plan_extraction(bench.corpus.lengths, settings.shard_tokens, settings.window_tokens),
            batch_tokens=bench.batch_tokens, pad_id=0, self_check_documents=2, on_bad="stop", writer=writer,
        )  # fmt: skip
        result = run_extraction(job, lambda event: None)
        stored = sum(shard.stored_bytes for shard in writer.manifest.shards)
    shutil.rmtree(out)
    raw = bench.corpus.num_tokens * bench.features.bytes_per_token
    return EndToEnd(result.seconds - result.self_check_seconds, result.self_check_seconds, raw / stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lengths", choices=["equal", "mixed"], nargs="+", default=["equal", "mixed"])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one fused forward and stop")
    arguments = parser.parse_args()
    target = open_any(arguments.target, arguments.layers)
    layers = spread_fc_layers(len(target.layers))
    features = FeatureSpec.for_layers(layers, num_layers=len(target.layers), hidden_size=target.hidden_size)
    stock = StockRun.of(target, features) if target.device.type == "cuda" else None
    if stock is not None:
        print(fuse_target(target))
        stock.compare(target, features)
        if arguments.profile:
            profile_forward(target, stock.documents)
            return
    found = find_head(target)
    for kind in arguments.lengths:
        with tempfile.TemporaryDirectory() as folder:
            lengths = make_lengths(kind, arguments.tokens, arguments.batch_tokens // 2)
            corpus = write_corpus(Path(folder), lengths, target.vocab_size)
            bench = Bench(target, features, corpus, arguments.batch_tokens)
            measure(bench, found, kind, arguments.out / "extract_speed_cache", arguments.repeats)


@dataclass(frozen=True)
class StockRun:
    """The target as transformers runs it: its speed on eight documents of 1024 tokens, and what it gives."""

    documents: list[np.ndarray]
    seconds: float
    rows: torch.Tensor
    noise: list[float]

    @classmethod
    def of(cls, target: LoadedTarget, features: FeatureSpec) -> "StockRun":
        generator = np.random.default_rng(2)
        documents = [generator.integers(0, target.vocab_size, 1024).astype(np.int32) for _ in range(8)]
        with FeatureExtractor(target, features, 0) as extractor:
            rows = extractor.run(documents)
            # The same documents in other company: all that differs is rounding.
            again = torch.cat([extractor.run(documents[i : i + 2]) for i in range(0, 8, 2)])
        return cls(documents, forward_seconds(target, documents), rows, relative(again, rows))

    def compare(self, target: LoadedTarget, features: FeatureSpec) -> None:
        with FeatureExtractor(target, features, 0) as extractor:
            rows = extractor.run(self.documents)
        seconds = forward_seconds(target, self.documents)
        tokens = sum(len(ids) for ids in self.documents)
        print(
            f"bare forward, 8 x 1024: stock {tokens / self.seconds:,.0f} tokens/s, fused {tokens / seconds:,.0f}, ",
            end="",
        )
        print(f"x{self.seconds / seconds:.3f}")
        print(f"  differs from stock, by layer: {self.show(relative(rows, self.rows))}")
        print(f"  rounding alone (other batch): {self.show(self.noise)}")
        self.compare_choices(target, rows)

    @torch.inference_mode()
    def compare_choices(self, target: LoadedTarget, rows: torch.Tensor) -> None:
        head = find_head(target).head
        agree = decisive = 0
        for start in range(0, len(rows), 1024):
            stock = head.logits(self.rows[start : start + 1024, -1]).float()
            fused = head.logits(rows[start : start + 1024, -1]).float()
            best = stock.topk(2).values
            clear = best[:, 0] - best[:, 1] > 4 * (fused - stock).std(-1)
            agree += int((clear & (stock.argmax(-1) == fused.argmax(-1))).sum())
            decisive += int(clear.sum())
        print(
            f"  argmax equal on {agree:,} of {decisive:,} positions with a clear margin, of {len(rows):,}", flush=True
        )

    @staticmethod
    def show(values: list[float]) -> str:
        return " ".join(f"{value:.1e}" for value in values)


def relative(rows: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Relative root mean square difference of each plane."""
    difference = (rows.float() - reference.float()).norm(dim=(0, 2))
    return (difference / reference.float().norm(dim=(0, 2))).tolist()


@torch.inference_mode()
def forward_seconds(target: LoadedTarget, documents: list[np.ndarray], repeats: int = 5) -> float:
    ids = PaddedBatch.of(documents, 0).to(target.device).input_ids
    target.decode(ids)
    return statistics.median(timed(target, lambda: target.decode(ids)) for _ in range(repeats))


@torch.inference_mode()
def profile_forward(target: LoadedTarget, documents: list[np.ndarray]) -> None:
    from torch.profiler import ProfilerActivity, profile

    ids = PaddedBatch.of(documents, 0).to(target.device).input_ids
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        target.decode(ids)
        synchronize(target)
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70))


def open_any(name: str, num_layers: int) -> LoadedTarget:
    if name == "random-27b":
        return random_27b(num_layers)
    files = open_target(ExtractConfig(model=name, corpus=CorpusConfig(files=(Path("unused"),))))
    return load_target(files, "sdpa")


def measure(bench: Bench, found: FoundHead, kind: str, out: Path, repeats: int) -> None:
    batches = all_batches(bench, settings_for(bench))
    real = bench.corpus.num_tokens
    padded = sum(int(bench.corpus.lengths[batch].max()) * len(batch) for batch in batches)
    bare_forward(bench, batches)  # kernels are tuned for each new shape
    on_gpu = bench.target.device.type == "cuda"
    if on_gpu:
        synchronize(bench.target)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    runs: dict[str, list[float]] = {"bare forward": [], "forward + hooks + copies": [], "end to end": []}
    whole: list[EndToEnd] = []
    for _ in range(repeats):
        runs["bare forward"].append(timed(bench.target, lambda: bare_forward(bench, batches)))
        runs["forward + hooks + copies"].append(timed(bench.target, lambda: hooked_forward(bench, batches)))
        whole.append(end_to_end(bench, found, out))
        runs["end to end"].append(whole[-1].seconds)
    bare = statistics.median(runs["bare forward"])
    print(f"{kind}: {real:,} tokens, {len(batches)} batches, padding {1 - real / padded:.1%}")
    for name, seconds in runs.items():
        median = statistics.median(seconds)
        print(f"  {name:26s} {real / median:9,.0f} tokens/s   x{bare / median:.3f} of the bare forward")
    print(f"  self-check, once a run: {whole[-1].self_check_seconds:.1f} s; raw / stored bytes {whole[-1].ratio:.3f}")
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        print(f"  GPU memory: model {before / 2**30:.1f} GiB, peak {peak / 2**30:.1f} GiB (x{peak / before:.3f})")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  host memory, peak of the process: {host:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
