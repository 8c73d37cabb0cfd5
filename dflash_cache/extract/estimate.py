"""What an extraction will make and cost, before it is begun: counted from the real plan, measured where asked.

Nothing is written to the cache's folder; the tokenised corpus goes to the system's temporary folder and is removed.
"""

import math
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_cache.config import ExtractConfig
from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.corpus.summary import CorpusSummary
from dflash_cache.corpus.tokenize import CorpusProgress, tokenize_corpus
from dflash_cache.errors import CacheDamagedError, CacheFormatError, ConfigError
from dflash_cache.extract.disk import STORED_SHARE
from dflash_cache.extract.features import FeatureExtractor, plane_layers
from dflash_cache.extract.inputs import check_window, feature_spec, open_weights, pad_id, run_settings
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.plan import ExtractionPlan, IntArray, pending_batches, plan_extraction
from dflash_cache.extract.progress import CorpusRead, ExtractEvent, Notice, OnEvent, Phase
from dflash_cache.extract.target import TargetFiles, open_target
from dflash_cache.extract.transfer import RowTransfer
from dflash_cache.format.invariants import expected_positions
from dflash_cache.format.layout import ArrayLayout, shard_layout
from dflash_cache.format.manifest import ExtractSettings, FileEntry, read_manifest
from dflash_cache.format.shard import ShardData, write_shard
from dflash_cache.spec import FeatureSpec

__all__ = ["Estimate", "estimate_extraction"]

_STATES = ("fc_features", "last_hidden_states")
_CHUNK_OVERHEAD = 4 + 16  # its crc32c, and its entry in the file's index
_INDEX_CHECKSUM = 4


@dataclass(frozen=True)
class Estimate:
    """What is to be expected.

    Attributes:
      target: The target's name.
      corpus: What is kept and dropped.
      documents, tokens, supervised_tokens: Of the cache.
      batches: Forward passes.
      padded_tokens: Their size, padding included.
      shards: How many.
      raw_bytes: Of all arrays, uncompressed: hidden states, token ids, masks, positions, lengths, document ids.
      stored_bytes: Of the shards' data files.
      stored_basis: ``exact`` (codec fast), ``measured`` on a batch, or ``assumed``: a cautious share of the raw bytes.
      head_bytes: Of the target's embedding, final norm and lm_head, and of its tokenizer.
      free_bytes: Where the cache will lie.
      existing_bytes: Of the cache that is there already; continuing or replacing it counts on them.
      tokens_per_second: Real tokens, padding not counted; None when neither given nor measured.
      rate_basis: Where that figure comes from.
    """

    target: str
    corpus: CorpusSummary
    documents: int
    tokens: int
    supervised_tokens: int
    batches: int
    padded_tokens: int
    shards: int
    raw_bytes: int
    stored_bytes: int
    stored_basis: Literal["exact", "measured", "assumed"]
    head_bytes: int
    free_bytes: int
    existing_bytes: int
    tokens_per_second: float | None
    rate_basis: Literal["given", "measured"] | None

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that are padding."""
        return 1 - self.tokens / self.padded_tokens

    @property
    def needed_bytes(self) -> int:
        """Of the whole cache."""
        return self.stored_bytes + self.head_bytes

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.needed_bytes <= self.free_bytes + self.existing_bytes

    @property
    def hours(self) -> float | None:
        """Of the target's work; None without a rate."""
        return None if self.tokens_per_second is None else self.tokens / self.tokens_per_second / 3600


def _ignore(event: ExtractEvent) -> None:
    """Report to nobody."""


def estimate_extraction(
    config: ExtractConfig, on_event: OnEvent = _ignore, *, rate: float | None = None, measure: bool = False
) -> Estimate:
    """Estimate what ``extract`` would make with the same settings. Weights are loaded only to measure.

    Args:
      config: The settings.
      on_event: Told of progress, in this thread.
      rate: Tokens per second of the target; None leaves the time open, or measures it.
      measure: Load the target and run one batch through the codec.

    Raises:
      DflashCacheError: As for extracting.
    """
    if rate is not None and measure:
        raise ConfigError("a rate is either given or measured; leave one of --rate and --measure out")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"the rate is {rate} tokens per second, expected a positive number")
    on_event(Phase("open_target"))
    files = open_target(config, lambda text: on_event(Notice(text)))
    features = feature_spec(config, files)
    settings = run_settings(config, files, features)

    def on_corpus(progress: CorpusProgress) -> None:
        on_event(CorpusRead(progress.documents, progress.tokens, progress.bytes_read, progress.total_bytes))

    with tempfile.TemporaryDirectory(prefix="dflash-cache-") as scratch:
        on_event(Phase("tokenize"))
        corpus = tokenize_corpus(config.corpus, files.tokenizer, Path(scratch) / "tokens", on_corpus)
        check_window(config, files, corpus)
        plan = _Plan.of(corpus, settings, features)
        measured = None
        if measure:
            on_event(Phase("load_weights"))
            target = open_weights(config, files, lambda text: on_event(Notice(text)))
            measured = _measure(target, pad_id(files), plan, Path(scratch) / "shard")
        return _estimate(config, files, plan, rate, measured)


@dataclass(frozen=True)
class _Plan:
    """The corpus, cut up as extraction would."""

    corpus: TokenizedCorpus
    settings: ExtractSettings
    features: FeatureSpec
    plan: ExtractionPlan
    batches: list[IntArray]

    @classmethod
    def of(cls, corpus: TokenizedCorpus, settings: ExtractSettings, features: FeatureSpec) -> "_Plan":
        plan = plan_extraction(corpus.lengths, settings.shard_tokens, settings.window_tokens)
        batches = [
            batch
            for window in plan.windows
            for batch in pending_batches(window, corpus.lengths, settings.batch_tokens, 0)
        ]
        return cls(corpus, settings, features, plan, batches)

    def padded(self, batch: IntArray) -> int:
        """Size of a batch, padding included."""
        return int(self.corpus.lengths[batch].max()) * len(batch)

    def layouts(self) -> list[dict[str, ArrayLayout]]:
        """Layout of each shard."""
        codec = self.settings.codec
        return [shard_layout(s.num_tokens, s.num_documents, self.features, codec) for s in self.plan.shards]


@dataclass(frozen=True)
class _Measured:
    """One batch through target and codec.

    Attributes:
      padded_tokens_per_second: Of the forward pass and the copy to the host.
      stored_shares: Bytes of each array's file by bytes of its values.
    """

    padded_tokens_per_second: float
    stored_shares: dict[str, float]


def _estimate(
    config: ExtractConfig, files: TargetFiles, plan: _Plan, rate: float | None, measured: _Measured | None
) -> Estimate:
    layouts = [layout for shard in plan.layouts() for layout in shard.values()]
    padded = sum(plan.padded(batch) for batch in plan.batches)
    tokens = plan.corpus.num_tokens
    if plan.settings.codec == "fast":
        basis: Literal["exact", "measured", "assumed"] = "exact"
        stored = sum(_uncompressed_file_bytes(layout) for layout in layouts)
    elif measured is not None:
        basis = "measured"
        stored = int(sum(layout.raw_bytes * measured.stored_shares[layout.name] for layout in layouts))
    else:
        basis = "assumed"
        share = STORED_SHARE[plan.settings.codec]
        stored = int(sum(layout.raw_bytes * (share if layout.name in _STATES else 1) for layout in layouts))
    if measured is not None:
        rate = measured.padded_tokens_per_second * tokens / padded
    return Estimate(
        target=files.name.identity_name,
        corpus=plan.corpus.summary,
        documents=plan.corpus.num_documents,
        tokens=tokens,
        supervised_tokens=plan.corpus.summary.supervised_tokens,
        batches=len(plan.batches),
        padded_tokens=padded,
        shards=len(plan.plan.shards),
        raw_bytes=sum(layout.raw_bytes for layout in layouts),
        stored_bytes=stored,
        stored_basis=basis,
        head_bytes=_head_bytes(files),
        free_bytes=_free_bytes(config.out),
        existing_bytes=_existing_bytes(config.out),
        tokens_per_second=rate,
        rate_basis=None if rate is None else "given" if measured is None else "measured",
    )


def _measure(target: LoadedTarget, padding: int, plan: _Plan, folder: Path) -> _Measured:
    """Run a batch of middling length twice, time the second run, and store it as a shard."""
    batch = plan.batches[len(plan.batches) // 2]
    documents = [plan.corpus.document(int(document)) for document in batch]
    ids = [document.input_ids for document in documents]
    row_shape = (len(plane_layers(plan.features)), plan.features.hidden_size)
    with FeatureExtractor(target, plan.features, padding) as extractor:
        transfer = RowTransfer(target.device, max(plan.padded(batch), 1), row_shape)
        transfer.submit(extractor.run(ids)).wait()
        began = time.perf_counter()
        rows = transfer.submit(extractor.run(ids)).wait().rows
        seconds = time.perf_counter() - began
    lengths = plan.corpus.lengths[batch]
    data = ShardData(
        input_ids=np.concatenate(ids),
        loss_mask=np.concatenate([document.loss_mask for document in documents]),
        positions=expected_positions(lengths),
        doc_lengths=lengths.astype(np.int32),
        doc_ids=plan.corpus.doc_ids[batch],
        fc_features=np.ascontiguousarray(rows[:, :-1]),
        last_hidden_states=np.ascontiguousarray(rows[:, -1]),
    )
    codec = plan.settings.codec
    with ThreadPoolExecutor(1) as executor:
        entries: dict[str, FileEntry] = write_shard(folder, data, plan.features, codec, executor)
    layouts = shard_layout(len(rows), len(batch), plan.features, codec)
    # The padding of a last chunk is all alike and takes next to nothing compressed: only the values count.
    shares = {name: entries[name].bytes / layout.raw_bytes for name, layout in layouts.items()}
    return _Measured(plan.padded(batch) / seconds, shares)


def _uncompressed_file_bytes(layout: ArrayLayout) -> int:
    """Bytes of an array's file where nothing is compressed; the last chunk is padded."""
    chunk = math.prod(layout.chunk_shape) * np.dtype(layout.memory_dtype).itemsize
    return layout.num_chunks * (chunk + _CHUNK_OVERHEAD) + _INDEX_CHECKSUM


def _head_bytes(files: TargetFiles) -> int:
    """Bytes of the attached files: two matrices, one where they are tied, and the tokenizer."""
    tied = bool(getattr(files.config, "tie_word_embeddings", False))
    matrices = (1 if tied else 2) * files.vocab_size * files.hidden_size * files.compute_dtype.itemsize
    return matrices + len(files.tokenizer.backend_tokenizer.to_str(pretty=True).encode("utf-8"))


def _free_bytes(folder: Path) -> int:
    """Free space where a folder lies or will lie."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _existing_bytes(folder: Path) -> int:
    """Bytes of a cache that is there; 0 where there is none that can be read."""
    try:
        manifest = read_manifest(folder)
    except (CacheFormatError, CacheDamagedError):
        return 0
    shards = sum(shard.stored_bytes for shard in manifest.shards)
    return shards + sum(file.bytes for file in manifest.attached.values())
