"""What the machine has, for people: CUDA devices by name, and what to install to use them."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from dlattn.runtime.target import Target, cuda_device_count, cuda_target


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        target: what plans are made for.
        name: NVIDIA's name, e.g. ``NVIDIA H200``.
    """

    target: Target
    name: str

    @property
    def description(self) -> str:
        """Name, architecture, multiprocessors and shared memory."""
        target = self.target
        return (
            f"{self.name}, {target.arch}, {target.multiprocessors} multiprocessors, "
            f"{target.shared_memory // 1024} KiB shared memory per block"
        )


def cuda_devices() -> list[Device]:
    """The devices that CuPy can use; empty without CuPy, a driver, or a GPU."""
    count = cuda_device_count()
    if count == 0:
        return []
    from cupy.cuda import runtime

    return [
        Device(cuda_target(index), runtime.getDeviceProperties(index)["name"].decode())
        for index in range(count)
    ]


def install_hint() -> str | None:
    """One sentence when this machine seems to have a GPU that dlattn cannot use, else ``None``."""
    if cuda_device_count() or not _has_driver():
        return None
    if importlib.util.find_spec("cupy") is None:
        return (
            "An NVIDIA driver is here, but CuPy is not: "
            'pip install ".[cu12]" (or ".[cu13]" for CUDA 13 drivers) lets dlattn use the GPU.'
        )
    return "An NVIDIA driver and CuPy are here, but CuPy finds no CUDA device it can use."


def _has_driver() -> bool:
    # Windows and WSL have no /proc/driver; there the driver brings nvidia-smi.
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
