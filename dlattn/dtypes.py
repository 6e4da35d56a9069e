"""The element types, and their names in every vocabulary that dlattn speaks.

One table row per type: cuDNN's name, NumPy's, torch's, DLPack's (code, bits) and the C++ one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dlattn.enums import VocabularyEnum
from dlattn.errors import InvalidGraphError


class data_type(VocabularyEnum):  # noqa: N801 - cuDNN's public spelling
    """Element types, with cuDNN's member names."""

    NOT_SET = 0
    FLOAT = 1
    DOUBLE = 2
    HALF = 3
    BFLOAT16 = 4
    INT8 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    BOOLEAN = 9
    FP8_E4M3 = 10
    FP8_E5M2 = 11
    FP8_E8M0 = 12
    FP4_E2M1 = 13
    INT4 = 14
    FAST_FLOAT_FOR_FP8 = 15
    INT8x4 = 16
    UINT8x4 = 17
    INT8x32 = 18
    #: dlattn's own: FlashAttention's philox state.
    UINT64 = 64


#: Types of masks, of which anything but 0 is true.
BOOLEANS = (data_type.BOOLEAN, data_type.UINT8)


class _Names(NamedTuple):
    numpy: np.dtype[Any]
    torch: str
    dlpack: tuple[int, int]
    cpp: str


_TABLE: dict[data_type, _Names] = {
    data_type.FLOAT: _Names(np.dtype(np.float32), "float32", (2, 32), "float"),
    data_type.DOUBLE: _Names(np.dtype(np.float64), "float64", (2, 64), "double"),
    data_type.HALF: _Names(np.dtype(np.float16), "float16", (2, 16), "half"),
    data_type.BFLOAT16: _Names(np.dtype(ml_dtypes.bfloat16), "bfloat16", (4, 16), "bf16"),
    data_type.INT8: _Names(np.dtype(np.int8), "int8", (0, 8), "int8_t"),
    data_type.INT32: _Names(np.dtype(np.int32), "int32", (0, 32), "int32_t"),
    data_type.INT64: _Names(np.dtype(np.int64), "int64", (0, 64), "int64_t"),
    data_type.UINT64: _Names(np.dtype(np.uint64), "uint64", (1, 64), "uint64"),
    data_type.UINT8: _Names(np.dtype(np.uint8), "uint8", (1, 8), "uint8_t"),
    data_type.BOOLEAN: _Names(np.dtype(np.bool_), "bool", (6, 8), "bool"),
    data_type.FP8_E4M3: _Names(np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn", (10, 8), "e4m3"),
    data_type.FP8_E5M2: _Names(np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2", (12, 8), "e5m2"),
}

_BY_NUMPY = {names.numpy: dtype for dtype, names in _TABLE.items()}
_BY_TORCH = {f"torch.{names.torch}": dtype for dtype, names in _TABLE.items()}
_BY_DLPACK = {names.dlpack: dtype for dtype, names in _TABLE.items()}


def to_numpy(dtype: data_type) -> np.dtype[Any]:
    """The NumPy dtype (bf16 and fp8 through ml_dtypes)."""
    return _row(dtype).numpy


def to_torch_name(dtype: data_type) -> str:
    """The attribute name in the torch module, e.g. ``"bfloat16"``."""
    return _row(dtype).torch


def to_cpp(dtype: data_type) -> str:
    """The C++ type name used in generated kernels, e.g. ``"bf16"``."""
    return _row(dtype).cpp


def itemsize(dtype: data_type) -> int:
    """Bytes per element."""
    return _row(dtype).numpy.itemsize


def from_dlpack(code: int, bits: int) -> data_type:
    """The type of a DLPack (code, bits) pair; ``NOT_SET`` when dlattn has no such type."""
    return _BY_DLPACK.get((code, bits), data_type.NOT_SET)


def from_any(dtype: Any) -> data_type:
    """The type of a ``data_type``, a NumPy dtype or type, or a torch dtype.

    Raises:
        InvalidGraphError: the object names no element type that dlattn knows.
    """
    if isinstance(dtype, data_type):
        return dtype
    if dtype is None:
        return data_type.NOT_SET
    by_torch = _BY_TORCH.get(str(dtype))
    if by_torch is not None:
        return by_torch
    try:
        return _BY_NUMPY[np.dtype(dtype)]
    # NumPy parses texts, and reads the ``dtype`` of objects: each fails in its own way.
    except (TypeError, KeyError, ValueError, SyntaxError):
        raise InvalidGraphError(
            f"{dtype!r:.100} is not an element type; expected a dlattn.data_type, a NumPy dtype or "
            "a torch dtype such as torch.bfloat16"
        ) from None


def _row(dtype: data_type) -> _Names:
    try:
        return _TABLE[dtype]
    except KeyError:
        raise InvalidGraphError(
            f"{dtype} has no storage type; set the tensor's data type"
        ) from None
