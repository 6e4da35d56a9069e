"""Whether tensors share memory: element by element, wherever they begin."""

from __future__ import annotations

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


def begins_alike(name: str, other: str, address: int) -> str:
    """What is wrong where memory that is written to begins where another tensor does."""
    return (
        f"{name}: it begins where {other} does, at {address:#x}, and one of them is written to "
        "while the other is in use; give memory of its own."
    )
