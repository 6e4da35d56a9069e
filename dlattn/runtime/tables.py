"""Arrays on a device that kernels read beside the tensors of a call.

Their owner may go while kernels that read them wait on some stream, or while a CUDA graph that has
captured such kernels may be replayed. CuPy would give their memory to whoever asks next.
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import finalize

from dlattn.runtime.buffers import to_device
from dlattn.runtime.streams import is_capturing, synchronize

#: What CUDA graphs have captured; nobody knows how long they will be replayed.
_captured: list[Any] = []
#: With its device, what nobody owns any longer, and kernels may still read; and how many bytes of
#: it there are before devices are waited for.
_dropped: list[tuple[int, Any]] = []
MOST_DROPPED_BYTES = 2**24
_freeing = Lock()


class Tables:
    """Arrays on one device, there as long as this is, and as long as somebody may read them.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._arrays: list[Any] = []
        # Not __del__, which finds no module left when the interpreter ends.
        finalize(self, _drop, index, self._arrays).atexit = False

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def place(self, table: Any) -> int:
        """The address of a copy of a NumPy array."""
        _free_dropped()
        self._arrays.append(to_device(table, self._index))
        return int(self._arrays[-1].data.ptr)

    def stay_if_captured(self, stream: int) -> None:
        """Call it before what reads them is enqueued on a stream."""
        if self._arrays and is_capturing(stream):
            _captured.extend(self._arrays)
            self._arrays.clear()


def _drop(index: int, arrays: list[Any]) -> None:
    _dropped.extend((index, array) for array in arrays)


def _free_dropped() -> None:
    with _freeing:
        dropped = _dropped[:]
        if sum(array.nbytes for _, array in dropped) <= MOST_DROPPED_BYTES:
            return
        for index in {index for index, _ in dropped}:
            synchronize(index)
        del _dropped[: len(dropped)]
