"""Small caches for tests, made with the format package and without a target model."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflash_cache.format.manifest import CacheIdentity, CorpusSpec, ExtractSettings
from dflash_cache.format.shard import ShardData
from dflash_cache.format.writer import CacheWriter, prepare_folder
from dflash_cache.spec import FeatureSpec, FinalNormSpec, TargetSpec
from dflash_cache.target_head import HeadSpec, TargetHead

VOCAB_SIZE = 64
MASK_TOKEN_ID = VOCAB_SIZE - 1
HIDDEN_SIZE = 16
NUM_LAYERS = 8
FC_LAYERS = (1, 3, 4)


@dataclass
class Document:
    """One document's arrays; features are float32 here and stored as bfloat16."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    fc_features: np.ndarray
    last_hidden_states: np.ndarray


@dataclass
class CacheContents:
    """What :func:`make_cache` put into a cache."""

    folder: Path
    identity: CacheIdentity
    documents: list[Document]
    doc_ids: list[int]
    head: TargetHead = field(repr=False)


def make_documents(lengths, *, seed=0, hidden_size=HIDDEN_SIZE, num_fc_layers=3, prompt_tokens=1) -> list[Document]:
    """Make random documents; the first ``prompt_tokens`` tokens of each are unsupervised."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        mask = np.ones(length, dtype=bool)
        mask[:prompt_tokens] = False
        documents.append(
            Document(
                input_ids=rng.integers(0, MASK_TOKEN_ID, length).astype(np.int32),
                loss_mask=mask,
                fc_features=rng.normal(size=(length, num_fc_layers, hidden_size)).astype(np.float32),
                last_hidden_states=rng.normal(size=(length, hidden_size)).astype(np.float32),
            )
        )
    return documents


def make_head(*, seed=0, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE) -> TargetHead:
    """Make a random target head: untied, RMS norm with random gains."""
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(
        HeadSpec(final_norm=FinalNormSpec(kind="rms", eps=1e-6), embedding_scale=1.0, tied=False),
        embedding=torch.randn(vocab_size, hidden_size, generator=generator),
        norm_weight=1.0 + 0.1 * torch.randn(hidden_size, generator=generator),
        lm_head_weight=torch.randn(vocab_size, hidden_size, generator=generator),
    )


def make_identity(documents: list[Document], **changes) -> CacheIdentity:
    """Describe a cache of documents; ``changes`` replace fields by name of their part: ``target``, ``corpus``, ..."""
    _, num_fc_layers, hidden_size = documents[0].fc_features.shape
    fc_layers = FC_LAYERS if num_fc_layers == len(FC_LAYERS) else tuple(range(num_fc_layers))
    target = TargetSpec(
        name="tiny/target",
        revision=None,
        architecture="TinyForCausalLM",
        model_type="tiny",
        config_digest="c",
        weights_digest="w",
        tokenizer_digest="t",
        compute_dtype="float32",
        quantization=None,
        num_layers=NUM_LAYERS,
        hidden_size=hidden_size,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=VOCAB_SIZE - 2,
        intermediate_size=32,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_ids=(0,),
        mask_token_id=MASK_TOKEN_ID,
        mask_token_reason="the last row of the embedding, which the tokenizer cannot produce",
        final_norm=FinalNormSpec(kind="rms", eps=1e-6),
        tied_embeddings=False,
    )
    identity = CacheIdentity(
        target=target,
        features=FeatureSpec.for_layers(fc_layers, num_layers=NUM_LAYERS, hidden_size=hidden_size),
        corpus=CorpusSpec(
            digest="0" * 32,
            num_documents=len(documents),
            num_tokens=sum(len(document.input_ids) for document in documents),
            supervised_tokens=max(1, sum(int(document.loss_mask.sum()) for document in documents)),
            max_length=4096,
            template_digest=None,
            template_kwargs={},
            mask_token_uses=0,
            dropped={},
            truncated=0,
        ),
        settings=ExtractSettings(
            codec="fast", batch_tokens=1024, shard_tokens=1024, window_tokens=1024, attention="sdpa", device_type="cpu"
        ),
    )
    return identity.model_copy(
        update={part: getattr(identity, part).model_copy(update=fields) for part, fields in changes.items()}
    )


def make_cache(
    folder: Path,
    documents: list[Document] | None = None,
    *,
    lengths=(40, 12, 25, 33),
    head: TargetHead | None = None,
    documents_per_shard=3,
    complete=True,
    doc_ids=None,
    **identity_changes,
) -> CacheContents:
    """Write a sealed cache.

    Args:
      folder: New or empty.
      documents: What it holds; None makes random ones of ``lengths``.
      lengths: Tokens of each random document.
      head: The target's head; None makes a random one.
      documents_per_shard: Documents of each shard but the last.
      complete: Whether the cache is declared complete.
      doc_ids: Corpus index of each document; None leaves a gap after every third, as dropped documents do.
      identity_changes: As in :func:`make_identity`.
    """
    documents = make_documents(lengths) if documents is None else documents
    doc_ids = [i + i // 3 for i in range(len(documents))] if doc_ids is None else list(doc_ids)
    hidden_size = documents[0].last_hidden_states.shape[1]
    head = make_head(hidden_size=hidden_size) if head is None else head
    identity = make_identity(documents, **identity_changes)
    prepare_folder(folder, overwrite=False)
    with CacheWriter(folder, identity, encoder_threads=1) as writer:
        staging = writer.staging_folder()
        head.save(staging / "target_head.safetensors")
        writer.attach("target_head.safetensors", staging / "target_head.safetensors")
        tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE - 2)}, unk_token="w0"))
        (staging / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str())), encoding="utf-8")
        writer.attach("tokenizer.json", staging / "tokenizer.json")
        for number, first in enumerate(range(0, len(documents), documents_per_shard)):
            chosen = slice(first, first + documents_per_shard)
            writer.seal(writer.stage(number, first, _shard_data(documents[chosen], doc_ids[chosen])))
        if complete:
            writer.finish()
    return CacheContents(folder, identity, documents, doc_ids, head)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 and return the bits as uint16."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()


def _shard_data(documents: list[Document], doc_ids: list[int]) -> ShardData:
    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int32)
    return ShardData(
        input_ids=np.concatenate([document.input_ids for document in documents]).astype(np.int32),
        loss_mask=np.concatenate([document.loss_mask for document in documents]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        doc_lengths=lengths,
        doc_ids=np.array(doc_ids, dtype=np.int64),
        fc_features=bfloat16_bits(np.concatenate([document.fc_features for document in documents])),
        last_hidden_states=bfloat16_bits(np.concatenate([document.last_hidden_states for document in documents])),
    )
