"""Memory of the caller's that is written to, and what else lies there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from dlattn.calls.arguments import Argument
from dlattn.dtypes import itemsize
from dlattn.errors import InvalidArgumentError

#: Of tensors, by position.
Addresses = Sequence[int] | Mapping[int, int]

#: Refuses a call of tensors at such addresses. What tells kinds of calls apart says nothing of
#: addresses, so that each call asks for its own.
Check = Callable[[Addresses], None]

#: An address with more in front of it, and behind, than any tensor has.
_SOMEWHERE = 1 << 61


class Apart:
    """Refuses memory for a result that begins where another tensor does. (Views that interleave,
    such as of q, k and v in one tensor, begin apart; what else overlaps is the caller's to avoid.)
    """

    def __init__(self, there: Sequence[Argument], written: Sequence[Argument]) -> None:
        self._names = [it.name for it in there]
        self._begins = operator.itemgetter(*(it.position for it in there))
        self._written = [it.position for it in written]

    def __call__(self, addresses: Addresses) -> None:
        """See :data:`Check`.

        Raises:
            InvalidArgumentError: some result's memory begins where another tensor does.
        """
        begins = self._begins(addresses)
        for at in self._written:
            if begins.count(addresses[at]) > 1:
                self._refuse(begins, addresses[at])

    def _refuse(self, begins: Sequence[int], address: int) -> None:
        other, name, *_ = (
            name for name, begin in zip(self._names, begins, strict=True) if begin == address
        )
        raise InvalidArgumentError(
            f"{name}: it begins where {other} does, at {address:#x}, and one of them is written to "
            "while the other is in use; give memory of its own."
        )


def apart(given: Mapping[str, Argument], outputs: Iterable[str]) -> Apart | None:
    """What refuses memory for results, in this call and those like it; ``None`` if all is made.

    Args:
        outputs: names of the results, of which those in ``given`` have the caller's memory.

    Raises:
        InvalidArgumentError: in this call, some begins where another tensor does.
    """
    there = [it for it in given.values() if 0 not in it.shape]
    names = set(outputs)
    written = [it for it in there if it.name in names]
    if not written or len(there) == 1:
        return None
    check = Apart(there, written)
    check({it.position: it.seen.ptr for it in there})
    return check


class Disjoint:
    """Refuses two tensors, of one element type, that are both written to and share memory: views
    that interleave, such as of keys and values in one cache, do not."""

    def __init__(self, one: Argument, other: Argument) -> None:
        self._one, self._other = one, other
        self._size = itemsize(one.dtype)
        (low, high), (other_low, other_high) = (_extent(it) for it in (one, other))
        # Of the other's address less the one's: in between, they may share an element.
        self._least = (low - other_high) * self._size
        self._most = (high - other_low) * self._size
        self._overlap_at = lru_cache(maxsize=256)(self._overlap)

    def __call__(self, addresses: Addresses) -> None:
        """See :data:`Check`.

        Raises:
            InvalidArgumentError: they share memory.
        """
        begin = addresses[self._one.position]
        distance = addresses[self._other.position] - begin
        if self._least < distance < self._most and self._overlap_at(distance):
            one, other = self._one.name, self._other.name
            raise InvalidArgumentError(
                f"{other}: expected memory that {one} has no part of, because both are written to, "
                f"got {other} at {begin + distance:#x} and {one} at {begin:#x}, of shapes "
                f"{self._other.shape} and {self._one.shape}, which overlap; give each memory of "
                "its own."
            )

    def _overlap(self, distance: int) -> bool:
        # No element is looked at, so that nothing need be there.
        one = self._elements(self._one, _SOMEWHERE)
        return bool(np.shares_memory(one, self._elements(self._other, _SOMEWHERE + distance)))

    def _elements(self, it: Argument, address: int) -> np.ndarray:
        return np.asarray(_Elements(it.shape, it.stride, self._size, address))


class _Elements:
    """Elements of any type, as NumPy finds them."""

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], size: int, address: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "strides": tuple(size * step for step in stride),
            "typestr": f"|V{size}",
        }


def _extent(it: Argument) -> tuple[int, int]:
    """Where its first element in memory is, and where its last one ends, from its address."""
    ends = [(size - 1) * step for size, step in zip(it.shape, it.stride, strict=True)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + 1


def disjoint(one: Argument, other: Argument) -> Disjoint:
    """What refuses tensors that share memory, in this call and those like it.

    Raises:
        InvalidArgumentError: in this call, they do.
    """
    check = Disjoint(one, other)
    check({it.position: it.seen.ptr for it in (one, other)})
    return check


def every(*checks: Check | None) -> Check | None:
    """All of them as one, of which some may be none."""
    there = [check for check in checks if check is not None]
    if len(there) < 2:
        return there[0] if there else None

    def check(addresses: Addresses) -> None:
        for one in there:
            one(addresses)

    return check
