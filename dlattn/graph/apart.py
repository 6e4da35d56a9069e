"""Memory of a pack that is written to, and what else lies there.

Inputs may be one tensor. An output begins where no other tensor does, and shares no element with
another output; the workspace shares none with anything. Views that interleave, such as of gradients
in one tensor, share none.

Where a ragged tensor's tokens are, only its offsets say: what is known of it is where it begins,
and of two with offsets of their own, nothing. Programs, which are no attention, read all inputs
before they write, so that an output may begin where an input does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from dlattn.dtypes import itemsize
from dlattn.errors import InvalidVariantPackError
from dlattn.graph.lower import Lowered
from dlattn.graph.slots import Slot
from dlattn.problem import Problem, offset_role, sharing
from dlattn.problem.sharing import Elements, Pair, Place


def apart(slots: Sequence[Slot], lowered: Lowered, workspace_size: int) -> Callable[..., None]:
    """What is given every address of a call, in the order of its slots and the workspace's behind
    them, and raises :class:`InvalidVariantPackError` if what is written to is another tensor's."""
    places = [_place(slot) for slot in slots]
    offsets = [lowered.tensors.get(offset_role(slot.role)) for slot in slots]

    def are_scattered(one: int, other: int) -> bool:
        """Whether offsets may put them apart from wherever both begin."""
        return None not in (offsets[one], offsets[other]) and offsets[one] is not offsets[other]

    there = [at for at, slot in enumerate(slots) if not slot.by_value]
    pairs = [*combinations(there, 2)]
    both = [(one, other) for one, other in pairs if slots[one].is_output and slots[other].is_output]
    some = [(one, other) for one, other in pairs if slots[one].is_output or slots[other].is_output]
    begins = both if not isinstance(lowered.problem, Problem) else some
    begins = [pair for pair in begins if not are_scattered(*pair)]
    with_workspace: list[Pair] = []
    if workspace_size:
        elements = Elements((workspace_size,), (1,), 1)
        places.append(Place("workspace", f"{workspace_size} bytes", elements))
        with_workspace = [(at, len(slots)) for at in there]
    return sharing.apart(
        places, begins + with_workspace, both + with_workspace, InvalidVariantPackError
    )


def _place(slot: Slot) -> Place:
    spec = slot.spec
    is_known = not (spec.ragged or spec.packed)
    elements = Elements(spec.dim, spec.stride, itemsize(spec.dtype)) if is_known else None
    return Place(slot.said, f"shape {spec.dim}", elements)
