"""A tokenised corpus on disk: flat files of tokens and masks, opened by memory map.

    tokens.u32     token ids of all documents, end to end, little-endian uint32
    mask.u8        1 where a token is supervised, else 0
    doc_ids.i64    each document's index in the corpus; dropped documents leave gaps
    lengths.i64    each document's tokens
    corpus.json    counts, digest and summary; written last, so a folder without it was not finished

The digest is xxh3_128 over, for each document in order: doc id and length (int64), token ids (uint32), mask (uint8),
all little-endian. It depends on the order of the documents and on nothing else about how they were processed.
"""

import errno
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from dflash_cache.corpus.summary import CorpusSummary
from dflash_cache.errors import CacheDamagedError, CacheFormatError, DiskSpaceError, TargetError
from dflash_cache.spec import FrozenModel

__all__ = ["TokenStoreWriter", "TokenizedCorpus", "TokenizedDocument"]

_TOKENS = "tokens.u32"
_MASK = "mask.u8"
_DOC_IDS = "doc_ids.i64"
_LENGTHS = "lengths.i64"
_RECORD = "corpus.json"
_COUNT_CHUNK = 2**24
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedDocument:
    """One document's tokens.

    Attributes:
      doc_id: The document's index in the corpus.
      input_ids: Token ids, int32 [n].
      loss_mask: Whether a token is supervised, bool [n].
    """

    doc_id: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


class CorpusRecord(FrozenModel):
    """Contents of ``corpus.json``."""

    format_version: Literal[1] = 1
    num_documents: int
    num_tokens: int
    digest: str
    summary: CorpusSummary


class TokenStoreWriter:
    """Writes documents one by one; a context manager that closes its files."""

    def __init__(self, folder: Path) -> None:
        """Start a store in a folder, replacing one that is there.

        Raises:
          DiskSpaceError: If the disk is full.
        """
        self._folder = folder
        self._num_documents = 0
        self._num_tokens = 0
        self._hasher = xxhash.xxh3_128()
        with _disk_space(folder), ExitStack() as stack:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _RECORD).unlink(missing_ok=True)
            self._files: dict[str, BinaryIO] = {
                name: stack.enter_context((folder / name).open("wb", buffering=_BUFFER_BYTES))
                for name in (_TOKENS, _MASK, _DOC_IDS, _LENGTHS)
            }
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _disk_space(self._folder):
            self._stack.close()

    def append(self, document: TokenizedDocument) -> None:
        """Add a document after those written so far.

        Raises:
          DiskSpaceError: If the disk is full.
        """
        length = len(document.input_ids)
        ids = document.input_ids.astype("<u4").tobytes()
        mask = document.loss_mask.astype("u1").tobytes()
        self._hasher.update(struct.pack("<qq", document.doc_id, length))
        self._hasher.update(ids)
        self._hasher.update(mask)
        with _disk_space(self._folder):
            self._files[_TOKENS].write(ids)
            self._files[_MASK].write(mask)
            self._files[_DOC_IDS].write(struct.pack("<q", document.doc_id))
            self._files[_LENGTHS].write(struct.pack("<q", length))
        self._num_documents += 1
        self._num_tokens += length

    def seal(self, summary: CorpusSummary) -> "TokenizedCorpus":
        """Close the files, write the record, and open the result.

        Raises:
          DiskSpaceError: If the disk is full.
        """
        record = CorpusRecord(
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            digest=self._hasher.hexdigest(),
            summary=summary,
        )
        with _disk_space(self._folder):
            self._stack.close()
            unfinished = self._folder / f"{_RECORD}.tmp"
            unfinished.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self._folder / _RECORD)
        return TokenizedCorpus.open(self._folder)


class TokenizedCorpus:
    """A tokenised corpus, read by memory map: documents in corpus order, numbered from 0 without gaps.

    Attributes:
      lengths: Tokens of each document, int64 [D].
      doc_ids: Each document's index in the corpus, int64 [D], ascending; dropped documents leave gaps.
      digest: xxh3_128 of everything in it, in hexadecimal.
      summary: What was kept and dropped when it was made.
    """

    def __init__(self, folder: Path, record: CorpusRecord) -> None:
        """Map the files of a finished store; use :meth:`open`."""
        self._folder = folder
        self.digest = record.digest
        self.summary = record.summary
        self.lengths: npt.NDArray[np.int64] = _map_file(folder / _LENGTHS, "<i8", record.num_documents)
        self.doc_ids: npt.NDArray[np.int64] = _map_file(folder / _DOC_IDS, "<i8", record.num_documents)
        self._tokens: npt.NDArray[np.uint32] = _map_file(folder / _TOKENS, "<u4", record.num_tokens)
        self._mask: npt.NDArray[np.uint8] = _map_file(folder / _MASK, "u1", record.num_tokens)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        if self._starts[-1] != record.num_tokens:
            raise CacheDamagedError(
                f"{folder / _LENGTHS}: the documents' lengths add up to {self._starts[-1]} tokens, expected "
                f"{record.num_tokens}; tokenise the corpus again"
            )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a finished store.

        Raises:
          CacheFormatError: If the folder holds no finished store of this version.
          CacheDamagedError: If a file is missing or has another size than recorded.
        """
        path = folder / _RECORD
        if not path.is_file():
            raise CacheFormatError(f"{path}: no such file, so this is no finished tokenised corpus; tokenise again")
        try:
            record = CorpusRecord.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise CacheFormatError(
                f"{path}: not a tokenised corpus of this version ({error}); tokenise again"
            ) from error
        return cls(folder, record)

    @property
    def num_documents(self) -> int:
        """Documents, D."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self._tokens)

    def document(self, index: int) -> TokenizedDocument:
        """Copy one document out of the store.

        Args:
          index: Its number among the kept documents, 0-based.

        Raises:
          IndexError: If there is no such document.
        """
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of a corpus with {self.num_documents} documents")
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        return TokenizedDocument(
            doc_id=int(self.doc_ids[index]),
            input_ids=self._tokens[rows].astype(np.int32),
            loss_mask=self._mask[rows] != 0,
        )

    def documents(self) -> Iterator[TokenizedDocument]:
        """Yield all documents in order."""
        return (self.document(index) for index in range(self.num_documents))

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Count how often each token id occurs.

        Args:
          vocab_size: Ids that the target knows, V.

        Returns:
          Occurrences of ids 0 to V - 1, int64 [V].

        Raises:
          TargetError: If a token id is not below vocab_size.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.num_tokens, _COUNT_CHUNK):
            chunk = self._tokens[start : start + _COUNT_CHUNK]
            if chunk.max() >= vocab_size:
                raise TargetError(
                    f"the tokenizer produced the id {chunk.max()}, but the target knows only ids below {vocab_size}; "
                    f"use the tokenizer that belongs to the target"
                )
            counts += np.bincount(chunk, minlength=vocab_size)
        return counts

    def verify(self) -> None:
        """Read everything and compare it with the digest.

        Raises:
          CacheDamagedError: If the stored bytes are not those that were written.
        """
        hasher = xxhash.xxh3_128()
        for start, stop, doc_id in zip(self._starts, self._starts[1:], self.doc_ids, strict=False):
            hasher.update(struct.pack("<qq", doc_id, stop - start))
            hasher.update(self._tokens[start:stop].tobytes())
            hasher.update(self._mask[start:stop].tobytes())
        if hasher.hexdigest() != self.digest:
            raise CacheDamagedError(
                f"{self._folder}: the stored tokens have the digest {hasher.hexdigest()}, expected {self.digest}; "
                f"tokenise the corpus again"
            )


def _map_file(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    expected = count * np.dtype(dtype).itemsize
    if not path.is_file():
        raise CacheDamagedError(f"{path}: no such file, expected {expected} bytes; tokenise the corpus again")
    size = path.stat().st_size
    if size != expected:
        raise CacheDamagedError(f"{path}: has {size} bytes, expected {expected}; tokenise the corpus again")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype=dtype)


@contextmanager
def _disk_space(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskSpaceError(
            f"{folder}: the disk is full while the tokenised corpus is written; free some space"
        ) from error
