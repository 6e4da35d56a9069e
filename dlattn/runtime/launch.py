"""What plans enqueue, by ctypes and the driver's own functions, and the device that it needs.

An operation is configured once and then costs a microsecond of Python. ``cuLaunchKernelEx``, unlike
CuPy's launches, takes attributes (programmatic dependent launch, clusters).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import TracebackType
from typing import Any

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


class Operation(ABC):
    """What a plan does in one call of the driver: enqueued on a stream, or a node of a CUDA graph.

    Calling it enqueues it. One operation must not be called from two threads at once: hold the
    lock that guards what it reads.

    Attributes:
        is_empty: it does nothing, so that there is nothing to enqueue.
        function, arguments: of the driver, and all that it is given, made once.
        stream: the handle that the arguments hold now; see :meth:`move`.
    """

    is_empty = False

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.stream = 0

    @abstractmethod
    def move(self, stream: int) -> None:
        """Sets the stream of the calls from now on; 0 is the legacy default stream."""

    @abstractmethod
    def refusal(self, status: int) -> str:
        """What to say of a status that is not 0."""

    def __call__(self, stream: int) -> None:
        """Enqueue it; the device that it is for must be current (:func:`device_guard`).

        Args:
            stream: CUDA stream handle; 0 is the legacy default stream.

        Raises:
            DlattnError: the driver refused.
        """
        if self.is_empty:
            return
        if self.stream != stream:
            self.move(stream)
        if status := self.function(*self.arguments):
            self.retry(status)

    def retry(self, status: int) -> None:
        """What follows a call with a status that is not 0: another one, if that was the thread's
        first of CUDA.

        Raises:
            DlattnError: the driver refused.
        """
        if status == _ERROR_INVALID_CONTEXT:
            make_context_current()
            status = self.function(*self.arguments)
        if status:
            raise DlattnError(self.refusal(status))


class Launch(Operation):
    """A kernel with its grid and its one parameter, a struct whose address is fixed.

    The driver copies the struct during the call, so that it may be rewritten afterwards.

    Args:
        kernel: the driver's ``CUfunction``.
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
        kernel: int,
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
        self.kernel = kernel
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
        super().__init__(
            driver().cuLaunchKernelEx,
            (ctypes.byref(self.config), ctypes.c_void_p(kernel), self.params, None),
        )

    def move(self, stream: int) -> None:
        self.config.stream = self.stream = stream

    def refusal(self, status: int) -> str:
        config = self.config
        return (
            f"Launching {self.name} failed with {error_name(status)} (grid {tuple(config.grid)}, "
            f"{config.block[0]} threads, {config.shared} bytes of shared memory, stream "
            f"{self.stream:#x}). An earlier asynchronous failure on the same device may also be "
            "reported here."
        )


class Clear(Operation):
    """Bytes of device memory that are set to zero.

    Args:
        nbytes: how many.
        address: where they are; it may be set anew before each call.
    """

    def __init__(self, nbytes: int, address: int = 0) -> None:
        self.nbytes = nbytes
        self._address = ctypes.c_uint64(address)
        self._stream = ctypes.c_void_p()
        super().__init__(
            driver().cuMemsetD8Async,
            (self._address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), self._stream),
        )

    @property
    def address(self) -> int:
        return self._address.value

    @address.setter
    def address(self, address: int) -> None:
        self._address.value = address

    def move(self, stream: int) -> None:
        self._stream.value = self.stream = stream

    def refusal(self, status: int) -> str:
        return (
            f"Clearing {self.nbytes} bytes at {self.address:#x} failed with {error_name(status)} "
            f"(stream {self.stream:#x}). They must be memory of the device; if they are in a "
            "workspace, it must be of at least the size that the graph asks for."
        )


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


def guards_of(index: int, devices: int) -> Callable[[], AbstractContextManager[object]]:
    """What makes a guard of a CUDA device for each call; ``nullcontext`` if there is no other."""
    return partial(device_guard, index) if devices > 1 else nullcontext


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
