"""Which CUDA stream a call runs on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from dlattn.errors import InvalidArgumentError
from dlattn.runtime.tensors import framework

#: ``cudaStreamLegacy``, which 0 stands for.
_LEGACY_STREAM = 1


def current_stream(objects: Iterable[Any], device_index: int) -> int:
    """The handle of the stream that the frameworks of these tensors enqueue on now.

    torch's current stream of the device if one of the tensors is torch's, else CuPy's; 0 is the
    legacy default stream.
    """
    for obj in objects:
        if framework(obj).name == "torch":
            return _torch_stream()(device_index)
    from cupy.cuda import get_current_stream

    return int(get_current_stream(device_index).ptr)


def current_stream_of(like: Any, device_index: int) -> Callable[[], int]:
    """What gives the handle of the stream that the framework of a tensor enqueues on, call by call;
    see :func:`current_stream`."""
    if framework(like).name == "torch":
        return partial(_torch_stream(), device_index)
    from cupy.cuda import get_current_stream

    return lambda: int(get_current_stream(device_index).ptr)


def stream_handle(stream: Any) -> int:
    """The handle of a stream given by a user.

    Args:
        stream: a handle, a ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, or any object with
            ``__cuda_stream__``.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    raise InvalidArgumentError(
        f"Expected a CUDA stream (a handle as a non-negative int, a torch.cuda.Stream, a "
        f"cupy.cuda.Stream, or an object with __cuda_stream__), but got {stream!r:.200}"
    )


def is_capturing(stream: int) -> bool:
    """Whether what is enqueued on a stream goes into a CUDA graph.

    Args:
        stream: a handle; the legacy default stream is never captured.
    """
    return stream > _LEGACY_STREAM and bool(_ask_for_capture()(stream))


def synchronize(device_index: int) -> None:
    """Waits for all that a device has been given."""
    from cupy.cuda import Device

    Device(device_index).synchronize()


@lru_cache(maxsize=1)
def _ask_for_capture() -> Callable[[int], bool]:
    from cupy.cuda import runtime

    found: Callable[[int], bool] = runtime.streamIsCapturing
    return found


@lru_cache(maxsize=1)
def _torch_stream() -> Callable[[int], int]:
    torch: Any = sys.modules["torch"]
    # The public call makes a Stream object each time: 4.5 us instead of 0.1.
    found: Callable[[int], int] = getattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda device_index: torch.cuda.current_stream(device_index).cuda_stream,
    )
    return found
