"""Memory of CuPy and NumPy, for frameworks whose own cannot be made, or written to, from here."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.runtime.protocols import TensorView
from dlattn.runtime.target import cuda_target

Dims = tuple[int, ...]


def _span(shape: Dims, stride: Dims) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def to_device(array: Any, index: int) -> Any:
    """A CuPy copy of a NumPy array on a device, complete when this returns."""
    import cupy

    array = np.ascontiguousarray(array)
    with cupy.cuda.Device(index):
        # Not cupy.asarray, which makes a pool of pinned memory first, for 2 ms. On the current
        # stream, whose earlier work may still be writing to the memory that it gives out anew.
        copy = cupy.empty(array.shape, array.dtype)
        copy.data.copy_from_host_async(array.ctypes.data, array.nbytes)
        cupy.cuda.get_current_stream().synchronize()
    return copy


def empty_numpy(shape: Dims, stride: Dims, dtype: data_type) -> Any:
    element = dtypes.to_numpy(dtype)
    buffer = np.empty(_span(shape, stride) * element.itemsize, np.uint8)
    strides = [step * element.itemsize for step in stride]
    return np.ndarray(shape, element, buffer, strides=strides)


def empty_cupy(index: int, shape: Dims, stride: Dims, dtype: data_type) -> Any:
    import cupy

    element = dtypes.to_numpy(dtype)
    with cupy.cuda.Device(index):
        memory = cupy.cuda.alloc(_span(shape, stride) * element.itemsize)
    strides = tuple(step * element.itemsize for step in stride)
    return cupy.ndarray(shape, element, memory, strides)


def array_of(seen: TensorView) -> Any:
    """Somebody's memory, of one element or more, as an array of CuPy or NumPy, without a copy."""
    element = dtypes.to_numpy(seen.dtype)
    nbytes = _span(seen.shape, seen.stride) * element.itemsize
    strides = tuple(step * element.itemsize for step in seen.stride)
    kind, index = seen.device
    if kind != "cuda":
        memory: Any = (ctypes.c_char * nbytes).from_address(seen.ptr)
        return np.ndarray(seen.shape, element, memory, strides=strides)
    import cupy

    unowned = cupy.cuda.UnownedMemory(seen.ptr, nbytes, None, index)
    return cupy.ndarray(seen.shape, element, cupy.cuda.MemoryPointer(unowned, 0), strides)


def cuda_ordinal(pointer: int) -> int:
    """The device that owns an address.

    Raises:
        DlattnError: CuPy, which is asked, is not there, or finds no device.
    """
    if not pointer:
        return 0
    cuda_target(0)
    from cupy.cuda import runtime

    return int(runtime.pointerGetAttributes(pointer).device)


def cupy_stream(device: tuple[str, int]) -> int:
    """CuPy's current stream on a CUDA device; 0 on others."""
    if device[0] != "cuda":
        return 0
    from cupy.cuda import get_current_stream

    return int(get_current_stream(device[1]).ptr)


def wait_for(producer: int, stream: int) -> None:
    from cupy.cuda import Event, runtime

    event = Event(disable_timing=True)
    runtime.eventRecord(event.ptr, producer)
    runtime.streamWaitEvent(stream, event.ptr)
