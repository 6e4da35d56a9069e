"""Tensor maps: how Hopper's copy engine finds a box of a tensor (``CUtensorMap``).

Encoding is a host computation of the driver, 0.8 us; a new address in an encoded map costs 0.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from dlattn.dtypes import data_type
from dlattn.errors import DlattnError
from dlattn.runtime.launch import call_in_context, driver

_DATA_TYPES = {data_type.HALF: 6, data_type.BFLOAT16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle
L2_PROMOTION_128B, L2_PROMOTION_256B = 2, 3  # CUtensorMapL2promotion

#: Any aligned address: :func:`set_address` gives the real one.
_NOWHERE = 1 << 20


def encode(
    map_address: int,
    dtype: data_type,
    dim: Sequence[int],
    stride: Sequence[int],
    box: Sequence[int],
    l2_promotion: int = L2_PROMOTION_256B,
) -> None:
    """Write a map of a tensor whose address is not known yet.

    Boxes are 128-byte swizzled in shared memory, and zeros where they leave the tensor.

    Args:
        map_address: 128 bytes, aligned to 64.
        dtype: a 16-bit type.
        dim: elements per dimension, the contiguous one last, at most five.
        stride: in elements; the last is 1, the others multiples of 16 bytes.
        box: elements per dimension that one copy moves; the last at most 64.

    Raises:
        DlattnError: the driver refused.
    """
    rank = len(dim)
    sizes = (ctypes.c_uint64 * rank)(*reversed(dim))
    # Where the size is 1 the stride means nothing, but the driver wants a legal one.
    legal = [s if n > 1 else 8 for n, s in zip(dim, stride, strict=True)]
    strides = (ctypes.c_uint64 * (rank - 1))(*(2 * s for s in reversed(legal[:-1])))
    boxes = (ctypes.c_uint32 * rank)(*reversed(box))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    arguments = (
        ctypes.c_void_p(map_address),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(_NOWHERE),
        sizes,
        strides,
        boxes,
        steps,
        0,
        _SWIZZLE_128B,
        l2_promotion,
        0,
    )
    status = call_in_context(driver().cuTensorMapEncodeTiled, *arguments)
    if status:
        raise DlattnError(
            f"cuTensorMapEncodeTiled failed with CUresult {status} for dim {tuple(dim)}, stride "
            f"{tuple(stride)}, box {tuple(box)}."
        )


def set_address(map_address: int, address: int) -> None:
    """Point an encoded map at a tensor, 16-byte aligned."""
    status = _replace()(ctypes.c_void_p(map_address), ctypes.c_void_p(address))
    if status:
        raise DlattnError(f"cuTensorMapReplaceAddress failed with CUresult {status}.")


@cache
def _replace() -> Any:
    return driver().cuTensorMapReplaceAddress
