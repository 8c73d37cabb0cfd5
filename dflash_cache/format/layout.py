"""Names, number formats, chunking and codecs of a shard's arrays, and the zarr metadata that follows from them.

All of it is a pure function of the manifest, so that a shard's metadata can be checked as well as read.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_cache.config import Codec
from dflash_cache.spec import FeatureSpec

__all__ = ["ARRAY_NAMES", "BLOSC_BLOCK_BYTES", "ArrayLayout", "shard_layout"]

# zstd's own 128 KiB blocks must not straddle the exponent and the mantissa plane that the byte shuffle makes: 512 KiB
# gives 1.41, Blosc's own choice 1.24 on real activations (docs/format.md).
BLOSC_BLOCK_BYTES = 524288
_FEATURE_CHUNK_BYTES = 1 << 20
_SCALAR_CHUNK_ITEMS = 8192
_BFLOAT16_NAN = 0x7FC0

ARRAY_NAMES = (
    "input_ids",
    "loss_mask",
    "positions",
    "doc_lengths",
    "doc_ids",
    "fc_features",
    "last_hidden_states",
)


@dataclass(frozen=True)
class ArrayLayout:
    """How one array of a shard lies on disk.

    Attributes:
      name: Its name in the zarr group.
      data_type: Its zarr v3 data type.
      shape: Its shape.
      dimension_names: One name for each axis.
      chunk_items: Entries along the first axis of an inner chunk; the other axes are never divided.
      compressed: Whether inner chunks are Blosc-compressed.
      layer_major: Whether inner chunks are transposed to (layer, token, hidden) before compression.
    """

    name: str
    data_type: str
    shape: tuple[int, ...]
    dimension_names: tuple[str, ...]
    chunk_items: int
    compressed: bool
    layer_major: bool

    @property
    def memory_dtype(self) -> npt.DTypeLike:
        """Little-endian numpy dtype in memory; bfloat16 is carried as uint16."""
        return {"bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "bool": "|b1"}[self.data_type]

    @property
    def fill_value(self) -> int:
        """What pads the last inner chunk, as the in-memory dtype."""
        return _BFLOAT16_NAN if self.data_type == "bfloat16" else 0

    @property
    def num_chunks(self) -> int:
        """Inner chunks in the array's one file."""
        return max(1, math.ceil(self.shape[0] / self.chunk_items))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        return (self.chunk_items, *self.shape[1:])

    @property
    def file_name(self) -> str:
        """Name of the array's one data file, in its folder."""
        return ".".join(["c", *("0" for _ in self.shape)])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the values, uncompressed and without padding."""
        return math.prod(self.shape) * np.dtype(self.memory_dtype).itemsize

    def zarr_metadata(self) -> dict[str, Any]:
        """Return the array's ``zarr.json`` (zarr v3; one sharded chunk spans the whole array)."""
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        item_bytes = np.dtype(self.memory_dtype).itemsize
        codecs: list[dict[str, Any]] = []
        if self.layer_major:
            codecs.append({"name": "transpose", "configuration": {"order": [1, 0, 2]}})
        codecs.append({"name": "bytes"} if self.data_type == "bool" else little)
        if self.compressed:
            blosc = {
                "typesize": item_bytes,
                "cname": "zstd",
                "clevel": 1,
                "shuffle": "shuffle" if item_bytes > 1 else "noshuffle",
                "blocksize": BLOSC_BLOCK_BYTES,
            }
            codecs.append({"name": "blosc", "configuration": blosc})
        codecs.append({"name": "crc32c"})
        sharding = {
            "chunk_shape": list(self.chunk_shape),
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        outer_shape = [self.num_chunks * self.chunk_items, *self.shape[1:]]
        fill: Any = {"bfloat16": "NaN", "bool": False}.get(self.data_type, 0)
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
            "dimension_names": list(self.dimension_names),
        }


def shard_layout(num_tokens: int, num_documents: int, features: FeatureSpec, codec: Codec) -> dict[str, ArrayLayout]:
    """Lay out the arrays of a shard.

    Args:
      num_tokens: T, tokens of all its documents.
      num_documents: D.
      features: Which hidden states are stored.
      codec: Compression profile.

    Returns:
      One layout for each of :data:`ARRAY_NAMES`, in that order.
    """
    compressed = codec == "compact"
    num_fc, hidden = len(features.fc_layers), features.hidden_size

    def scalars(name: str, data_type: str, items: int, axis: str) -> ArrayLayout:
        chunk = min(items, _SCALAR_CHUNK_ITEMS)
        return ArrayLayout(name, data_type, (items,), (axis,), chunk, compressed, layer_major=False)

    def states(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> ArrayLayout:
        chunk = min(shape[0], _power_of_two_below(_FEATURE_CHUNK_BYTES // (2 * math.prod(shape[1:]))))
        return ArrayLayout(name, features.dtype, shape, axes, chunk, compressed, compressed and len(shape) == 3)

    layouts = (
        scalars("input_ids", "int32", num_tokens, "token"),
        scalars("loss_mask", "bool", num_tokens, "token"),
        scalars("positions", "int32", num_tokens, "token"),
        scalars("doc_lengths", "int32", num_documents, "document"),
        scalars("doc_ids", "int64", num_documents, "document"),
        states("fc_features", (num_tokens, num_fc, hidden), ("token", "layer", "hidden")),
        states("last_hidden_states", (num_tokens, hidden), ("token", "hidden")),
    )
    return {layout.name: layout for layout in layouts}


def _power_of_two_below(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)
