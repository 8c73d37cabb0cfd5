"""The manifest: what made a cache, and which shards exist. Replacing it is the one commit point of stage one."""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import xxhash
from pydantic import Field, ValidationError, model_validator

from dflash_cache.config import Codec, LongDocuments, TemplateValue
from dflash_cache.errors import CacheDamagedError, CacheFormatError
from dflash_cache.format.layout import ARRAY_NAMES
from dflash_cache.spec import FeatureSpec, FrozenModel, TargetSpec

__all__ = [
    "ATTACHED_NAMES",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "CacheIdentity",
    "CacheManifest",
    "CorpusSpec",
    "Difference",
    "ExtractSettings",
    "FileEntry",
    "QuarantinedDocument",
    "ShardEntry",
    "differences",
    "file_digest",
    "read_manifest",
    "shard_name",
    "write_manifest",
]

FORMAT_NAME = "dflash-cache"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]
AttachedName = Literal["target_head.safetensors", "tokenizer.json"]
ATTACHED_NAMES: tuple[AttachedName, ...] = get_args(AttachedName)


class CorpusSpec(FrozenModel):
    """What identifies the tokens of a cache and their order.

    Attributes:
      digest: Digest of document ids, lengths, token ids and loss masks, in order.
      num_documents, num_tokens, supervised_tokens: Of the documents that are kept.
      max_length: Most tokens of a document.
      long: What happened to longer ones.
      template_digest: Digest of the chat template; None for a corpus without chats.
      template_kwargs: Arguments of the chat template.
      mask_token_uses: How often the proposed mask token occurs in the corpus.
      dropped: Documents left out, by reason.
      truncated: Documents that were cut to max_length.
      split: Documents that became several, of max_length tokens each but the last, with the same document id.
    """

    digest: Digest
    num_documents: PositiveInt
    num_tokens: PositiveInt
    supervised_tokens: PositiveInt
    max_length: PositiveInt
    long: LongDocuments = "truncate"
    template_digest: str | None
    template_kwargs: dict[str, TemplateValue]
    mask_token_uses: NonNegativeInt
    dropped: dict[str, NonNegativeInt]
    truncated: NonNegativeInt
    split: NonNegativeInt = 0


class ExtractSettings(FrozenModel):
    """Settings of stage one that the stored bytes depend on."""

    codec: Codec
    batch_tokens: PositiveInt
    shard_tokens: PositiveInt
    window_tokens: PositiveInt
    attention: str
    device_type: str
    fused: bool = False


class CacheIdentity(FrozenModel):
    """Everything that decides what a cache contains. Two caches of equal identity hold the same numbers."""

    target: TargetSpec
    features: FeatureSpec
    corpus: CorpusSpec
    settings: ExtractSettings


class FileEntry(FrozenModel):
    """A file as it was sealed: its size in bytes and the xxh3-128 digest of its contents."""

    bytes: NonNegativeInt
    digest: Digest


class ShardEntry(FrozenModel):
    """A sealed shard.

    Attributes:
      name: Its folder.
      first_document: Ordinal of its first document in the corpus of the identity.
      num_documents, num_tokens, supervised_tokens: What it holds.
      arrays: Size and digest of each array's data file.
    """

    name: Annotated[str, Field(pattern=r"^shard-[0-9]{5,}\.zarr$")]
    first_document: NonNegativeInt
    num_documents: PositiveInt
    num_tokens: PositiveInt
    supervised_tokens: NonNegativeInt
    arrays: dict[str, FileEntry]

    @model_validator(mode="after")
    def _has_every_array(self) -> "ShardEntry":
        if set(self.arrays) != set(ARRAY_NAMES):
            raise ValueError(f"arrays are {sorted(self.arrays)}, expected {sorted(ARRAY_NAMES)}")
        return self

    @property
    def stored_bytes(self) -> int:
        """Bytes of its data files."""
        return sum(entry.bytes for entry in self.arrays.values())


class QuarantinedDocument(FrozenModel):
    """A document of the corpus that is in no shard, since the target gave it states that cannot be stored.

    Attributes:
      document: Its ordinal in the corpus of the identity.
      doc_id: Its index in the corpus.
      token: The first bad token in it.
      layer: The layer whose output is bad there; the first one in stored order.
      reason: ``not_finite``, NaN or infinity as bfloat16, or ``all_zero``.
    """

    document: NonNegativeInt
    doc_id: NonNegativeInt
    token: NonNegativeInt
    layer: NonNegativeInt
    reason: Literal["not_finite", "all_zero"]


class CacheManifest(FrozenModel):
    """The contents of ``manifest.json``; docs/format.md is normative.

    Attributes:
      format, format_version: What kind of file this is.
      written_by: Program and version.
      identity: What made the cache.
      attached: Sealed files beside the shards.
      shards: The shards that exist, in document order; a shard that is not listed does not exist.
      quarantined: Documents of the corpus that are in no shard, by ordinal; a shard's are listed when it is sealed.
      complete: Whether every document of the corpus is in a shard or quarantined.
    """

    format: Literal["dflash-cache"] = "dflash-cache"
    format_version: Literal[1] = 1
    written_by: str
    identity: CacheIdentity
    attached: dict[AttachedName, FileEntry] = {}
    shards: tuple[ShardEntry, ...] = ()
    quarantined: tuple[QuarantinedDocument, ...] = ()
    complete: bool = False

    @model_validator(mode="after")
    def _shards_follow_each_other(self) -> "CacheManifest":
        for number, shard in enumerate(self.shards):
            if shard.name != shard_name(number):
                raise ValueError(f"shards[{number}].name is {shard.name!r}, expected {shard_name(number)!r}")
        left_out = [entry.document for entry in self.quarantined]
        if left_out != sorted(set(left_out)):
            raise ValueError(f"quarantined documents are {left_out}, expected ascending ordinals")
        document = _beyond(0, 0, left_out)
        for number, shard in enumerate(self.shards):
            if shard.first_document != document:
                raise ValueError(f"shards[{number}].first_document is {shard.first_document}, expected {document}")
            document = _beyond(document, shard.num_documents, left_out)
        total = self.identity.corpus.num_documents
        if (left_out and left_out[-1] >= document) or document > total or (self.complete and document != total):
            raise ValueError(
                f"the shards hold {self.num_documents} documents, {len(left_out)} are quarantined, the corpus has "
                f"{total} (complete: {self.complete})"
            )
        return self

    @property
    def end_document(self) -> int:
        """One beyond the last ordinal of the corpus that is in a sealed shard or quarantined."""
        return self.num_documents + len(self.quarantined)

    @property
    def num_documents(self) -> int:
        """Documents in sealed shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in sealed shards."""
        return sum(shard.num_tokens for shard in self.shards)


def _beyond(document: int, count: int, left_out: Sequence[int]) -> int:
    """Count documents from an ordinal on, those left out not counted, and return the next that is not left out.

    Args:
      document: The first ordinal.
      count: How many documents.
      left_out: Ordinals that are left out, ascending.
    """
    end = document + count
    place = bisect_left(left_out, document)
    while place < len(left_out) and left_out[place] <= end:
        end += 1
        place += 1
    return end


@dataclass(frozen=True)
class Difference:
    """One field in which two specifications differ."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.old!r} -> {self.new!r}"


def shard_name(number: int) -> str:
    """Return the folder name of a shard by its 0-based number."""
    return f"shard-{number:05d}.zarr"


def differences(old: FrozenModel, new: FrozenModel) -> list[Difference]:
    """List every field in which two models of one class differ, nested names joined by dots."""
    flat_old, flat_new = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    names = list(dict.fromkeys([*flat_old, *flat_new]))
    return [
        Difference(name, flat_old.get(name), flat_new.get(name))
        for name in names
        if flat_old.get(name) != flat_new.get(name)
    ]


def file_digest(path: Path) -> FileEntry:
    """Read a file and return its size and digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
            size += len(block)
    return FileEntry(bytes=size, digest=hasher.hexdigest())


def read_manifest(folder: Path) -> CacheManifest:
    """Read and check a cache's manifest.

    Raises:
      CacheFormatError: If the folder is no cache, or one of a format version that this program does not read.
      CacheDamagedError: If the manifest was cut short or edited.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CacheFormatError(
            f"{folder} is not a cache: it has no {MANIFEST_NAME}. Make one with `dflash-cache extract --out {folder}`, "
            "or name the folder that holds the manifest."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CacheDamagedError(f"{path} cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _edited(path, f"it is not whole JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise _edited(path, f"it is not a manifest's JSON ({error})") from error
    _check_version(path, document)
    stated = document.pop("manifest_digest", None)
    try:
        found = _digest(document)
    except UnicodeEncodeError as error:
        raise _edited(path, f"it holds a lone surrogate ({error})") from error
    if stated != found:
        raise _edited(path, f"its manifest_digest is {stated!r}, its contents give {found!r}")
    try:
        return CacheManifest.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise _edited(path, f"{name}: {first['msg']}") from error


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """Replace the manifest atomically and durably. After this returns, what it lists exists."""
    document = manifest.model_dump(mode="json")
    document["manifest_digest"] = _digest(document)
    temporary = folder / f".{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST_NAME)
    fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_version(path: Path, document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise CacheFormatError(f"{path}: format is {found!r}, expected {FORMAT_NAME!r}; this folder is not a cache")
    version = document.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CacheFormatError(
            f"{path}: format_version is {version!r}; this program reads {FORMAT_VERSION}. "
            "Install the dflash-cache version that wrote it, or run extract again."
        )


def _edited(path: Path, what: str) -> CacheDamagedError:
    return CacheDamagedError(
        f"{path}: the manifest was cut short or edited: {what}. Restore it from a copy; it is never edited by hand."
    )


def _digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode("utf-8"))


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flatten(item, f"{prefix}.{name}" if prefix else name))
    return flat or {prefix: {}}
