"""What is in a cache, a shard, a document."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.layout import ArrayLayout
from dflash_cache.format.manifest import CacheManifest, FileEntry
from dflash_cache.report.agreement import Agreement, count_agreement
from dflash_cache.report.layers import LayerAccumulator, LayerStats
from dflash_cache.report.text import TextSpan, decode_spans
from dflash_cache.target_head import TARGET_HEAD_NAME, TargetHead

__all__ = [
    "LAYER_CONVENTION",
    "ArrayFacts",
    "CacheFacts",
    "DocumentFacts",
    "LengthStats",
    "ShardFacts",
    "cache_facts",
    "document_facts",
    "shard_facts",
]

LAYER_CONVENTION = (
    "0-based decoder layers, each the OUTPUT of that layer (transformers' hidden_states[i + 1]; vLLM and speculators "
    "count i + 1); the last layer is stored before the final norm"
)
_AGREEMENT_TOKENS = 2048


@dataclass(frozen=True)
class LengthStats:
    """Document lengths in tokens."""

    documents: int
    tokens: int
    minimum: int
    median: float
    mean: float
    percentile_95: float
    maximum: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64]) -> "LengthStats":
        """Summarize at least one length."""
        return cls(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            minimum=int(lengths.min()),
            median=float(np.median(lengths)),
            mean=float(lengths.mean()),
            percentile_95=float(np.percentile(lengths, 95)),
            maximum=int(lengths.max()),
        )


@dataclass(frozen=True)
class ArrayFacts:
    """One array of a shard, or of all shards together (then shape's first entry is the sum)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codecs: tuple[str, ...]
    chunk_shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """Raw bytes over stored bytes."""
        return self.raw_bytes / self.stored_bytes


@dataclass(frozen=True)
class ShardFacts:
    """Everything worth knowing of one shard; every document of it was read."""

    name: str
    arrays: tuple[ArrayFacts, ...]
    lengths: LengthStats
    doc_lengths: tuple[int, ...]
    supervised_tokens: int
    layers: tuple[LayerStats, ...]
    agreement: Agreement


@dataclass(frozen=True)
class CacheFacts:
    """Everything worth knowing of a cache.

    Attributes:
      manifest: What made it and what it lists.
      arrays: Summed over the shards.
      lengths, doc_lengths, supervised_tokens: Of all sealed documents.
      sampled_documents: Documents, spread over the cache, that ``layers`` and ``agreement`` were measured on.
    """

    manifest: CacheManifest
    arrays: tuple[ArrayFacts, ...]
    lengths: LengthStats
    doc_lengths: tuple[int, ...]
    supervised_tokens: int
    sampled_documents: int
    layers: tuple[LayerStats, ...]
    agreement: Agreement


@dataclass(frozen=True)
class DocumentFacts:
    """One document: its place, its text, its numbers."""

    ordinal: int
    doc_id: int
    shard: str
    tokens: int
    supervised_tokens: int
    spans: tuple[TextSpan, ...]
    layers: tuple[LayerStats, ...]
    agreement: Agreement


def shard_facts(cache: FeatureCache, number: int) -> ShardFacts:
    """Describe a shard, reading all of it.

    Raises:
      CacheDamagedError: If a part of it cannot be read.
    """
    reader = cache.shard(number)
    documents = np.flatnonzero(cache.index.shard == number).tolist()
    layers, agreement = _measure(cache, documents)
    return ShardFacts(
        name=reader.entry.name,
        arrays=tuple(_array_facts(layout, reader.entry.arrays[name]) for name, layout in reader.layout.items()),
        lengths=LengthStats.of(reader.doc_lengths.astype(np.int64)),
        doc_lengths=tuple(reader.doc_lengths.tolist()),
        supervised_tokens=reader.entry.supervised_tokens,
        layers=layers,
        agreement=agreement,
    )


def cache_facts(cache: FeatureCache, *, sample_documents: int) -> CacheFacts:
    """Describe a cache: structure and lengths of all of it, numbers of a sample.

    Args:
      cache: The cache, finished or not.
      sample_documents: Documents to read for the layers' statistics, spread evenly.

    Raises:
      CacheDamagedError: If a part that is read is damaged.
    """
    lengths = cache.index.length
    count = min(sample_documents, len(lengths))
    sample = np.unique(np.linspace(0, len(lengths) - 1, count).astype(np.int64)).tolist()
    layers, agreement = _measure(cache, sample)
    return CacheFacts(
        manifest=cache.manifest,
        arrays=_summed_arrays(cache),
        lengths=LengthStats.of(lengths),
        doc_lengths=tuple(lengths.tolist()),
        supervised_tokens=sum(shard.supervised_tokens for shard in cache.manifest.shards),
        sampled_documents=len(sample),
        layers=layers,
        agreement=agreement,
    )


def document_facts(cache: FeatureCache, document: int) -> DocumentFacts:
    """Describe one document, with its decoded text.

    Args:
      cache: The cache.
      document: Ordinal in the cache, 0-based.

    Raises:
      CacheDamagedError: If it cannot be read.
    """
    tokens = cache.read(document)
    layers, agreement = _measure(cache, [document])
    return DocumentFacts(
        ordinal=document,
        doc_id=int(cache.index.doc_id[document]),
        shard=cache.manifest.shards[int(cache.index.shard[document])].name,
        tokens=len(tokens.input_ids),
        supervised_tokens=int(tokens.loss_mask.sum()),
        spans=decode_spans(cache.attached("tokenizer.json"), tokens.input_ids, tokens.loss_mask),
        layers=layers,
        agreement=agreement,
    )


def _measure(cache: FeatureCache, documents: Iterable[int]) -> tuple[tuple[LayerStats, ...], Agreement]:
    """Read documents once for both: the layers' statistics and the agreement with the next token."""
    accumulator = LayerAccumulator(cache.manifest.identity.features)
    head = TargetHead.load(cache.attached(TARGET_HEAD_NAME))
    agreement = Agreement()
    for document in documents:
        tokens = cache.read(document)
        accumulator.add(tokens)
        agreement += count_agreement(head, tokens, limit=max(0, _AGREEMENT_TOKENS - agreement.tokens))
    return accumulator.stats(), agreement


def _array_facts(layout: ArrayLayout, entry: FileEntry) -> ArrayFacts:
    inner = layout.zarr_metadata()["codecs"][0]["configuration"]["codecs"]
    return ArrayFacts(
        name=layout.name,
        shape=layout.shape,
        dtype=layout.data_type,
        codecs=tuple(_codec_text(codec) for codec in inner),
        chunk_shape=layout.chunk_shape,
        raw_bytes=layout.raw_bytes,
        stored_bytes=entry.bytes,
    )


def _codec_text(codec: dict[str, object]) -> str:
    settings = codec.get("configuration")
    if codec["name"] == "blosc" and isinstance(settings, dict):
        return f"blosc({settings['cname']}-{settings['clevel']}, {settings['shuffle']})"
    return str(codec["name"])


def _summed_arrays(cache: FeatureCache) -> tuple[ArrayFacts, ...]:
    totals: dict[str, ArrayFacts] = {}
    for number, shard in enumerate(cache.manifest.shards):
        for name, layout in cache.shard(number).layout.items():
            facts = _array_facts(layout, shard.arrays[name])
            before = totals.get(name)
            if before is not None:
                facts = ArrayFacts(
                    name=name,
                    shape=(before.shape[0] + facts.shape[0], *facts.shape[1:]),
                    dtype=facts.dtype,
                    codecs=facts.codecs,
                    chunk_shape=before.chunk_shape,
                    raw_bytes=before.raw_bytes + facts.raw_bytes,
                    stored_bytes=before.stored_bytes + facts.stored_bytes,
                )
            totals[name] = facts
    return tuple(totals.values())
