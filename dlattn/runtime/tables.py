"""Arrays on a device that kernels read beside the tensors of a call."""

from __future__ import annotations

from typing import Any

from dlattn.runtime.buffers import to_device
from dlattn.runtime.streams import is_capturing

#: What CUDA graphs have captured: they may be replayed when its owner is gone.
_captured: list[Any] = []


class Tables:
    """Arrays on one device, there as long as this is, or a CUDA graph may read them.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._arrays: list[Any] = []

    def place(self, table: Any) -> int:
        """The address of a copy of a NumPy array."""
        self._arrays.append(to_device(table, self._index))
        return int(self._arrays[-1].data.ptr)

    def stay_if_captured(self, stream: int) -> None:
        """Call it before what reads them is enqueued on a stream."""
        if self._arrays and is_capturing(stream):
            _captured.extend(self._arrays)
            self._arrays = []
