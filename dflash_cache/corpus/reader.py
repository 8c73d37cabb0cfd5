"""Read documents from JSON Lines files, plain or gzip, one at a time.

Memory holds one line, whatever the files' size. Compression is told from a file's first bytes, never from its name;
a new kind of file is a new branch of ``_open_lines``.
"""

import gzip
import io
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path

from dflash_cache.corpus.records import Message, RawDocument, Source, parse_record
from dflash_cache.errors import CorpusError

__all__ = ["DocumentReader", "Message", "RawDocument", "Selection", "Source", "read_documents"]

MAX_LINE_BYTES = 256 * 2**20
"""A longer line is not a document but a file of another kind; the limit keeps memory bounded."""

_BUFFER_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_KINDS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARRO": "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which documents of the files are read. They keep their order and their index.

    Attributes:
      limit: Only the first so many; None takes all.
      sample: So many of those, drawn without replacement; None takes all, as does a number not below theirs.
      seed: Of the draw.
    """

    limit: int | None = None
    sample: int | None = None
    seed: int = 0

    def chosen(self, count: int) -> Iterator[bool]:
        """Tell of each document in turn whether it is drawn; endless beyond the last, without a sample.

        Selection sampling (Knuth, The Art of Computer Programming 2, algorithm S): one pass, no memory, and every
        subset equally likely. Python promises that ``random()`` gives the same numbers in every version.

        Args:
          count: How many documents there are to draw from; not used without a sample.
        """
        if self.sample is None:
            yield from repeat(True)
            return
        generator = random.Random(self.seed)
        wanted = min(self.sample, count)
        for left in range(count, 0, -1):
            drawn = generator.random() * left < wanted
            wanted -= drawn
            yield drawn


_EVERYTHING = Selection()


class DocumentReader:
    """The documents of several files, in order, with a count of the bytes read so far.

    Iterating reads from the first file again each time. Lines that are not selected are not looked into. A sample
    takes a pass more, which counts lines.
    """

    def __init__(self, files: Sequence[Path], selection: Selection = _EVERYTHING) -> None:
        """Check that every file is there before the first is read.

        Raises:
          CorpusError: If no file is given, or one is missing or not a regular file.
        """
        if not files:
            raise CorpusError("no corpus files given; expected at least one JSON Lines file")
        self._files = tuple(files)
        self._selection = selection
        self._sizes = tuple(_file_size(path) for path in self._files)
        self._finished_bytes = 0
        self._open_file: io.BufferedReader[io.FileIO] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, as they lie on disk."""
        return sum(self._sizes)

    @property
    def bytes_read(self) -> int:
        """Bytes of the files, as they lie on disk, that were read so far."""
        return self._finished_bytes + (0 if self._open_file is None else self._open_file.tell())

    def __iter__(self) -> Iterator[RawDocument]:
        """Yield every selected non-blank line as a document.

        Raises:
          CorpusError: At the first line or file that cannot be read; names file and line.
        """
        sampled = self._selection.sample is not None
        chosen = self._selection.chosen(sum(1 for _ in self._documents()) if sampled else 0)
        for index, ((source, line), drawn) in enumerate(zip(self._documents(), chosen, strict=False)):
            if drawn:
                yield parse_record(line, index, source)

    def _documents(self) -> Iterator[tuple[Source, bytes]]:
        """Yield the non-blank lines of all files, up to the limit."""
        self._finished_bytes = 0
        left = self._selection.limit
        for path, size in zip(self._files, self._sizes, strict=True):
            for line_number, line in self._lines(path):
                if not line.strip():
                    continue
                if left == 0:
                    self._finished_bytes = self.total_bytes
                    return
                left = None if left is None else left - 1
                yield Source(path, line_number), line
            self._finished_bytes += size

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        line_number = 0
        try:
            with io.BufferedReader(io.FileIO(path), _BUFFER_BYTES) as file:
                self._open_file = file
                for line in _open_lines(file, path):
                    line_number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise CorpusError(
                            f"{Source(path, line_number)}: the line is longer than {MAX_LINE_BYTES} bytes; "
                            f"expected JSON Lines, one object a line"
                        )
                    yield line_number, line.removeprefix(_UTF8_BOM) if line_number == 1 else line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorpusError(
                f"{path}: the gzip data is cut short or damaged after line {line_number} ({error}); "
                f"fetch or compress the file again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read after line {line_number} ({error.strerror or error})") from error
        finally:
            self._open_file = None


def read_documents(files: Sequence[Path]) -> Iterator[RawDocument]:
    """Yield the documents of several files, in order; see :class:`DocumentReader`.

    Raises:
      CorpusError: At the first file or line that cannot be read.
    """
    return iter(DocumentReader(files))


def _open_lines(file: "io.BufferedReader[io.FileIO]", path: Path) -> Iterator[bytes]:
    head = file.peek(4)[:4]
    for magic, kind in _OTHER_KINDS.items():
        if head.startswith(magic):
            raise CorpusError(
                f"{path}: looks like {kind}; expected JSON Lines in UTF-8, plain or gzip, so convert it first"
            )
    stream: io.BufferedIOBase = gzip.GzipFile(fileobj=file, mode="rb") if head.startswith(_GZIP_MAGIC) else file
    return iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")


def _file_size(path: Path) -> int:
    if path.is_dir():
        raise CorpusError(f"{path}: is a folder; expected a JSON Lines file, so name the files in it one by one")
    if not path.exists():
        raise CorpusError(f"{path}: no such file; expected a JSON Lines file, plain or gzip")
    if not path.is_file():
        raise CorpusError(f"{path}: is not a regular file; expected a JSON Lines file, plain or gzip")
    return path.stat().st_size
