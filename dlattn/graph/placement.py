"""Where a graph runs: on the device of its tensors, else of its handle, else the default one."""

from __future__ import annotations

from collections.abc import Iterable

from dlattn.errors import InvalidGraphError
from dlattn.graph.handle import pinned_target
from dlattn.graph.tensor import Device, tensor
from dlattn.runtime.target import CPU, Target, cuda_target, default_target


def choose_target(said: str, tensors: Iterable[tuple[str, tensor]], handle: int | None) -> Target:
    """The device for operations.

    Only tensors made by ``tensor_like`` of a framework's tensor have a device; host scalars say
    nothing, because every device reads them.

    Args:
        said: what they are called in messages.
        tensors: their tensors, and what those are called.

    Raises:
        InvalidGraphError: tensors on several devices, or not on the device that the handle pins.
    """
    seen: dict[Device, str] = {}
    for label, t in tensors:
        if t.attributes.device is not None and not t.attributes.is_pass_by_value:
            seen.setdefault(t.attributes.device, label)
    if len(seen) > 1:
        places = ", ".join(f"{label} on {kind}:{index}" for (kind, index), label in seen.items())
        raise InvalidGraphError(
            f"The tensors of {said} lie on several devices: {places}. Move them to one."
        )
    pinned = pinned_target(handle)
    for (kind, index), label in seen.items():
        target = _target(kind, index, label)
        if pinned not in (None, target):
            raise InvalidGraphError(
                f"{label} is on {target}, but the graph's handle was created for {pinned}; use a "
                "handle of the tensor's device."
            )
        return target
    return pinned or default_target()


def _target(kind: str, index: int, label: str) -> Target:
    if kind == "cpu":
        return CPU
    if kind == "cuda":
        return cuda_target(index)
    raise InvalidGraphError(f"{label} is on a {kind} device; dlattn runs on CUDA and on the CPU.")
