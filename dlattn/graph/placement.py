"""Where a graph runs: on the device of its tensors, else of its handle, else the default one."""

from __future__ import annotations

from collections.abc import Iterable

from dlattn.errors import InvalidGraphError
from dlattn.graph.handle import pinned_target
from dlattn.graph.tensor import Device, tensor
from dlattn.records import dataclass
from dlattn.runtime.target import CPU, Target, cuda_target, default_target


@dataclass(frozen=True)
class Place:
    """What a graph was told of its device.

    Attributes:
        handle: the graph's handle, which may pin a device.
        described: a device that need not be here; it is the current one if that is the same.
        told: the description is of the whole device (``device_property``), and tensors that were
            seen elsewhere only tell shapes; else it is ``sm_version``, and tensors decide.
        decided: the device, if there is nothing to decide.
    """

    handle: int | None = None
    described: Target | None = None
    told: bool = False
    decided: Target | None = None

    @property
    def default(self) -> Target:
        """The device, unless tensors decide."""
        if self.decided is not None:
            return self.decided
        pinned = pinned_target(self.handle)
        if pinned is not None or self.described is None:
            return pinned or default_target()
        here = default_target()
        same = here.capability == self.described.capability
        if same and self.told:
            same = here.shared_memory == self.described.shared_memory
            same = same and here.multiprocessors == self.described.multiprocessors
        return here if same else self.described

    def check(self, graph: str, target: Target) -> None:
        """Refuses a device that the graph was not made for.

        Raises:
            InvalidGraphError: it has another compute capability.
        """
        wanted = self.described
        if wanted is None or target.kind == "cpu" or target.capability == wanted.capability:
            return
        (major, minor), (has_major, has_minor) = wanted.capability, target.capability
        raise InvalidGraphError(
            f"Graph {graph!r} was made for sm_version {major}{minor}, but its device has "
            f"{has_major}{has_minor}; leave sm_version or device_property out to use the device's."
        )


def choose_target(said: str, tensors: Iterable[tuple[str, tensor]], place: Place) -> Target:
    """The device for operations.

    Only tensors made by ``tensor_like`` of a framework's tensor have a device; host scalars say
    nothing, because every device reads them.

    Args:
        said: what they are called in messages.
        tensors: their tensors, and what those are called.

    Raises:
        InvalidGraphError: tensors on several devices, or not on the device that the handle pins.
    """
    if place.told or place.decided is not None:
        return place.default
    seen: dict[Device, str] = {}
    for label, t in tensors:
        if t.attributes.device is not None and not t.attributes.is_pass_by_value:
            seen.setdefault(t.attributes.device, label)
    if len(seen) > 1:
        places = ", ".join(f"{label} on {kind}:{index}" for (kind, index), label in seen.items())
        raise InvalidGraphError(
            f"The tensors of {said} lie on several devices: {places}. Move them to one."
        )
    pinned = pinned_target(place.handle)
    for (kind, index), label in seen.items():
        target = _target(kind, index, label)
        if pinned not in (None, target):
            raise InvalidGraphError(
                f"{label} is on {target}, but the graph's handle was created for {pinned}; use a "
                "handle of the tensor's device."
            )
        return target
    return place.default


def _target(kind: str, index: int, label: str) -> Target:
    if kind == "cpu":
        return CPU
    if kind == "cuda":
        return cuda_target(index)
    raise InvalidGraphError(f"{label} is on a {kind} device; dlattn runs on CUDA and on the CPU.")
