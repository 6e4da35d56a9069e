"""Reading a tensor through the public exchange protocols, whatever framework made it.

A DLPack capsule is *borrowed*: its fields are read and it is dropped under its own name, which
runs the producer's deleter. The caller keeps the tensor alive during the call, and from then on
stream order governs the memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dlattn.dtypes import data_type, from_any, from_dlpack
from dlattn.errors import InvalidGraphError, InvalidVariantPackError


class TensorView(NamedTuple):
    """Where a tensor lies and what it is.

    Attributes:
        ptr: address of element (0, ..., 0); may be 0 when the tensor has no elements.
        shape: elements per dimension.
        stride: elements between neighbours, one per dimension.
        dtype: element type.
        device: DLPack-like kind and ordinal: ``("cuda", 1)``, ``("cpu", 0)``.
        writable: the framework lets others write to it (False for JAX arrays).
    """

    ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: data_type
    device: tuple[str, int]
    writable: bool


class ElementTypes(dict[Any, data_type]):
    """Any framework's dtype object -> ``data_type``, looked up by name once per dtype."""

    def __missing__(self, dtype: Any) -> data_type:
        try:
            known = from_any(dtype)
        except InvalidGraphError:
            raise InvalidVariantPackError(
                f"Its element type is {dtype}, which dlattn has no use for; convert the tensor to "
                "one of the types of dlattn.data_type"
            ) from None
        self[dtype] = known
        return known


#: Shared by every adapter.
ELEMENT_TYPES = ElementTypes()


@lru_cache(maxsize=4096)
def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def strides_as(
    shape: Sequence[int], like_shape: Sequence[int], like_stride: Sequence[int]
) -> tuple[int, ...]:
    """Strides without gaps, in the order that the dimensions of another tensor have in memory, but
    for the last one, which is innermost; as ``torch.empty_like`` has them. Row-major if that tensor
    repeats memory.

    Args:
        like_shape, like_stride: of as many dimensions; those of one element have no order.
    """
    last = len(shape) - 1
    order = [i for i in range(last) if like_shape[i] != 1]
    if not any(like_stride[i] == 0 for i in order):
        order.sort(key=lambda i: -like_stride[i])
    row_major = all(i < j for i, j in zip(order, order[1:], strict=False))
    others = [i for i in range(last) if i not in order]
    outermost_first = range(last + 1) if row_major else (*others, *order, last)
    strides, step = [1] * len(shape), 1
    for i in reversed(outermost_first):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


@lru_cache(maxsize=4096)
def element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in elements from strides in bytes.

    Raises:
        InvalidVariantPackError: a stride is no multiple of the element size.
    """
    if any(stride % itemsize for stride in strides):
        raise InvalidVariantPackError(
            f"Its strides are {strides} bytes, which are no multiples of its {itemsize}-byte "
            "elements; pass a contiguous copy"
        )
    return tuple(stride // itemsize for stride in strides)


def view_by_protocol(obj: Any, cuda_ordinal: Callable[[int], int]) -> TensorView:
    """Read a tensor of an unknown type: DLPack, then the CUDA or NumPy array interface.

    Args:
        cuda_ordinal: the device that owns an address, which the CUDA interface does not tell.

    Raises:
        InvalidVariantPackError: the object is no tensor, or one that cannot be used in place.
    """
    kind = type(obj)
    if hasattr(kind, "__dlpack__"):
        return _view_by_dlpack(obj)
    # Wrappers of addresses have interfaces of the object, not of its type, and types that have one
    # for their objects are no tensors.
    if not isinstance(obj, (type, np.generic)):
        if hasattr(obj, "__cuda_array_interface__"):
            interface = obj.__cuda_array_interface__
            return _view_by_interface(interface, lambda pointer: ("cuda", cuda_ordinal(pointer)))
        if hasattr(obj, "__array_interface__"):
            return _view_by_interface(obj.__array_interface__, lambda pointer: ("cpu", 0))
    raise InvalidVariantPackError(
        f"Expected a tensor (torch.Tensor, jax.Array, cupy.ndarray, numpy.ndarray or any object "
        f"with __dlpack__), but got {obj!r:.200} of type {kind.__module__}.{kind.__qualname__}"
    )


# DLPack -------------------------------------------------------------------------------------------

_MAX_VERSION = (1, 0)
_FLAG_READ_ONLY = 1
_FLAG_IS_COPIED = 2

#: major, minor, manager context, deleter, flags
_VERSIONED_HEADER = struct.Struct("=IIQQQ")
#: data, device type, device id, ndim, type code, bits, lanes, shape, strides, byte offset
_TENSOR = struct.Struct("=QiiiBBHQQQ")

#: kDLCPU, kDLCUDA, kDLCUDAHost (pinned, so used like host memory), kDLCUDAManaged.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _view_by_dlpack(obj: Any) -> TensorView:
    try:
        # -1: no ordering. Reading the address needs none, and ``order_before`` gives it.
        stream = -1 if _DEVICES.get(obj.__dlpack_device__()[0]) == "cuda" else None
        capsule = export(obj, stream)
    except Exception as error:
        raise InvalidVariantPackError(
            f"{type(obj).__module__}.{type(obj).__qualname__} refused to export itself through "
            f"DLPack: {error}"
        ) from error
    return view_capsule(capsule)


def export(obj: Any, stream: int | None) -> Any:
    """The object's DLPack capsule, versioned when the producer can make one."""
    try:
        return obj.__dlpack__(stream=stream, max_version=_MAX_VERSION)
    except TypeError:  # a producer older than DLPack 1.0
        return obj.__dlpack__(stream=stream)


def view_capsule(capsule: Any) -> TensorView:
    """Read a DLPack capsule without consuming it.

    Raises:
        InvalidVariantPackError: the capsule is consumed, too new, a copy, or holds something that
            is not a strided tensor of a type dlattn knows on a device that dlattn knows.
    """
    flags = 0
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        major, minor, _, _, flags = _VERSIONED_HEADER.unpack(
            ctypes.string_at(address, _VERSIONED_HEADER.size)
        )
        if major > _MAX_VERSION[0]:
            raise InvalidVariantPackError(
                f"Its DLPack capsule has version {major}.{minor}, but dlattn reads versions 0 and 1"
            )
        address += _VERSIONED_HEADER.size
    elif _capsule_is_valid(capsule, b"dltensor"):
        address = _capsule_pointer(capsule, b"dltensor")
    else:
        raise InvalidVariantPackError(
            f"Expected an unused DLPack capsule, but got {capsule!r}; a capsule can be read until "
            "a framework has consumed it"
        )
    if flags & _FLAG_IS_COPIED:
        raise InvalidVariantPackError(
            "DLPack exported a copy of it, which is freed before a kernel could use it; pass a "
            "tensor that its framework can share in place"
        )
    return _decode(ctypes.string_at(address, _TENSOR.size), not flags & _FLAG_READ_ONLY)


def _decode(tensor: bytes, writable: bool) -> TensorView:
    data, device_type, device_id, ndim, code, bits, lanes, shape_at, strides_at, byte_offset = (
        _TENSOR.unpack(tensor)
    )
    dtype = from_dlpack(code, bits) if lanes == 1 else data_type.NOT_SET
    if dtype is data_type.NOT_SET:
        raise InvalidVariantPackError(
            f"Its DLPack element type is (code {code}, {bits} bits, {lanes} lanes), which dlattn "
            "has no use for; convert the tensor to one of the types of dlattn.data_type"
        )
    device = _DEVICES.get(device_type)
    if device is None:
        raise InvalidVariantPackError(
            f"It lies on DLPack device type {device_type}, but expected CPU or CUDA memory"
        )
    shape = _integers(shape_at, ndim)
    stride = _integers(strides_at, ndim) if strides_at else compact_strides(shape)
    return TensorView(
        data + byte_offset if data else 0,
        shape,
        stride,
        dtype,
        (device, device_id if device == "cuda" else 0),
        writable,
    )


def _integers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"={count}q", ctypes.string_at(address, 8 * count)) if count else ()


# Array interfaces ---------------------------------------------------------------------------------


def _view_by_interface(
    interface: dict[str, Any], device_of: Callable[[int], tuple[str, int]]
) -> TensorView:
    if interface.get("mask") is not None:
        raise InvalidVariantPackError(
            "It has a mask of its own, which dlattn does not read; pass its values without one"
        )
    if not isinstance(interface.get("data"), tuple):
        raise InvalidVariantPackError(
            "Its array interface has no address under 'data'; pass a tensor that has one"
        )
    pointer, read_only = interface["data"]
    dtype = np.dtype(interface["typestr"])
    known = ELEMENT_TYPES[dtype]
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    stride = (
        compact_strides(shape)
        if strides is None
        else element_strides(tuple(strides), dtype.itemsize)
    )
    address = pointer or 0
    return TensorView(address, shape, stride, known, device_of(address), not read_only)
