"""Running a built plan: from a variant pack to addresses, each checked against the graph.

This is the hot path; ``slots.py`` has what each tensor costs. Tensors of torch that look like those
of the last calls cost one question for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from dlattn import dtypes
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.graph.apart import apart
from dlattn.graph.handle import explicit_stream
from dlattn.graph.lower import Lowered
from dlattn.graph.slots import NumberSlot, RaggedSlot, Sizes, Slot, said_device, slot_type
from dlattn.graph.tensor import Device, tensor
from dlattn.opaque import opaque
from dlattn.plans.base import Runnable, bound
from dlattn.plans.host import HostSequences
from dlattn.problem import offset_role
from dlattn.problem.layout import canonical_stride
from dlattn.runtime.framework import LOOK_ALIGNMENT, Look
from dlattn.runtime.gradients import Watched, note_written, warn_of_gradients, watched_of
from dlattn.runtime.launch import Operation
from dlattn.runtime.protocols import compact_strides
from dlattn.runtime.streams import current_stream, current_stream_of
from dlattn.runtime.tensors import (
    ORDERED_TYPES,
    WATCHED_TYPES,
    lookalikes,
    order_before,
    view,
)

#: Alignment that plans may assume of the workspace.
WORKSPACE_ALIGNMENT = 16


#: Quick tests that may be made before one of them has fitted a call.
MOST_LESSONS = 8


class Addresses(NamedTuple):
    """What execution reads of a pack.

    Attributes:
        pointers: role -> address.
        unordered: inputs that streams do not order by themselves.
        watched: outputs whose framework wants to know that they were written to.
        alike: every tensor looks as that of the last pack did.
    """

    pointers: dict[str, int]
    inputs: list[Any]
    unordered: list[Any]
    watched: list[Any]
    alike: bool


@opaque
class Execution:
    """A built plan, bound to the tensors of its graph.

    Calling it enqueues the work; calls from several threads do not disturb each other.
    """

    def __init__(self, lowered: Lowered, plan: Runnable) -> None:
        self.plan = plan
        self._workspace_size = plan.workspace_size
        self._on_cpu = lowered.target.kind == "cpu"
        self._index = lowered.target.index
        self._device: Device = ("cpu", 0) if self._on_cpu else ("cuda", self._index)
        specs = lowered.geometry.tensors
        slots = [
            slot_type(role, specs[role], lowered)(
                role, t, specs[role], lowered.target, role in lowered.outputs
            )
            for role, t in lowered.tensors.items()
        ]
        #: What every call reads of a slot lies beside it: unpacking beats attributes.
        self._slots = [(s, s.key, s.uid, s.role, s.alignment, s.is_output) for s in slots]
        self._geometry = lowered.geometry
        #: Who wants statistics, or gives dO, sees to gradients by graphs of his own.
        self._ends_gradients = not {"stats", "dO"} & lowered.tensors.keys()
        self._ragged = [
            (slot, specs[offset_role(slot.role)].name)
            for slot in slots
            if isinstance(slot, RaggedSlot) and self._on_cpu
        ]
        self._numbers = [NumberSlot(number, lowered.target) for number in lowered.numbers]
        self._check_apart = apart(slots, lowered, self._workspace_size)
        self._seen_workspace: tuple[Any, ...] | None = None
        self._keys = [slot.key for slot in slots]
        self._inputs = [at for at, slot in enumerate(slots) if not slot.is_output]
        self._outputs = [at for at, slot in enumerate(slots) if slot.is_output]
        self._run = bound(plan, {slot.role: (at, 0) for at, slot in enumerate(slots)})
        #: Whether a quick test can stand for the checks of all tensors; what it is, for tensors
        #: like those of the last call that was checked, who hears of outputs that are written, and
        #: where such calls run.
        self._may_look = not (self._ragged or self._numbers) and all(
            LOOK_ALIGNMENT % slot.alignment == 0 for slot in slots
        )
        self._look: Look | None = None
        self._watched: Watched | None = None
        self._lessons_left = MOST_LESSONS
        self._current_stream: Callable[[], int] = lambda: 0

    def addresses(self, pack: Mapping[Any, Any]) -> Addresses:
        """Those of a pack, each checked.

        Raises:
            InvalidVariantPackError: a tensor is missing, or is not what the graph declared.
        """
        pointers: dict[str, int] = {}
        inputs = []
        unordered = []
        watched = []
        #: By role: of ragged tensors alone.
        sizes_of: dict[str, Sizes] = {}
        alike = True
        get = pack.get
        for slot, key, uid, role, alignment, is_output in self._slots:
            value = get(key)
            if value is None:
                value = get(uid)
                if value is None:
                    value = _find(slot, pack)
            if type(value) is int and not slot.takes_int:
                pointers[role] = slot.checked_address(value)
                alike = False
                continue
            match, sizes = slot.accepted
            pointer = match(value)
            if not pointer or pointer % alignment:
                if isinstance(value, slot.numbers):
                    value = slot.number(value)
                pointer, sizes = slot.admit(value)
                alike = False
                if self._ends_gradients and not is_output:
                    warn_of_gradients([value])
            pointers[role] = pointer
            if sizes is not None:
                sizes_of[role] = sizes
            if not is_output:
                inputs.append(value)
                if type(value) not in ORDERED_TYPES:
                    unordered.append(value)
            elif type(value) in WATCHED_TYPES:
                watched.append(value)
        if self._ragged:
            # What is in host memory is read here, before the plan runs.
            order_before(unordered, 0)
            sequences = HostSequences(self._geometry, pointers)
            for ragged_slot, offsets in self._ragged:
                ragged_slot.check_sequences(sequences, offsets, sizes_of.get(ragged_slot.role))
        for number in self._numbers:
            number.check(_find(number, pack))
        return Addresses(pointers, inputs, unordered, watched, alike)

    def __call__(
        self, pack: Mapping[Any, Any], workspace: Any = None, handle: int | None = None
    ) -> None:
        """Run the plan once; see ``pygraph.execute``."""
        if type(pack) is not dict:
            _check_pack(pack)
        stream, look = explicit_stream(handle), self._look
        values = () if look is None else tuple(map(pack.get, self._keys))
        known = None if look is None else look(*values)
        if known is not None:
            stream = self._current_stream() if stream is None else stream
            scratch = self.workspace_address(workspace)
            self._check_apart(*known, scratch)
            self._run(known, scratch, stream)
            self._lessons_left = MOST_LESSONS
            if self._watched is not None:
                tell, pick = self._watched
                tell(pick(values))
            return
        pointers, inputs, unordered, watched, alike = self.addresses(pack)
        scratch = self.workspace_address(workspace)
        self._check_apart(*pointers.values(), scratch)
        if alike and self._may_look and self._lessons_left:
            self._learn(pack)
        if stream is None:
            # With addresses alone as inputs, the outputs may still tell the framework.
            stream = 0 if self._on_cpu else current_stream(inputs or pack.values(), self._index)
        if unordered:
            order_before(unordered, stream)
        self.plan.execute(pointers, scratch, stream)
        if watched:
            note_written(watched)

    def _learn(self, pack: Mapping[Any, Any]) -> None:
        """Makes a quick test of tensors that were found to be the graph's: the second time, as it
        takes as long as some calls."""
        self._lessons_left -= 1
        values = [pack.get(key) for key in self._keys]
        # None is what the pack names by uid.
        look = None if any(value is None for value in values) else lookalikes(values)
        if look is None:
            return
        if self._ends_gradients:  # where tensors of earlier calls may have needed none
            warn_of_gradients(values[at] for at in self._inputs)
        if not self._on_cpu:
            self._current_stream = current_stream_of(values[0], self._index)
        self._watched = watched_of(values, self._outputs)
        self._look = look

    @contextmanager
    def operations(
        self, pack: Mapping[Any, Any], workspace: Any = None
    ) -> Iterator[Sequence[Operation]]:
        """What a call would enqueue; see :meth:`dlattn.plans.base.Runnable.operations`."""
        _check_pack(pack)
        kept = self.addresses(pack)  # numbers of the pack live as long as the inputs do
        scratch = self.workspace_address(workspace)
        self._check_apart(*kept.pointers.values(), scratch)
        with self.plan.operations(kept.pointers, scratch) as operations:
            yield operations

    def workspace_address(self, workspace: Any) -> int:
        """The address of the scratch memory, checked; 0 where none is needed."""
        if not self._workspace_size:
            return 0
        if workspace is None or type(workspace) is int:
            if not workspace or workspace < 0 or workspace % WORKSPACE_ALIGNMENT:
                self._refuse_workspace(f"address {workspace or 0:#x}")
            return int(workspace)
        try:
            seen = view(workspace)
        except InvalidVariantPackError as error:
            raise InvalidVariantPackError(f"workspace: {error}") from error
        if seen[1:] != self._seen_workspace or seen.ptr % WORKSPACE_ALIGNMENT:
            size = math.prod(seen.shape) * dtypes.itemsize(seen.dtype)
            if size < self._workspace_size:
                self._refuse_workspace(f"a tensor of {size} bytes")
            packed = compact_strides(seen.shape)
            if canonical_stride(seen.shape, seen.stride) != canonical_stride(seen.shape, packed):
                self._refuse_workspace(f"a tensor with gaps, of strides {seen.stride}")
            if seen.device != self._device:
                self._refuse_workspace(f"a tensor on {said_device(seen.device)}")
            if not seen.writable:
                self._refuse_workspace("a read-only tensor")
            if seen.ptr % WORKSPACE_ALIGNMENT:
                self._refuse_workspace(f"address {seen.ptr:#x}")
            self._seen_workspace = seen[1:]
        return seen.ptr

    def _refuse_workspace(self, got: str) -> NoReturn:
        raise InvalidVariantPackError(
            f"workspace: expected {self._workspace_size} writable contiguous bytes on "
            f"{said_device(self._device)}, aligned to {WORKSPACE_ALIGNMENT}, got {got}; allocate "
            "get_workspace_size() bytes there."
        )


class Elsewhere(Execution):
    """That of a plan for a device that is not here: compiled, to be serialised."""

    def addresses(self, pack: Mapping[Any, Any]) -> NoReturn:
        raise InvalidArgumentError(
            f"The graph was built for a device that is only described, {self.plan.target.arch}, "
            "and cannot be executed here; deserialize() what serialize() returns where it is."
        )


def _check_pack(pack: Any) -> None:
    if not isinstance(pack, Mapping):
        raise InvalidVariantPackError(
            "variant_pack: expected a dict from the graph's tensors, or their uids, to memory, got "
            f"{'None' if pack is None else f'a {type(pack).__module__}.{type(pack).__qualname__}'}."
        )


def _find(slot: Slot, pack: Mapping[Any, Any]) -> Any:
    """The value under the uid, or any tensor object with it, such as a copy from the graph."""
    if pack.get(slot.uid) is not None:
        return pack[slot.uid]
    for key, value in pack.items():
        if isinstance(key, tensor) and key.attributes.uid == slot.uid and value is not None:
            return value
    raise InvalidVariantPackError(
        f"{slot.said} is missing from the variant pack; add its memory under the graph's tensor or "
        "under the uid."
    )
