"""``env``: the versions, the device, the kernel cache and the environment variables in use."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import dlattn
from dlattn import config
from dlattn.cli.machine import cuda_devices, install_hint
from dlattn.errors import CompileError, DlattnError
from dlattn.runtime import nvrtc

#: Distributions that matter, by the name that people know; the first that is installed is shown.
_PACKAGES = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "torch": ("torch",),
    "jax": ("jax",),
}

Rows = Iterator[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: everything is printed."""


def run(arguments: argparse.Namespace) -> int:
    """Print the facts that a bug report needs."""
    sections = {
        "versions": _versions(),
        "device": _device(),
        "kernel cache": _cache(),
        "environment": _environment(),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows:
            print(f"  {name:<17} {value}")
    return 0


def _versions() -> Rows:
    yield "dlattn", f"{dlattn.__version__} ({Path(dlattn.__file__).parent})"
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    # Read from package metadata: importing torch or JAX to ask for a version takes seconds.
    for name, distributions in _PACKAGES.items():
        yield name, next(filter(None, map(_installed, distributions)), "not installed")


def _installed(distribution: str) -> str | None:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{version} ({distribution})" if distribution.startswith("cupy-") else version


def _device() -> Rows:
    devices = cuda_devices()
    for device in devices:
        yield str(device.target), device.description
    if not devices:
        yield "cuda", "none that CuPy can use; graphs run on the reference engine"
    hint = install_hint()
    if hint:
        yield "hint", hint
    yield "driver", _driver()
    yield "nvrtc", _nvrtc()


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "not found"
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version[0] if version else text.strip()


def _nvrtc() -> str:
    try:
        library = nvrtc.load(config.settings().cache_dir)
    except CompileError:
        return "not found"
    except DlattnError:  # a variable's value, of which the last section tells
        return "not looked for"
    return f"{library.version} ({library.path or 'found by the system loader'})"


def _cache() -> Rows:
    try:
        folder = config.settings().cache_dir
    except DlattnError as error:
        yield "none", str(error)
        return
    kernels = list(folder.glob("*/kernel.cubin"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    yield "folder", str(folder)
    yield "content", f"{len(kernels)} kernels, {size / 2**20:.1f} MiB"


def _environment() -> Rows:
    for variable in config.VARIABLES:
        value = os.environ.get(variable.name)
        yield variable.name, f"{value or f'unset: {variable.default}'}"
        yield "", variable.meaning
