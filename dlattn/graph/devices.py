"""Devices that need not be there: what a graph is compiled for on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.runtime.target import KNOWN, Target, cuda_target

#: Compute capability -> shared memory of a block in KiB (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability"), and the multiprocessors of a common device.
_DEVICES = {
    80: (163, 108),
    86: (99, 84),
    87: (163, 16),
    89: (99, 128),
    90: (227, 132),
    100: (227, 148),
    103: (227, 148),
    120: (99, 170),
    121: (99, 48),
}


class DeviceProperties:
    """A description of a CUDA device; see :func:`create_device_properties`.

    Attributes:
        target: what plans know of it.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def serialize(self) -> str:
        """JSON text, which :func:`create_device_properties` takes on another machine."""
        it = self.target
        return json.dumps(
            {
                "compute_capability": list(it.capability),
                "shared_memory": it.shared_memory,
                "multiprocessors": it.multiprocessors,
            }
        )

    def __repr__(self) -> str:
        return f"DeviceProperties({self.serialize()})"


def create_device_properties(device: int | str) -> DeviceProperties:
    """Describe a device, for ``pygraph(device_property=...)`` (cuDNN frontend 1.23).

    Args:
        device: an ordinal of this machine's CUDA devices; the text of
            :meth:`DeviceProperties.serialize`; or, dlattn's own, an architecture: ``"sm_80"``,
            ``"sm_90a"``, ``"sm_100"``, ``"sm_120"``.

    Raises:
        InvalidArgumentError: none of these, or there is no such device.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return DeviceProperties(replace(_measured(device), index=-1))
    if isinstance(device, str) and device in KNOWN:
        return DeviceProperties(replace(KNOWN[device], index=-1))
    try:
        it = json.loads(str(device))
        major, minor = it["compute_capability"]
        numbers = (major, minor, it["shared_memory"], it["multiprocessors"])
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise ValueError(f"its numbers are {numbers}")
        if not _is_count(it["multiprocessors"]):
            raise ValueError("it has no multiprocessors")
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise InvalidArgumentError(
            f"create_device_properties takes a device's ordinal, one of {', '.join(KNOWN)}, or "
            f"what serialize() of its result returned; got {device!r} ({error})."
        ) from error
    return DeviceProperties(Target("cuda", -1, (major, minor), *numbers[2:]))


def _measured(index: int) -> Target:
    try:
        return cuda_target(index)
    except Exception as error:  # CuPy is missing, or its driver has no such device
        raise InvalidArgumentError(
            f"CUDA device {index} cannot be described here: {error}. Describe it where it is, "
            "and take the text of serialize() along, or name an architecture, such as 'sm_90a'."
        ) from error


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 < number < 2**31


def described_target(
    device_property: Any, sm_version: int | None, sm_count: int | None
) -> Target | None:
    """The device that arguments of ``pygraph`` describe, or ``None``.

    Raises:
        TypeError: ``device_property`` is no description.
        InvalidArgumentError: ``sm_count`` is no number of multiprocessors.
        cudnnGraphNotSupportedError: dlattn does not know devices of ``sm_version``.
    """
    if sm_count is not None and not _is_count(sm_count):
        raise InvalidArgumentError(f"sm_count must be an int of at least 1; got {sm_count!r}.")
    if device_property is not None:
        if not isinstance(device_property, DeviceProperties):
            raise TypeError(
                "device_property must be made by create_device_properties(); got "
                f"{device_property!r}."
            )
        return device_property.target
    if sm_version is None:
        return None
    if type(sm_version) is not int or sm_version not in _DEVICES:
        raise cudnnGraphNotSupportedError(
            f"sm_version is {sm_version!r}; dlattn compiles for {', '.join(map(str, _DEVICES))}. "
            "Leave it out to use the device's, or describe the device with device_property."
        )
    shared, multiprocessors = _DEVICES[sm_version]
    capability = divmod(sm_version, 10)
    return Target("cuda", -1, capability, shared * 1024, sm_count or multiprocessors)
