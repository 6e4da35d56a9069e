"""Whether tensors share memory: element by element, wherever they begin.

Which tensors must not begin alike, and which must not share an element, who knows them says in
pairs (:func:`apart`). As a rule, memory that is written to begins where no other tensor does, and
shares no element with what else is written to; what else overlaps, an output and an input, is the
caller's to avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from dlattn.records import dataclass

#: An address with more in front of it, and behind, than any tensor has.
_SOMEWHERE = 1 << 61

#: Of NumPy's search, which takes tens of steps for layouts that nest, and for others up to years:
#: 30 ms.
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Elements:
    """Those of a tensor.

    Attributes:
        shape, stride: strides in elements.
        size: bytes of one.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int

    @property
    def extent(self) -> tuple[int, int]:
        """Where the first one in memory begins, and where the last one ends: in bytes, from the
        tensor's address."""
        ends = [(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)]
        low, high = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
        return low * self.size, (high + 1) * self.size

    def at(self, address: int) -> np.ndarray:
        """As an array, of which nothing may be read."""
        return np.asarray(_Memory(self, address))


class _Memory:
    """Elements of any type, as NumPy finds them."""

    def __init__(self, it: Elements, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": it.shape,
            "strides": tuple(it.size * step for step in it.stride),
            "typestr": f"|V{it.size}",
        }


class Sharing:
    """Whether two tensors share memory, by the distance of their addresses: views that interleave,
    such as of keys and values in one tensor, do not. What takes too long to find out is taken not
    to be so.

    Attributes:
        least, most: only distances in between may be those of tensors that do.
    """

    def __init__(self, one: Elements, other: Elements) -> None:
        self._one, self._other = one, other
        (low, high), (other_low, other_high) = one.extent, other.extent
        self.least, self.most = low - other_high, high - other_low
        self._share_at = lru_cache(maxsize=256)(self._share)

    def __call__(self, distance: int) -> bool:
        """Whether they do.

        Args:
            distance: bytes from the address of the one to that of the other.
        """
        return self.least < distance < self.most and self._share_at(distance)

    def _share(self, distance: int) -> bool:
        # No element is looked at, so that nothing need be there.
        one, other = self._one.at(_SOMEWHERE), self._other.at(_SOMEWHERE + distance)
        try:
            # NumPy's stubs know of two limits alone.
            return bool(np.shares_memory(one, other, max_work=_MOST_STEPS))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return False


@dataclass(frozen=True)
class Place:
    """A tensor in memory, or a workspace.

    Attributes:
        said, size: what it is called, and how large it is, in words.
        elements: those that it has from its address on; ``None`` if that is not known.
    """

    said: str
    size: str
    elements: Elements | None


#: Two places, by number.
Pair = tuple[int, int]

#: Calls of which is remembered that their memory is apart, by their addresses.
MOST_KEPT = 256


def apart(
    places: Sequence[Place],
    begins: Iterable[Pair],
    disjoint: Iterable[Pair],
    error: type[Exception],
) -> Callable[..., None]:
    """What is given an address for each place, and refuses some.

    What is returned takes 0.1 to 0.2 us for the addresses of an earlier call, and 1 to 2 us for
    others.

    Args:
        begins: those that must not begin alike.
        disjoint: those that must not share an element, as far as their elements are known.
        error: what it raises.
    """
    return lru_cache(maxsize=MOST_KEPT)(_Apart(places, begins, disjoint, error))


class _Apart:
    """See :func:`apart`."""

    def __init__(
        self,
        places: Sequence[Place],
        begins: Iterable[Pair],
        disjoint: Iterable[Pair],
        error: type[Exception],
    ) -> None:
        self._places = places
        self._error = error
        self._begins = [*begins]
        self._disjoint = []
        for one, other in disjoint:
            elements, others = places[one].elements, places[other].elements
            if elements is not None and others is not None:
                share = Sharing(elements, others)
                # Unpacking beats attributes, and a comparison a call.
                self._disjoint.append((one, other, share.least, share.most, share))

    def __call__(self, *addresses: int) -> None:
        if len({*addresses}) < len(addresses):
            for one, other in self._begins:
                if addresses[one] == addresses[other]:
                    self._refuse_beginning(one, other, addresses[one])
        for one, other, least, most, share in self._disjoint:
            distance = addresses[other] - addresses[one]
            if least < distance < most and share(distance):
                self._refuse_sharing(one, other, addresses)

    def _refuse_beginning(self, one: int, other: int, address: int) -> None:
        raise self._error(
            f"{self._places[other].said}: it begins where {self._places[one].said} does, at "
            f"{address:#x}, and one of them is written to while the other is in use; give memory "
            "of its own."
        )

    def _refuse_sharing(self, number: int, other_number: int, addresses: Sequence[int]) -> None:
        one, other = self._places[number], self._places[other_number]
        raise self._error(
            f"{other.said}: expected memory that {one.said} has no part of, because one of them is "
            f"written to while the other is in use, got {other.size} at "
            f"{addresses[other_number]:#x} and {one.said} of {one.size} at {addresses[number]:#x}, "
            "which overlap; give each memory of its own."
        )
