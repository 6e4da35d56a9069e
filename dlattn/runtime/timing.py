"""Timing on a device: what is enqueued, between two events."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from dlattn.errors import DlattnError
from dlattn.runtime import launch
from dlattn.runtime.launch import call_in_context, device_guard, error_name
from dlattn.runtime.target import cuda_device_count

_NON_BLOCKING = 1  # CUstream_flags


class Stopwatch:
    """Times what it is given on a stream of its own."""

    def __init__(self, stream: int, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> None:
        self._stream = stream
        self._begin = begin
        self._end = end

    def __call__(self, enqueue: Callable[[int], None]) -> float:
        """Microseconds from the start to the end of what ``enqueue(stream)`` enqueues."""
        stream = ctypes.c_void_p(self._stream)
        _ask("cuEventRecord", self._begin, stream)
        enqueue(self._stream)
        _ask("cuEventRecord", self._end, stream)
        _ask("cuEventSynchronize", self._end)
        milliseconds = ctypes.c_float()
        _ask("cuEventElapsedTime", ctypes.byref(milliseconds), self._begin, self._end)
        return 1e3 * milliseconds.value


@contextmanager
def stopwatch(device_index: int) -> Iterator[Stopwatch]:
    """``with`` it: times on a device that has done all work so far, and is current meanwhile.

    Raises:
        DlattnError: the driver refused.
    """
    with device_guard(device_index) if cuda_device_count() > 1 else nullcontext():
        _ask("cuCtxSynchronize")
        stream, begin, end = (ctypes.c_void_p() for _ in range(3))
        try:
            _ask("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
            for event in (begin, end):
                _ask("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
            yield Stopwatch(stream.value or 0, begin, end)
        finally:
            for event in (begin, end):
                if event:
                    _call("cuEventDestroy_v2", event)
            if stream:
                _call("cuStreamDestroy_v2", stream)


def _call(function: str, *arguments: Any) -> int:
    return call_in_context(getattr(launch.driver(), function), *arguments)


def _ask(function: str, *arguments: Any) -> None:
    status = _call(function, *arguments)
    if status:
        raise DlattnError(
            f"Timing failed in {function} with {error_name(status)}. An earlier asynchronous "
            "failure on the same device may also be reported here."
        )
