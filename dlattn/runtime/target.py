"""The machine that a plan is made for: one device, described by the facts that choose code."""

from __future__ import annotations

from functools import cache

from dlattn.errors import DlattnError
from dlattn.records import dataclass


@dataclass(frozen=True)
class Target:
    """A device, or a description of one (plans are made and compiled without a GPU too).

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        index: CUDA device ordinal; -1 of a description, on which nothing runs.
        capability: CUDA compute capability, e.g. ``(9, 0)``.
        shared_memory: most bytes of dynamic shared memory a block may ask for.
        multiprocessors: streaming multiprocessors.
    """

    kind: str
    index: int = 0
    capability: tuple[int, int] = (0, 0)
    shared_memory: int = 0
    multiprocessors: int = 0

    @property
    def arch(self) -> str:
        """NVRTC's ``-arch`` value; ``sm_90a`` on Hopper, whose own instructions need the ``a``."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    @property
    def version(self) -> str:
        """The compute capability as it is written."""
        return "{}.{}".format(*self.capability)

    @property
    def is_here(self) -> bool:
        """Whether it is a device, and no description."""
        return self.index >= 0

    def __str__(self) -> str:
        if not self.is_here:
            return f"{self.arch} (described)"
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


CPU = Target("cpu")

#: Descriptions for compiling without a GPU, by architecture.
KNOWN = {
    "sm_80": Target("cuda", 0, (8, 0), 163 * 1024, 108),
    "sm_90a": Target("cuda", 0, (9, 0), 227 * 1024, 132),
    "sm_100": Target("cuda", 0, (10, 0), 227 * 1024, 148),
    "sm_120": Target("cuda", 0, (12, 0), 99 * 1024, 170),
}


#: ``cudaDeviceAttr`` values, of which CuPy names only some.
_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


@cache
def cuda_target(index: int) -> Target:
    """The CUDA device with this ordinal, measured through CuPy's runtime bindings.

    Raises:
        DlattnError: CuPy is not there, or cannot use the device.
    """
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise DlattnError(
            f"CUDA device {index} is reached through CuPy, which cannot be imported: {error}. "
            'Install it with pip install ".[cu12]" in a checkout of dlattn, or ".[cu13]" if the '
            "driver is one of CUDA 13."
        ) from error
    numbers = (
        *(_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR),
        *(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, _MULTIPROCESSOR_COUNT),
    )
    try:
        major, minor, *more = (runtime.deviceGetAttribute(number, index) for number in numbers)
    except (runtime.CUDARuntimeError, OverflowError) as error:
        raise DlattnError(
            f"CuPy cannot use CUDA device {index}: {error}. If the driver is too old for this "
            "CuPy, install the one of the driver's CUDA version, cupy-cuda12x or cupy-cuda13x, "
            "and not both; python -m dlattn env shows what is here."
        ) from error
    return Target("cuda", index, (major, minor), *more)


@cache
def device_name(target: Target) -> str:
    """What the device is called, e.g. ``NVIDIA H200``."""
    if target.kind == "cpu":
        return "cpu"
    from cupy.cuda import runtime

    name: bytes = runtime.getDeviceProperties(target.index)["name"]
    return name.decode()


def cuda_device_count() -> int:
    """CUDA devices that CuPy can use; 0 without CuPy, a driver, or a device."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def default_target() -> Target:
    """CUDA's current device if there is one, else the CPU."""
    if cuda_device_count() == 0:
        return CPU
    from cupy.cuda import runtime

    return cuda_target(runtime.getDevice())
