"""Memory of a pack that is written to, and what else lies there.

Inputs may be one tensor. An output begins where no other tensor does, and shares no element with
another output; the workspace shares none with anything. Views that interleave, such as of gradients
in one tensor, share none. (What else overlaps, an output and an input, is the caller's to avoid.)

Where a ragged tensor's tokens are, only its offsets say: what is known of it is where it begins,
and of two with offsets of their own, nothing. Programs, which are no attention, read all inputs
before they write, so that an output may begin where an input does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from dlattn.dtypes import itemsize
from dlattn.errors import InvalidVariantPackError
from dlattn.graph.lower import Lowered
from dlattn.graph.slots import Slot
from dlattn.graph.tensor import Tensor
from dlattn.problem import Problem, offset_role
from dlattn.problem.sharing import Elements, Sharing, begins_alike

#: Calls of which is remembered that their memory is apart, by their addresses.
MOST_KEPT = 256


class _Place(NamedTuple):
    """What lies in memory.

    Attributes:
        at: the number of its address.
        said, size: what it is called, and how large it is, in words.
        elements: those that it has from its address on; ``None`` if only offsets say.
        offsets: the graph's tensor that says so.
    """

    at: int
    said: str
    size: str
    is_output: bool
    elements: Elements | None
    offsets: Tensor | None = None


def apart(slots: Sequence[Slot], lowered: Lowered, workspace_size: int) -> Callable[..., None]:
    """What is given every address of a call, in the order of its slots and the workspace's behind
    them, and raises :class:`InvalidVariantPackError` if what is written to is another tensor's.

    It takes 0.1 to 0.2 us for the addresses of an earlier call, and 1 to 2 us for others.
    """
    places = [_place(at, slot, lowered) for at, slot in enumerate(slots) if not slot.by_value]
    workspace = None
    if workspace_size:
        elements = Elements((workspace_size,), (1,), 1)
        workspace = _Place(len(slots), "workspace", f"{workspace_size} bytes", True, elements)
    in_place = not isinstance(lowered.problem, Problem)
    return lru_cache(maxsize=MOST_KEPT)(_Apart(places, workspace, in_place))


class _Apart:
    """See :func:`apart`."""

    def __init__(self, places: list[_Place], workspace: _Place | None, in_place: bool) -> None:
        pairs = [*combinations(places, 2)]
        both = [(one, other) for one, other in pairs if one.is_output and other.is_output]
        some = both if in_place else [it for it in pairs if it[0].is_output or it[1].is_output]
        if workspace is not None:
            with_workspace = [(it, workspace) for it in places]
            some, both = some + with_workspace, both + with_workspace
        self._begins = [it for it in some if not _are_scattered(*it)]
        self._near = []
        for one, other in both:
            if one.elements is not None and other.elements is not None:
                share = Sharing(one.elements, other.elements)
                # Unpacking beats attributes, and a comparison a call.
                self._near.append((one.at, other.at, share.least, share.most, share, one, other))

    def __call__(self, *addresses: int) -> None:
        if len({*addresses}) < len(addresses):
            for one, other in self._begins:
                if addresses[one.at] == addresses[other.at]:
                    _refuse(one, other, addresses)
        for at, other_at, least, most, share, one, other in self._near:
            distance = addresses[other_at] - addresses[at]
            if least < distance < most and share(distance):
                _refuse(one, other, addresses)


def _place(at: int, slot: Slot, lowered: Lowered) -> _Place:
    spec = slot.spec
    elements = Elements(spec.dim, spec.stride, itemsize(spec.dtype))
    return _Place(
        at,
        slot.said,
        f"shape {spec.dim}",
        slot.is_output,
        None if spec.ragged or spec.packed else elements,
        lowered.tensors.get(offset_role(slot.role)),
    )


def _are_scattered(one: _Place, other: _Place) -> bool:
    """Whether offsets may put them apart from wherever both begin."""
    return None not in (one.offsets, other.offsets) and one.offsets is not other.offsets


def _refuse(one: _Place, other: _Place, addresses: Sequence[int]) -> None:
    begin, other_begin = addresses[one.at], addresses[other.at]
    if begin == other_begin:
        raise InvalidVariantPackError(begins_alike(other.said, one.said, begin))
    raise InvalidVariantPackError(
        f"{other.said}: expected memory that {one.said} has no part of, because one of them is "
        f"written to while the other is in use, got {other.size} at {other_begin:#x} and "
        f"{one.said} of {one.size} at {begin:#x}, which overlap; give each memory of its own."
    )
