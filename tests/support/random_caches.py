"""Small caches of random numbers, made through the format package's own writer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from dflash_cache.config import Codec
from dflash_cache.format.invariants import expected_positions, float32_to_bfloat16
from dflash_cache.format.manifest import CacheIdentity, CorpusSpec, ExtractSettings
from dflash_cache.format.shard import ShardData
from dflash_cache.format.writer import CacheWriter, prepare_folder
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec
from dflash_cache.target_head import HeadSpec, TargetHead

NUM_LAYERS = 8


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a test cache; documents_per_shard cuts the documents into shards in order."""

    doc_lengths: tuple[int, ...] = (40, 7, 90, 25, 61, 12)
    documents_per_shard: int = 3
    hidden_size: int = 32
    vocab_size: int = 97
    fc_layers: tuple[int, ...] = (1, 2, 4, 5, 6)
    codec: Codec = "compact"
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.doc_lengths)


def target_spec(shape: CacheShape) -> TargetSpec:
    return TargetSpec(
        name="tiny-random",
        revision=None,
        architecture="TinyForCausalLM",
        model_type="qwen3",
        config_digest="c" * 32,
        weights_digest="w" * 32,
        tokenizer_digest="t" * 32,
        compute_dtype="float32",
        quantization=None,
        num_layers=NUM_LAYERS,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tokenizer_vocab_size=shape.vocab_size - 3,
        intermediate_size=64,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_ids=(1,),
        mask_token_id=shape.vocab_size - 1,
        mask_token_reason="a row above the tokenizer's vocabulary",
        final_norm=FinalNormSpec(kind="rms", eps=1e-6),
        tied_embeddings=False,
    )


def cache_identity(shape: CacheShape) -> CacheIdentity:
    return CacheIdentity(
        target=target_spec(shape),
        features=FeatureSpec.for_layers(shape.fc_layers, num_layers=NUM_LAYERS, hidden_size=shape.hidden_size),
        corpus=CorpusSpec(
            digest=f"{shape.seed:032x}",
            num_documents=len(shape.doc_lengths),
            num_tokens=shape.num_tokens,
            supervised_tokens=shape.num_tokens - len(shape.doc_lengths),
            max_length=4096,
            template_digest=None,
            template_kwargs={},
            mask_token_uses=0,
            dropped={},
            truncated=0,
        ),
        settings=ExtractSettings(
            codec=shape.codec,
            batch_tokens=256,
            shard_tokens=256,
            window_tokens=256,
            attention="sdpa",
            device_type="cpu",
        ),
    )


def shard_data(shape: CacheShape, first_document: int, generator: np.random.Generator) -> ShardData:
    """Make one shard: every token but a document's first is supervised; states are normal noise."""
    lengths = np.array(shape.doc_lengths[first_document : first_document + shape.documents_per_shard], dtype=np.int32)
    tokens = int(lengths.sum())
    positions = expected_positions(lengths)
    layers, hidden = len(shape.fc_layers), shape.hidden_size

    def states(*dims: int) -> np.ndarray:
        return float32_to_bfloat16(generator.standard_normal(dims).astype(np.float32))

    return ShardData(
        input_ids=generator.integers(2, shape.vocab_size - 3, tokens).astype(np.int32),
        loss_mask=positions > 0,
        positions=positions,
        doc_lengths=lengths,
        doc_ids=2 * (first_document + np.arange(len(lengths), dtype=np.int64)),
        fc_features=states(tokens, layers, hidden),
        last_hidden_states=states(tokens, hidden),
    )


def all_shards(shape: CacheShape) -> list[ShardData]:
    generator = np.random.default_rng(shape.seed)
    starts = range(0, len(shape.doc_lengths), shape.documents_per_shard)
    return [shard_data(shape, first, generator) for first in starts]


def target_head(shape: CacheShape) -> TargetHead:
    generator = torch.Generator().manual_seed(shape.seed)

    def matrix() -> torch.Tensor:
        return torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * 0.3

    return TargetHead(
        HeadSpec(final_norm=FinalNormSpec(kind="rms", eps=1e-6), embedding_scale=1.0, tied=False),
        embedding=matrix(),
        norm_weight=torch.ones(shape.hidden_size),
        lm_head_weight=matrix(),
    )


def write_tokenizer(path: Path, vocab_size: int) -> None:
    vocab = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def make_cache(folder: Path, shape: CacheShape | None = None, *, shards: list[ShardData] | None = None) -> Path:
    """Write a complete cache and return its folder; ``shards`` replaces the random contents."""
    shape = shape or CacheShape()
    prepare_folder(folder, overwrite=False)
    with CacheWriter(folder, cache_identity(shape), encoder_threads=1) as writer:
        attach_files(writer, shape)
        first = 0
        for number, data in enumerate(shards or all_shards(shape)):
            writer.seal(writer.stage(number, first, data))
            first += len(data.doc_lengths)
        writer.finish()
    return folder


def attach_files(writer: CacheWriter, shape: CacheShape) -> None:
    staging = writer.staging_folder()
    target_head(shape).save(staging / "head")
    writer.attach("target_head.safetensors", staging / "head")
    write_tokenizer(staging / "tokenizer", shape.vocab_size - 3)
    writer.attach("tokenizer.json", staging / "tokenizer")
