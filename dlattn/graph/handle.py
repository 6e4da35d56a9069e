"""Handles: opaque numbers that carry a CUDA stream and, if asked, a device."""

from __future__ import annotations

import itertools
from typing import Any

from dlattn.errors import InvalidArgumentError
from dlattn.records import dataclass
from dlattn.runtime.streams import stream_handle
from dlattn.runtime.target import CPU, Target, cuda_target


@dataclass
class _State:
    """What a handle was told."""

    target: Target | None
    stream: int | None = None


_numbers = itertools.count(1)
_states: dict[int, _State] = {}


def create_handle(device: int | str | None = None) -> int:
    """Make a handle (cuDNN frontend 1.23 ``create_handle``).

    Args:
        device: dlattn's extension: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a CUDA ordinal pins the
            graphs made with this handle to that device. ``None``: their tensors decide, then
            CUDA's current device.

    Raises:
        InvalidArgumentError: ``device`` names no device.
    """
    number = next(_numbers)
    _states[number] = _State(None if device is None else _target(device))
    return number


def destroy_handle(handle: int) -> None:
    """Forget a handle.

    Raises:
        InvalidArgumentError: unknown, or already destroyed.
    """
    _state(handle)
    del _states[handle]


def set_stream(handle: int, stream: Any) -> None:
    """Run everything executed with this handle on one stream.

    Args:
        stream: a ``cudaStream_t`` as an int, or an object that has one: torch's and CuPy's
            streams, or anything with ``__cuda_stream__``. ``None`` goes back to following the
            frameworks' current stream.

    Raises:
        InvalidArgumentError: unknown handle, or not a stream.
    """
    _state(handle).stream = None if stream is None else stream_handle(stream)


def get_stream(handle: int) -> int:
    """The stream set on a handle; 0, the legacy default stream, when none was."""
    return _state(handle).stream or 0


def explicit_stream(handle: int | None) -> int | None:
    """The stream that the user set on a handle, or ``None``."""
    return None if handle is None else _state(handle).stream


def pinned_target(handle: int | None) -> Target | None:
    """The device that a handle pins, or ``None``."""
    return None if handle is None else _state(handle).target


def _state(handle: int) -> _State:
    try:
        return _states[handle]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"Handle {handle!r} is unknown or destroyed; make one with create_handle()."
        ) from None


def _target(device: int | str) -> Target:
    whole = isinstance(device, int) and not isinstance(device, bool)
    name = f"cuda:{device}" if whole else device if isinstance(device, str) else ""
    kind, _, ordinal = name.partition(":")
    if name == "cpu":
        return CPU
    if kind == "cuda" and (ordinal or "0").isdecimal():
        return cuda_target(int(ordinal or "0"))
    raise InvalidArgumentError(
        f"device must be 'cpu', 'cuda', 'cuda:<ordinal>' or an int; got {device!r:.100}."
    )
