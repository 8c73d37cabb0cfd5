"""Fingerprints of a target: its config, tokenizer and weights."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from dflash_cache.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["config_digest", "hub_weights_digest", "stored_dtypes", "tokenizer_digest", "weight_files", "weights_digest"]

# Smaller files are read whole. Of larger ones a sample of every tensor: a 54 GB checkpoint costs about 20 MB of reads,
# and retraining, merging or requantising changes whole tensors.
WHOLE_FILE_BYTES = 256 << 20
_SAMPLE_BYTES = 4096
_STRIDE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100 << 20
# Says which program wrote the config, or where it lay; neither changes the model.
_INCIDENTAL_KEYS = frozenset({"transformers_version", "_name_or_path", "_commit_hash"})


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest a model's config as it is stored, without what the loading library adds.

    Args:
      config: The contents of ``config.json``.
    """
    kept = {name: value for name, value in config.items() if name not in _INCIDENTAL_KEYS}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True, ensure_ascii=False).encode("utf-8"))


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest a fast tokenizer: vocabulary, merges, normaliser, pre-tokeniser, added tokens."""
    return xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode("utf-8"))


def hub_weights_digest(location: str, commit: str) -> str:
    """Digest hub weights by their commit, which fixes every byte, so that nothing is fetched to compare."""
    return xxhash.xxh3_128_hexdigest(f"hub:{location}@{commit}".encode())


def weight_files(folder: Path) -> list[Path]:
    """List the weight files that transformers would load from a folder, and their index.

    Raises:
      TargetError: If there are none.
    """
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        files = sorted(folder.glob(pattern))
        if files:
            return [*files, *sorted(folder.glob(f"{pattern.split('*')[0]}*.index.json"))]
    raise TargetError(
        f"{folder} has no weights (looked for *.safetensors and pytorch_model*.bin); fetch the model completely"
    )


def weights_digest(folder: Path) -> str:
    """Digest a folder's weights: names, sizes, headers and contents.

    Files up to 256 MiB are read whole. Of a larger safetensors file: the header, and 4 KiB at the start, middle and end
    of every tensor; of any other larger file, 4 KiB of every MiB.

    Raises:
      TargetError: If there are no weights or one cannot be read.
    """
    hasher = xxhash.xxh3_128()
    for path in weight_files(folder):
        try:
            size = path.stat().st_size
            hasher.update(f"{path.name}:{size}\n".encode())
            with path.open("rb") as file:
                for block in _digested_blocks(file, path, size):
                    hasher.update(block)
        except OSError as error:
            raise TargetError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()


def stored_dtypes(folder: Path) -> dict[str, int]:
    """Count the bytes of each number format in a folder's safetensors files, by safetensors' names (``BF16``)."""
    totals: dict[str, int] = {}
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        with path.open("rb") as file:
            _, entries = _safetensors_header(file, path, path.stat().st_size)
        for dtype, start, stop in entries:
            totals[dtype] = totals.get(dtype, 0) + stop - start
    return totals


def _digested_blocks(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        _safetensors_header(file, path, size)  # a file that was cut short is named here, before anything is loaded
        file.seek(0)
    if size <= WHOLE_FILE_BYTES:
        while block := file.read(1 << 22):
            yield block
        return
    if path.suffix != ".safetensors":
        for offset in range(0, size, _STRIDE_BYTES):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, offset)
        return
    header, entries = _safetensors_header(file, path, size)
    yield header
    first = 8 + len(header)
    for _, start, stop in entries:
        last = max(start, stop - _SAMPLE_BYTES)
        for offset in (start, (start + last) // 2, last):
            yield os.pread(file.fileno(), min(_SAMPLE_BYTES, stop - offset), first + offset)


def _safetensors_header(file: BinaryIO, path: Path, size: int) -> tuple[bytes, list[tuple[str, int, int]]]:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise TargetError(
            f"{path} is not a whole safetensors file (its header would have {length} bytes); fetch it again"
        )
    header = file.read(length)
    try:
        document = json.loads(header)
        entries = [
            (str(entry["dtype"]), int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in document.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"{path} is not a whole safetensors file: its header cannot be read ({error})") from error
    expected = 8 + length + max((stop for _, _, stop in entries), default=0)
    if size != expected:
        raise TargetError(f"{path} has {size:,} bytes, its header says {expected:,}: it was cut short; fetch it again")
    return header, sorted(entries, key=lambda entry: entry[1])
