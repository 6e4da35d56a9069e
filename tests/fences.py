"""GPU memory between addresses that are not mapped: what leaves a tensor's buffer is a fault.

CUDA's virtual memory management (driver API, section 6.14) maps memory in steps of some MB. A
buffer begins where its mapping does, or ends where that ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.libraries import Library

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
#: How buffers are aligned, as allocators do it.
_ALIGNMENT = 512


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class FencedLibrary(Library):
    """CuPy whose buffers have fences; ``close`` frees them.

    Args:
        at_end: buffers end at a fence, give or take their alignment; else they begin behind one.
    """

    def __init__(self, at_end: bool) -> None:
        import cupy

        super().__init__(cupy)
        self._at_end = at_end
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._mapped: list[tuple[int, int, int]] = []
        place = _Location(_DEVICE, cupy.cuda.Device().id)
        self._properties = _Properties(_PINNED, 0, place)
        self._access = _Access(place, _READ_WRITE)
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), self._by_reference(), 0)
        self._step = step.value

    def full(self, size: int, value: int, dtype: str) -> Any:
        kind = np.dtype(self.dtype(dtype))
        nbytes = max(1, size * kind.itemsize)
        mapped = -(-nbytes // self._step) * self._step
        room = mapped + 2 * self._step
        begin, memory = ctypes.c_uint64(), ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(begin), ctypes.c_size_t(room), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        first = begin.value + self._step
        self._call(
            "cuMemCreate", ctypes.byref(memory), ctypes.c_size_t(mapped), self._by_reference(),
            ctypes.c_uint64(0),
        )  # fmt: skip
        at, extent = ctypes.c_uint64(first), ctypes.c_size_t(mapped)
        self._call("cuMemMap", at, extent, ctypes.c_size_t(0), memory, ctypes.c_uint64(0))
        self._call("cuMemSetAccess", at, extent, ctypes.byref(self._access), ctypes.c_size_t(1))
        self._call("cuMemRelease", memory)
        self._mapped.append((begin.value, room, mapped))
        rest = (mapped - nbytes) // _ALIGNMENT * _ALIGNMENT if self._at_end else 0
        owned = self.xp.cuda.UnownedMemory(first, mapped, self)
        made = self.xp.ndarray((size,), kind, self.xp.cuda.MemoryPointer(owned, rest))
        made.fill(value)
        return made

    def close(self) -> None:
        self.xp.cuda.Device().synchronize()
        for begin, room, mapped in self._mapped:
            self._call("cuMemUnmap", ctypes.c_uint64(begin + self._step), ctypes.c_size_t(mapped))
            self._call("cuMemAddressFree", ctypes.c_uint64(begin), ctypes.c_size_t(room))
        self._mapped.clear()

    def _by_reference(self) -> Any:
        return ctypes.byref(self._properties)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name} failed with CUresult {status}"
