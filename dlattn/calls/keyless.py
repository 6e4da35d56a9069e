"""Results of calls that have rows, but no key: what sinks alone say, and whose rows are 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from dlattn.calls.arguments import Argument
from dlattn.runtime.tensors import array, array_beside

#: An argument's tensor, as an array.
Read = Callable[[Argument], Any]
#: An array with a number where a condition, of its first axes, is false.
Select = Callable[[Any, Any, float], Any]


class Finish(Protocol):
    """Says more of a result than one number, or one of each head, can: of arrays that may be
    traced, so that nothing is written to.

    Attributes:
        rows: of a sequence, or of packed ones in all.
    """

    @property
    def rows(self) -> int: ...

    def __call__(self, result: Any, row: Any, read: Read, select: Select) -> Any:
        """What the result is to be.

        Args:
            result: what it is.
            row: the numbers of the rows, on the device.
        """


def finished(finish: Finish, result: Any, row: Any, values: Sequence[Any]) -> None:
    """Sets a result in memory, of the tensors of a call."""
    own = array(result)
    own[...] = finish(
        own,
        array_beside(row, result),
        lambda it: array_beside(values[it.position], result),
        _selected,
    )


def _selected(x: Any, condition: Any, other: float) -> Any:
    made = x * 1
    made[~condition] = other
    return made


@dataclass(frozen=True)
class PastLengths:
    """One number in the rows of (B, H, S) that are past the lengths, (B)."""

    rows: int
    lengths: Argument
    number: float

    def __call__(self, result: Any, row: Any, read: Read, select: Select) -> Any:
        exists = row[None] < read(self.lengths).reshape(-1, 1)
        return select(result.swapaxes(1, 2), exists, self.number).swapaxes(1, 2)


def past_lengths(rows: int, lengths: Argument | None, number: float) -> PastLengths | None:
    """It, unless there is no such row."""
    return (
        None
        if lengths is None or 0 in (rows, *lengths.shape)
        else PastLengths(rows, lengths, number)
    )


@dataclass(frozen=True)
class NoSinks:
    """Where FlashAttention-2's +inf means that nothing is attended: also in rows whose sinks, which
    are all that there is, are none. Then what is past the lengths."""

    rows: int
    past: PastLengths | None

    def __call__(self, result: Any, row: Any, read: Read, select: Select) -> Any:
        told = select(result, result != -inf, inf)
        return told if self.past is None else self.past(told, row, read, select)


@dataclass(frozen=True)
class SinkGradient:
    """The gradient of sinks, (H): a row without keys has its sink for a log-sum-exp, so that it is
    the sum of the gradients of these, (B, H, S), or of packed sequences (H, T)."""

    rows: int
    sinks: Argument
    dlse: Argument
    lengths: Argument | None
    cu_seqlens: Argument | None

    def __call__(self, result: Any, row: Any, read: Read, select: Select) -> Any:
        lse_rows = read(self.dlse).swapaxes(-1, -2)
        is_own = _is_own(row, read, self.lengths, self.cu_seqlens)
        if is_own is not None:
            # Of other rows nothing is left, not even NaN.
            lse_rows = select(lse_rows, is_own, 0.0)
        gradient = lse_rows.sum(tuple(range(len(lse_rows.shape) - 1)))
        # Rows of such a sink attend to nothing.
        return select(gradient, read(self.sinks) != -inf, 0.0)


@dataclass(frozen=True)
class OwnRows:
    """0 in the rows that packed sequences have, (tokens, H, D), and in others what they hold."""

    rows: int
    lengths: Argument | None
    cu_seqlens: Argument

    def __call__(self, result: Any, row: Any, read: Read, select: Select) -> Any:
        return select(result, ~_is_own(row, read, self.lengths, self.cu_seqlens), 0.0)


def own_rows(memory: Argument | None, there: Mapping[str, Argument], side: str) -> OwnRows | None:
    """It, of packed sequences whose result lies in memory of the caller's; else every row is 0.

    Args:
        there: the call's tensors.
        side: whose rows they are: ``"q"``, or ``"k and v"``.
    """
    cu_seqlens = there.get(f"cu_seqlens of {side}")
    if memory is None or cu_seqlens is None or 0 in memory.shape:
        return None
    return OwnRows(memory.shape[0], there.get(f"lengths of {side}"), cu_seqlens)


def _is_own(
    row: Any, read: Read, of_lengths: Argument | None, of_cu_seqlens: Argument | None
) -> Any:
    """Whether a row is a sequence's, (B, S) or (tokens,); ``None`` if all are."""
    row = row[None]  # as JAX may be told to broadcast no ranks
    lengths = None if of_lengths is None else read(of_lengths).reshape(-1, 1)
    if of_cu_seqlens is None:
        return None if lengths is None else row < lengths
    cu_seqlens = read(of_cu_seqlens).reshape(-1, 1)
    begins = cu_seqlens[:-1]
    is_own = (row >= begins) & (row < cu_seqlens[1:])
    if lengths is not None:
        is_own = is_own & (row < begins + lengths)
    return is_own.any(0)
