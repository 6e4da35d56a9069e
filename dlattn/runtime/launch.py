"""Launching kernels through the driver's ``cuLaunchKernelEx``, by ctypes.

A launch is configured once and then costs about a microsecond of Python; unlike CuPy's, it can
carry launch attributes (programmatic dependent launch, clusters).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from threading import Lock
from types import TracebackType
from typing import Any, NoReturn

from dlattn.errors import DlattnError

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_ERROR_INVALID_CONTEXT = 201  # CUresult


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: the value is a union of 64 bytes, of which we set ints."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int * 16),
    )


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def cluster_attribute(blocks: int) -> LaunchAttribute:
    """The attribute of clusters of so many blocks in a row."""
    return LaunchAttribute(_CLUSTER_DIMENSION, b"", (blocks, 1, 1))


class Launch:
    """A kernel with its grid and its one parameter, a struct whose address is fixed.

    Calling it enqueues the kernel on a stream; the driver copies the struct during the call, so
    that it may be rewritten afterwards. One launch must not be called from two threads at once:
    hold the lock that guards the struct. ``enqueue`` does the same, as a function that keeps what
    it needs in its own variables, which Python calls in half the time.

    Args:
        function: the driver's ``CUfunction``.
        grid: blocks in x, y and z; an empty grid launches nothing.
        block: threads per block.
        shared: bytes of dynamic shared memory per block.
        params_address: host address of the struct, which the caller keeps alive.
        programmatic: let the kernel start before its predecessor on the stream has ended; it must
            wait with ``griddepcontrol.wait`` before it reads what the predecessor wrote.
        cluster: blocks, neighbours in x, that run at the same time and see each other's shared
            memory; what divides the grid.
        name: for messages.
    """

    def __init__(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: int,
        shared: int,
        params_address: int,
        *,
        programmatic: bool = False,
        cluster: int = 1,
        name: str = "kernel",
    ) -> None:
        self.name = name
        self.function = function
        self.programmatic = programmatic
        self.cluster = cluster_attribute(cluster) if cluster > 1 else None
        self.is_empty = 0 in grid
        attributes = [self.cluster] if self.cluster else []
        if programmatic:
            attributes.append(LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1,)))
        self._attributes = (LaunchAttribute * len(attributes))(*attributes)
        self.config = LaunchConfig(
            grid,
            (block, 1, 1),
            shared,
            None,
            self._attributes,
            len(attributes),
        )
        self.params = (ctypes.c_void_p * 1)(params_address)
        self.enqueue = self._composed()

    def _composed(self) -> Callable[[int], None]:
        if self.is_empty:
            return lambda stream: None
        launch, config, name, last = driver().cuLaunchKernelEx, self.config, self.name, 0
        arguments = ctypes.byref(config), ctypes.c_void_p(self.function), self.params, None

        def enqueue(stream: int) -> None:
            nonlocal last
            if stream != last:
                config.stream = last = stream
            status = launch(*arguments)  # as every call pays for it, without a wrapper
            if status == _ERROR_INVALID_CONTEXT:
                make_context_current()
                status = launch(*arguments)
            if status:
                _refuse(name, config, status)

        return enqueue

    def __call__(self, stream: int) -> None:
        """Enqueue the kernel; the device of the function must be current (:func:`device_guard`).

        Args:
            stream: CUDA stream handle; 0 is the legacy default stream.

        Raises:
            DlattnError: the driver refused.
        """
        self.enqueue(stream)


def _refuse(name: str, config: LaunchConfig, status: int) -> NoReturn:
    raise DlattnError(
        f"Launching {name} failed with {error_name(status)} (grid {tuple(config.grid)}, "
        f"{config.block[0]} threads, {config.shared} bytes of shared memory, stream "
        f"{config.stream or 0:#x}). An earlier asynchronous failure on the same device may also be "
        "reported here."
    )


def clear(address: int, nbytes: int, stream: int) -> None:
    """Enqueue setting bytes of device memory to zero.

    Raises:
        DlattnError: the driver refused.
    """
    status = call_in_context(
        driver().cuMemsetD8Async,
        ctypes.c_uint64(address),
        ctypes.c_ubyte(0),
        ctypes.c_size_t(nbytes),
        ctypes.c_void_p(stream),
    )
    if status:
        raise DlattnError(
            f"Clearing {nbytes} bytes of workspace at {address:#x} failed with "
            f"{error_name(status)} (stream {stream:#x}). The workspace must be device memory of "
            "at least the size that the graph asks for."
        )


class Clear:
    """Bytes of device memory that are set to zero; called as a :class:`Launch` is.

    Attributes:
        address: where they are; it may be set anew before each call.
        nbytes: how many.
    """

    is_empty = False

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = 0

    def __call__(self, stream: int) -> None:
        """Enqueue it; see :func:`clear`."""
        clear(self.address, self.nbytes, stream)

    enqueue = __call__


#: What a plan does, one after the other: enqueued by a call, or a node of a CUDA graph.
Operation = Launch | Clear


class device_guard:  # noqa: N801 - used as a statement, like a function
    """``with device_guard(index):`` makes a CUDA device current, and does nothing if it is."""

    __slots__ = ("_index", "_previous")

    def __init__(self, index: int) -> None:
        self._index = index
        self._previous = index

    def __enter__(self) -> None:
        runtime = _runtime()
        self._previous = runtime.getDevice()
        if self._previous != self._index:
            runtime.setDevice(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous != self._index:
            _runtime().setDevice(self._previous)


def turns(index: int, devices: int) -> AbstractContextManager[object]:
    """``with`` it: one thread at a time, with a CUDA device current, which of one device it is."""
    return _DeviceTurns(index) if devices > 1 else Lock()


class _DeviceTurns(device_guard):
    """Its number of the device before is one thread's at a time."""

    __slots__ = ("_lock",)

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._lock = Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            super().__enter__()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            self._lock.release()


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DlattnError(
            f"The NVIDIA driver (libcuda.so.1) could not be loaded: {error}. Kernels run only on a "
            "machine with a GPU and its driver; graphs on CPU tensors run without."
        ) from error


@cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def call_in_context(function: Any, *arguments: Any) -> int:
    """The status of a driver call, which is made again if it was the thread's first CUDA call."""
    status: int = function(*arguments)
    if status == _ERROR_INVALID_CONTEXT:
        make_context_current()
        status = function(*arguments)
    return status


def make_context_current() -> None:
    """Give this thread the context of its current device, as its first CUDA call would."""
    runtime = _runtime()
    runtime.setDevice(runtime.getDevice())


def error_name(status: int) -> str:
    name = ctypes.c_char_p()
    if driver().cuGetErrorName(status, ctypes.byref(name)) or name.value is None:
        return f"CUresult {status}"
    return name.value.decode()
