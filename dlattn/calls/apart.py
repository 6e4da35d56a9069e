"""Memory of the caller's that is written to, and what else lies there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from dlattn.calls.arguments import Argument
from dlattn.dtypes import itemsize
from dlattn.errors import InvalidArgumentError
from dlattn.problem import sharing
from dlattn.problem.sharing import Elements, Place

#: Of tensors, by position.
Addresses = Sequence[int] | Mapping[int, int]

#: Refuses a call of tensors at such addresses. What tells kinds of calls apart says nothing of
#: addresses, so that each call asks for its own.
Check = Callable[[Addresses], None]


def apart(
    given: Mapping[str, Argument],
    outputs: Iterable[str],
    disjoint: Iterable[tuple[str, str]] = (),
) -> Check | None:
    """What refuses memory that is written to and is another tensor's, in this call and those like
    it; ``None`` if nothing may be.

    Args:
        outputs: names of the results, of which those in ``given`` have the caller's memory: each
            begins where no other tensor does, and shares no element with another result.
        disjoint: pairs of names of other tensors that share no element, either.

    Raises:
        InvalidArgumentError: in this call, some is another tensor's.
    """
    there = [it for it in given.values() if 0 not in it.shape]
    numbers = {it.name: number for number, it in enumerate(there)}
    results = sorted({numbers[name] for name in outputs if name in numbers})
    pairs = combinations(range(len(there)), 2)
    begins = [(one, other) for one, other in pairs if one in results or other in results]
    besides = [
        (numbers[one], numbers[other])
        for one, other in disjoint
        if one in numbers and other in numbers
    ]
    if not begins and not besides:
        return None
    refuse = sharing.apart(
        [_place(it) for it in there],
        begins,
        [*combinations(results, 2), *besides],
        InvalidArgumentError,
    )
    addresses_of = operator.itemgetter(*(it.position for it in there))

    def check(addresses: Addresses) -> None:
        refuse(*addresses_of(addresses))

    check({it.position: it.seen.ptr for it in there})
    return check


def _place(it: Argument) -> Place:
    return Place(it.name, f"shape {it.shape}", Elements(it.shape, it.stride, itemsize(it.dtype)))
