"""zarr's registered ``bfloat16`` data type, which zarr-python 3.1 itself does not carry.

Published as entry points (see pyproject.toml), so that ``zarr.open`` reads a cache wherever this package is installed,
without an import.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype.common import HasItemSize
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import DataTypeValidationError, data_type_registry

__all__ = ["BFLOAT16", "BFloat16", "Buffer"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any], HasItemSize):
    """Brain floating point, 16 bits: 1 sign, 8 exponent, 7 mantissa (zarr-extensions, ``data-types/bfloat16``)."""

    dtype_cls = type(BFLOAT16)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == BFLOAT16)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Wrap ml_dtypes' bfloat16.

        Raises:
          DataTypeValidationError: If dtype is another one.
        """
        if cls._check_native_dtype(dtype):
            return cls(endianness="little")
        raise DataTypeValidationError(f"expected ml_dtypes.bfloat16, got {dtype}")

    def to_native_dtype(self) -> Any:
        """Return ml_dtypes' bfloat16, which exists in the machine's byte order alone."""
        return BFLOAT16

    def to_json(self, zarr_format: Any) -> Any:
        """Return the name in zarr v3 metadata.

        Raises:
          ValueError: For zarr v2, which has no name for it.
        """
        if zarr_format != 3:
            raise ValueError("zarr v2 has no bfloat16; use zarr_format=3")
        return self._zarr_v3_name

    @property
    def item_size(self) -> int:
        """Bytes of one number."""
        return 2


def register() -> None:
    """Make zarr know bfloat16 in this process, also where the package's entry points are not installed."""
    if "bfloat16" not in data_type_registry.contents:
        data_type_registry.register("bfloat16", BFloat16)


register()
