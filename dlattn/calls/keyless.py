"""What sinks alone say: results of calls that have rows, but no key."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from dlattn.calls.arguments import Argument
from dlattn.runtime.tensors import array, array_beside

#: What gives one of the call's tensors as an array.
Read = Callable[[Argument], Any]


class Finish(ABC):
    """Sets more of a result than one number, or one of each head, can say.

    Attributes:
        rows: of a sequence, or of packed ones in all.
    """

    rows: int

    @abstractmethod
    def finished(self, where: Callable[..., Any], result: Any, row: Any, read: Read) -> Any:
        """What it sets, of arrays of one library, JAX's tracers too.

        Args:
            where: that library's.
            row: the numbers of the rows.
        """

    def __call__(self, result: Any, row: Any, values: Sequence[Any]) -> None:
        """Sets it.

        Args:
            row: the numbers of the rows, on the device.
            values: the tensors of the call.
        """
        own = array(result)
        where = sys.modules[type(own).__module__.partition(".")[0]].where
        own[...] = self.finished(
            where, own, array(row), lambda it: array_beside(values[it.position], result)
        )


@dataclass(frozen=True)
class PastLengths(Finish):
    """One number in the rows of (B, H, S) that are past the lengths, (B)."""

    rows: int
    lengths: Argument
    number: float

    def finished(self, where: Callable[..., Any], result: Any, row: Any, read: Read) -> Any:
        lengths = read(self.lengths).reshape(-1, 1)
        return where((row >= lengths)[:, None], self.number, result)


def past_lengths(rows: int, lengths: Argument | None, number: float) -> PastLengths | None:
    """It, unless there is no such row."""
    return (
        None
        if lengths is None or 0 in (rows, *lengths.shape)
        else PastLengths(rows, lengths, number)
    )


@dataclass(frozen=True)
class SinkGradient(Finish):
    """The gradient of sinks, (H): a row without keys has its sink for a log-sum-exp, so that it is
    the sum of the gradients of these, (B, H, S), or of packed sequences (H, T)."""

    rows: int
    sinks: Argument
    dlse: Argument
    lengths: Argument | None
    cu_seqlens: Argument | None

    def finished(self, where: Callable[..., Any], result: Any, row: Any, read: Read) -> Any:
        lse_rows = read(self.dlse).swapaxes(-1, -2)
        is_own = self._is_own(row, read)
        if is_own is not None:
            # Nothing of other rows is left, not even NaN.
            lse_rows = where(is_own[..., None], lse_rows, 0)
        total = lse_rows.sum(tuple(range(len(lse_rows.shape) - 1)))
        # Rows of such a sink attend to nothing.
        return where(read(self.sinks) == -inf, 0, total)

    def _is_own(self, row: Any, read: Read) -> Any:
        """Whether a row is a sequence's, (B, S) or (tokens,); ``None`` if all are."""
        lengths = None if self.lengths is None else read(self.lengths).reshape(-1, 1)
        if self.cu_seqlens is None:
            return None if lengths is None else row < lengths
        cu_seqlens = read(self.cu_seqlens).reshape(-1, 1)
        begins = cu_seqlens[:-1]
        is_own = (row >= begins) & (row < cu_seqlens[1:])
        if lengths is not None:
            is_own = is_own & (row < begins + lengths)
        return is_own.any(0)
