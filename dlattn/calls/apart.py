"""Memory of the caller's that is written to, and what else lies there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from dlattn.calls.arguments import Argument
from dlattn.dtypes import itemsize
from dlattn.errors import InvalidArgumentError
from dlattn.problem.sharing import Elements, Sharing, begins_alike

#: Of tensors, by position.
Addresses = Sequence[int] | Mapping[int, int]

#: Refuses a call of tensors at such addresses. What tells kinds of calls apart says nothing of
#: addresses, so that each call asks for its own.
Check = Callable[[Addresses], None]


class Apart:
    """Refuses memory for a result that begins where another tensor does, or shares an element with
    another result. (What else overlaps, a result and an input, is the caller's to avoid.)
    """

    def __init__(self, there: Sequence[Argument], written: Collection[str]) -> None:
        self._names = [it.name for it in there]
        self._begins = operator.itemgetter(*(it.position for it in there))
        self._written = [at for at, name in enumerate(self._names) if name in written]
        self._results = [
            (one, other, Disjoint(there[one], there[other]).compare)
            for one, other in combinations(self._written, 2)
        ]
        # Of the addresses of most calls, earlier ones have asked.
        self._check_at = lru_cache(maxsize=256)(self._compare)

    def check(self, addresses: Addresses) -> None:
        """See :data:`Check`.

        Raises:
            InvalidArgumentError: some result's memory is another tensor's.
        """
        self._check_at(self._begins(addresses))

    def _compare(self, begins: tuple[int, ...]) -> None:
        if len({*begins}) < len(begins):
            for at in self._written:
                if begins.count(begins[at]) > 1:
                    self._refuse(begins, begins[at])
        for one, other, compare in self._results:
            compare(begins[one], begins[other])

    def _refuse(self, begins: Sequence[int], address: int) -> None:
        other, name, *_ = (
            name for name, begin in zip(self._names, begins, strict=True) if begin == address
        )
        raise InvalidArgumentError(begins_alike(name, other, address))


def apart(given: Mapping[str, Argument], outputs: Iterable[str]) -> Check | None:
    """What refuses memory for results, in this call and those like it; ``None`` if all is made.

    Args:
        outputs: names of the results, of which those in ``given`` have the caller's memory.

    Raises:
        InvalidArgumentError: in this call, some is another tensor's.
    """
    there = [it for it in given.values() if 0 not in it.shape]
    names = set(outputs)
    if len(there) == 1 or all(it.name not in names for it in there):
        return None
    check = Apart(there, names).check
    check({it.position: it.seen.ptr for it in there})
    return check


class Disjoint:
    """Refuses two tensors that are both written to and share memory: views that interleave, such as
    of keys and values in one cache, do not."""

    def __init__(self, one: Argument, other: Argument) -> None:
        self._one, self._other = one, other
        self._share = Sharing(_elements(one), _elements(other))

    def check(self, addresses: Addresses) -> None:
        """See :data:`Check`.

        Raises:
            InvalidArgumentError: they share memory.
        """
        self.compare(addresses[self._one.position], addresses[self._other.position])

    def compare(self, begin: int, other_begin: int) -> None:
        """The same, of their own addresses."""
        if self._share(other_begin - begin):
            one, other = self._one.name, self._other.name
            raise InvalidArgumentError(
                f"{other}: expected memory that {one} has no part of, because both are written to, "
                f"got {other} at {other_begin:#x} and {one} at {begin:#x}, of shapes "
                f"{self._other.shape} and {self._one.shape}, which overlap; give each memory of "
                "its own."
            )


def _elements(it: Argument) -> Elements:
    return Elements(it.shape, it.stride, itemsize(it.dtype))


def disjoint(one: Argument, other: Argument) -> Check:
    """What refuses tensors that share memory, in this call and those like it.

    Raises:
        InvalidArgumentError: in this call, they do.
    """
    check = Disjoint(one, other).check
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
