"""What sinks alone say: results of calls that have rows, but no key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from dlattn.calls.arguments import Argument
from dlattn.runtime.tensors import array, array_beside


class Finish(Protocol):
    """Sets more of a result than one number, or one of each head, can say.

    Attributes:
        rows: of a sequence, or of packed ones in all.
    """

    @property
    def rows(self) -> int: ...

    def __call__(self, result: Any, row: Any, values: Sequence[Any]) -> None:
        """Sets it.

        Args:
            row: the numbers of the rows, on the device.
            values: the tensors of the call.
        """


@dataclass(frozen=True)
class PastLengths:
    """One number in the rows of (B, H, S) that are past the lengths, (B)."""

    rows: int
    lengths: Argument
    number: float

    def __call__(self, result: Any, row: Any, values: Sequence[Any]) -> None:
        lengths = array_beside(values[self.lengths.position], row).reshape(-1, 1)
        array(result).swapaxes(1, 2)[array(row) >= lengths] = self.number


def past_lengths(rows: int, lengths: Argument | None, number: float) -> PastLengths | None:
    """It, unless there is no such row."""
    return (
        None
        if lengths is None or 0 in (rows, *lengths.shape)
        else PastLengths(rows, lengths, number)
    )


@dataclass(frozen=True)
class SinkGradient:
    """The gradient of sinks, (H): a row without keys has its sink for a log-sum-exp, so that it is
    the sum of the gradients of these, (B, H, S), or of packed sequences (H, T)."""

    rows: int
    sinks: Argument
    dlse: Argument
    lengths: Argument | None
    cu_seqlens: Argument | None

    def __call__(self, result: Any, row: Any, values: Sequence[Any]) -> None:
        lse_rows = array_beside(values[self.dlse.position], result).swapaxes(-1, -2)
        is_own = self._is_own(row, values)
        if is_own is not None:
            # In a copy, nothing of other rows is left, not even NaN.
            lse_rows = lse_rows * 1
            lse_rows[~is_own] = 0
        gradient = array(result)
        gradient[...] = lse_rows.sum(tuple(range(len(lse_rows.shape) - 1)))
        # Rows of such a sink attend to nothing.
        gradient[array_beside(values[self.sinks.position], result) == -inf] = 0

    def _is_own(self, row: Any, values: Sequence[Any]) -> Any:
        """Whether a row is a sequence's, (B, S) or (tokens,); ``None`` if all are."""
        lengths, number = None, array(row)
        if self.lengths is not None:
            lengths = array_beside(values[self.lengths.position], row).reshape(-1, 1)
        if self.cu_seqlens is None:
            return None if lengths is None else number < lengths
        cu_seqlens = array_beside(values[self.cu_seqlens.position], row).reshape(-1, 1)
        begins = cu_seqlens[:-1]
        is_own = (number >= begins) & (number < cu_seqlens[1:])
        if lengths is not None:
            is_own = is_own & (number < begins + lengths)
        return is_own.any(0)
