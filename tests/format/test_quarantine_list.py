"""The manifest accounts for every document: in a shard, or quarantined."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.random_caches import CacheShape, cache_identity

from dflash_cache.format.layout import ARRAY_NAMES
from dflash_cache.format.manifest import CacheManifest, FileEntry, QuarantinedDocument, ShardEntry, shard_name

NO_FILE = FileEntry(bytes=0, digest="0" * 32)


def entry(document: int) -> QuarantinedDocument:
    return QuarantinedDocument(document=document, doc_id=2 * document, token=0, layer=1, reason="all_zero")


def shard(number: int, documents: list[int]) -> ShardEntry:
    return ShardEntry(
        name=shard_name(number),
        first_document=documents[0],
        num_documents=len(documents),
        num_tokens=len(documents),
        supervised_tokens=0,
        arrays=dict.fromkeys(ARRAY_NAMES, NO_FILE),
    )


def manifest(shards: list[list[int]], bad: list[int], total: int, *, complete: bool = True) -> CacheManifest:
    identity = cache_identity(CacheShape())
    corpus = identity.corpus.model_copy(update={"num_documents": total})
    return CacheManifest(
        written_by="test",
        identity=identity.model_copy(update={"corpus": corpus}),
        shards=tuple(shard(number, documents) for number, documents in enumerate(shards)),
        quarantined=tuple(entry(document) for document in bad),
        complete=complete,
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_plan_with_holes_is_accepted_and_no_other_first_document(plan: list[list[bool]]) -> None:
    shards, bad, document = [], [], 0
    for good in plan:
        ordinals = range(document, document + len(good))
        document = ordinals.stop
        bad += [i for i, kept in zip(ordinals, good, strict=True) if not kept]
        kept_ordinals = [i for i, kept in zip(ordinals, good, strict=True) if kept]
        shards += [kept_ordinals] if kept_ordinals else []
    made = manifest(shards, bad, document)
    assert made.end_document == document
    assert made.num_documents == document - len(bad)
    for number, documents in enumerate(shards):
        moved = [*shards[:number], [documents[0] + 1, *documents[1:]], *shards[number + 1 :]]
        with pytest.raises(ValidationError, match="first_document"):
            manifest(moved, bad, document)


@pytest.mark.parametrize(
    ("shards", "bad", "total"),
    [
        ([[0, 1]], [1], 2),  # a document twice
        ([[0, 1]], [], 3),  # one missing, yet complete
        ([[0, 1]], [3], 4),  # a hole before the quarantined one
        ([[0, 2]], [1, 1], 3),
        ([[1, 2]], [2, 0], 4),
    ],
)
def test_a_list_that_does_not_add_up_is_refused(shards: list[list[int]], bad: list[int], total: int) -> None:
    with pytest.raises(ValidationError):
        manifest(shards, bad, total)
