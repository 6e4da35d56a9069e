"""Tensor maps: how Hopper's copy engine finds a box of a tensor (``CUtensorMap``).

Encoding is a host computation of the driver, 0.8 us; so is a new address in an encoded map, which
through ctypes costs as much. Drivers are asked once where they keep it, and then it is assigned.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from dlattn.dtypes import data_type, itemsize
from dlattn.errors import DlattnError
from dlattn.runtime.launch import call_in_context, driver

_DATA_TYPES = {
    data_type.BOOLEAN: 0, data_type.UINT8: 0, data_type.HALF: 6, data_type.BFLOAT16: 9,
}  # fmt: skip  # CUtensorMapDataType
_SWIZZLE_128B = 3  # CUtensorMapSwizzle
L2_PROMOTION_128B, L2_PROMOTION_256B = 2, 3  # CUtensorMapL2promotion

_MAP_BYTES = 128

#: Any aligned address: :func:`address_slot` takes the real one.
_NOWHERE = 1 << 20

#: Aligned addresses that differ from each other, and from that, in every bit that they may have.
_ANYWHERE = 0x7FFF_FFFF_FFF0, 0x2AAA_AAAA_AAA0, 0x5555_5555_5550


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
        dtype: a 16-bit type, or booleans.
        dim: elements per dimension, the contiguous one last, at most five.
        stride: in elements; the last is 1, the others multiples of 16 bytes.
        box: elements per dimension that one copy moves; the last of at most 128 bytes.

    Raises:
        DlattnError: the driver refused.
    """
    rank = len(dim)
    sizes = (ctypes.c_uint64 * rank)(*reversed(dim))
    # Where the size is 1 the stride means nothing, but the driver wants a legal one.
    size = itemsize(dtype)
    legal = [size * s if n > 1 else 16 for n, s in zip(dim, stride, strict=True)]
    strides = (ctypes.c_uint64 * (rank - 1))(*reversed(legal[:-1]))
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


class ReplacedAddress:
    """Where the driver puts an address into an encoded map: assign its ``value``."""

    def __init__(self, map_address: int) -> None:
        self._map = ctypes.c_void_p(map_address)
        self._replace: Any = driver().cuTensorMapReplaceAddress

    def _assign(self, address: int) -> None:
        status = self._replace(self._map, ctypes.c_void_p(address))
        if status:
            raise DlattnError(f"cuTensorMapReplaceAddress failed with CUresult {status}.")

    value = property(fset=_assign)


#: What takes an address as its ``value``.
AddressSlot = ctypes.c_uint64 | ReplacedAddress


def address_slot(map_address: int) -> AddressSlot:
    """Where the address of an encoded map's tensor goes, 16-byte aligned: assign its ``value``."""
    if begins_with_address():
        return ctypes.c_uint64.from_address(map_address)
    return ReplacedAddress(map_address)


@cache
def begins_with_address() -> bool:
    """Whether maps of this driver have the address in their first word, and nowhere else: as far as
    what it changes in one shows."""
    memory = ctypes.create_string_buffer(_MAP_BYTES + 63)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    encode(place, data_type.HALF, (256, 64), (64, 1), (64, 64))
    slot = ReplacedAddress(place)
    for address in _ANYWHERE:
        expected = address.to_bytes(8, sys.byteorder) + ctypes.string_at(place, _MAP_BYTES)[8:]
        slot.value = address
        if ctypes.string_at(place, _MAP_BYTES) != expected:
            return False
    return True
