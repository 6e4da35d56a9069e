"""Tensors of strangers: objects that have the DLPack protocol and nothing else; and late ones."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlattn.runtime import protocols


def late(x: Any) -> Any:
    """An array of JAX's that it still computes when this returns."""
    jax = pytest.importorskip("jax")

    def same(x: Any, y: Any) -> Any:
        y = jax.lax.fori_loop(0, 200, lambda _, y: jax.numpy.tanh(y @ y), y)
        return x + (y[0, 0] > 2)

    return jax.jit(same)(x, np.full((200, 200), 1e-3, np.float32))


class Producer:
    """A stranger's tensor: only the DLPack protocol of another framework's, and a call record."""

    def __init__(self, tensor: Any, device: tuple[int, int] | None = None) -> None:
        self.tensor = tensor
        self.device = device
        self.calls: list[dict[str, Any]] = []

    def __dlpack__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        arguments["stream"] = None
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device or self.tensor.__dlpack_device__()


class OldProducer(Producer):
    """A producer from before DLPack 1.0, which knows no ``max_version``."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.tensor.__dlpack__()


class Capsules(Producer):
    """Hands out capsules over a ``DLManagedTensorVersioned`` that the test wrote byte by byte."""

    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    def __init__(self, **fields: Any) -> None:
        self.extents = (ctypes.c_int64 * 3)(2, 3, 4)
        values = {
            "major": 1,
            "flags": 0,
            "device": 2,
            "index": 1,
            "code": 4,
            "bits": 16,
            "lanes": 1,
            **fields,
        }
        f = SimpleNamespace(**values)
        self.device = (f.device, f.index)
        header = protocols._VERSIONED_HEADER.pack(f.major, 0, 0, 0, f.flags)
        tensor = protocols._TENSOR.pack(
            4096,
            f.device,
            f.index,
            3,
            f.code,
            f.bits,
            f.lanes,
            ctypes.addressof(self.extents),
            0,
            32,
        )
        self.memory = ctypes.create_string_buffer(header + tensor)
        self.streams: list[Any] = []

    def __dlpack__(self, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        return self.new(ctypes.addressof(self.memory), b"dltensor_versioned", None)
