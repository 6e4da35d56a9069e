"""From CUDA source to a function on a device: compiled once, cached on disk, loaded by CuPy.

The cache's key is a hash of everything that the cubin is made from: the source, the name and text
of every header, the options, the compiler. Headers reach NVRTC from memory, so what is hashed is
what is compiled. A start that finds all its kernels in the cache never loads NVRTC.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from functools import cache
from pathlib import Path
from typing import Any

from dlattn.config import settings
from dlattn.errors import CompileError
from dlattn.records import dataclass
from dlattn.runtime import cache as disk
from dlattn.runtime import nvrtc
from dlattn.runtime.log import log
from dlattn.runtime.ptxas import Usage, read_report

#: Part of every key. Raise it when the files or facts of an entry change their meaning.
CACHE_FORMAT = 1

#: Given to NVRTC beside ``-arch``; ``-v`` makes ptxas report registers and spills, and NVRTC's own
#: cache (13.0 and later) would answer without that report.
OPTIONS = ("-std=c++20", "-default-device", "-DNDEBUG", "--ptxas-options=-v", "--no-cache")


@dataclass(frozen=True)
class KernelSource:
    """A translation unit with one kernel.

    Attributes:
        name: the kernel's ``extern "C"`` name.
        text: CUDA C++; its ``#include`` lines name headers relative to :func:`cuda_source_root`.
    """

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CompiledKernel(Usage):
    """A kernel in the cache.

    Attributes:
        name: the kernel's name in the cubin.
        arch: NVRTC's ``-arch`` value, e.g. ``sm_90a``.
        cubin: the file; ``kernel.cu``, ``kernel.log`` and ``kernel.json`` lie beside it.
        log: NVRTC's and ptxas's output.
        code: the cubin itself, of a kernel that came in serialised data; ``cubin`` is then only
            what it is called.
    """

    name: str
    arch: str
    cubin: Path
    log: str
    code: bytes | None = None


@dataclass
class Statistics:
    """How requests were answered since the start of the process (or :func:`forget`)."""

    compiles: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, answer: str) -> None:
        """Add one to a counter."""
        with self._lock:
            setattr(self, answer, getattr(self, answer) + 1)

    def reset(self) -> None:
        """Set all counters to 0."""
        self.compiles = self.disk_hits = self.memory_hits = 0


statistics = Statistics()

_memory: dict[tuple[KernelSource, str], CompiledKernel] = {}
#: Held while a kernel is found or compiled, so that no other thread does the same.
_busy: dict[tuple[KernelSource, str], threading.Lock] = {}
_memory_lock = threading.Lock()


def cuda_source_root() -> Path:
    """The folder of CUDA headers: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "cuda_src"
    return installed if installed.is_dir() else package.parent / "cuda_src"


def compile_kernel(source: KernelSource, arch: str) -> CompiledKernel:
    """Compile a kernel, or take it from memory or disk; safe to call from many threads.

    Args:
        arch: NVRTC's ``-arch`` value.

    Raises:
        CompileError: NVRTC is missing or refused the source.
    """
    key = (source, arch)
    with _memory_lock:
        busy = _busy.setdefault(key, threading.Lock())
    with busy:
        kernel = _memory.get(key)
        if kernel is None:
            kernel = _memory[key] = _from_disk_or_compiler(source, arch)
        else:
            statistics.count("memory_hits")
    return kernel


def compile_kernels(
    sources: Sequence[KernelSource],
    arch: str,
    companions: Callable[[], Sequence[KernelSource]] | None = None,
) -> list[CompiledKernel]:
    """Compile several kernels side by side (NVRTC releases the GIL); see :func:`compile_kernel`.

    Args:
        companions: says which kernels will be wanted later. If one of the sources must be compiled,
            they are as well, in the same time; else it is not called.
    """
    if companions and not all(_is_compiled(source, arch) for source in sources):
        return compile_kernels([*sources, *companions()], arch)[: len(sources)]
    if len(sources) < 2:
        return [compile_kernel(source, arch) for source in sources]
    # Imported here, because it takes as long as a warm start spends on all kernels together.
    from concurrent.futures import ThreadPoolExecutor

    workers = min(len(sources), os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="dlattn-nvrtc") as pool:
        return list(pool.map(lambda source: compile_kernel(source, arch), sources))


def remember(source: KernelSource, kernel: CompiledKernel) -> None:
    """Answer later requests with a kernel that was compiled elsewhere."""
    with _memory_lock:
        _memory.setdefault((source, kernel.arch), kernel)


def headers_digest() -> str:
    """What every cubin is made from, besides its source."""
    return _headers(cuda_source_root()).digest


def forget() -> None:
    """Drop what this process remembers (headers, compiled kernels, counters), not the disk.

    Headers are read once per process; call this after editing one in a running session.
    """
    with _memory_lock:
        _memory.clear()
    _headers.cache_clear()
    statistics.reset()


# The cache ----------------------------------------------------------------------------------------


def _from_disk_or_compiler(source: KernelSource, arch: str) -> CompiledKernel:
    root = settings().cache_dir
    headers = _headers(cuda_source_root())
    compiler = nvrtc.identity(root)
    kernel = _read(root, _entry_name(source, arch, headers, compiler))
    if kernel is None:
        library = nvrtc.load(root)
        entry = _entry_name(source, arch, headers, library.identity)
        if library.identity != compiler:  # the remembered NVRTC was another one
            kernel = _read(root, entry)
        if kernel is None:
            return _compile(root, entry, source, arch, headers, library)
    statistics.count("disk_hits")
    return kernel


def _is_compiled(source: KernelSource, arch: str) -> bool:
    """Whether a kernel is in memory or on disk; from then on it is in memory."""
    key, root = (source, arch), settings().cache_dir
    with _memory_lock:
        if key in _memory:
            return True
    entry = _entry_name(source, arch, _headers(cuda_source_root()), nvrtc.identity(root))
    kernel = _read(root, entry)
    if kernel is None:
        return False
    statistics.count("disk_hits")
    with _memory_lock:
        _memory.setdefault(key, kernel)
    return True


def _read(root: Path, entry: str) -> CompiledKernel | None:
    found = disk.read(root, entry)
    if found is None:
        return None
    usage = dict(found.facts["usage"])
    usage["warnings"] = tuple(usage["warnings"])  # JSON has lists only
    output = found.files["kernel.log"].decode()
    return _compiled(found.facts, Usage(**usage), found.folder, output)


def _compile(
    root: Path,
    entry: str,
    source: KernelSource,
    arch: str,
    headers: Headers,
    library: nvrtc.Nvrtc,
) -> CompiledKernel:
    _check_known(arch, library)
    facts = {"name": source.name, "arch": arch, "nvrtc": library.version, "options": OPTIONS}
    started = time.perf_counter()
    try:
        cubin, output = library.compile(source.text, headers.texts, (f"-arch={arch}", *OPTIONS))
        usage = read_report(source.name, output)
        if usage is None:
            raise nvrtc.Rejected(f'error: it has no extern "C" kernel named {source.name}')
    except nvrtc.Rejected as rejected:
        output = str(rejected)
        files = {"kernel.cu": source.text.encode(), "kernel.log": output.encode()}
        kept = disk.write(root, f"refused-{entry}", files, facts)
        raise CompileError(
            f"NVRTC refused {source.name} for {arch}: {_first_error(output)} "
            f"(source and full log: {kept})"
        ) from None
    statistics.count("compiles")
    log(1, f"compiled {source.name} for {arch} in {time.perf_counter() - started:.2f} s")
    files = {
        "kernel.cu": source.text.encode(),
        "kernel.cubin": cubin,
        "kernel.log": output.encode(),
    }
    folder = disk.write(root, entry, files, {**facts, "usage": asdict(usage)})
    return _compiled(facts, usage, folder, output)


def _compiled(facts: dict[str, Any], usage: Usage, folder: Path, output: str) -> CompiledKernel:
    return CompiledKernel(
        name=facts["name"],
        arch=facts["arch"],
        cubin=folder / "kernel.cubin",
        log=output,
        **vars(usage),
    )


def _check_known(arch: str, library: nvrtc.Nvrtc) -> None:
    """A GPU may be newer than NVRTC."""
    known = [f"sm_{number}" for number in library.architectures]
    if arch.rstrip("a") not in known:
        raise CompileError(
            f"NVRTC {library.version} cannot compile for {arch}, only for {', '.join(known)}. "
            'Install a newer one with pip install ".[cu13]" in a checkout of dlattn, or set '
            "CUDA_PATH to a newer CUDA toolkit; python -m dlattn env shows which one is found."
        )


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[0]).strip()


# The key ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headers:
    """Every header under the source root.

    Attributes:
        texts: content by path relative to the root.
        digest: hash of all names and contents.
    """

    texts: dict[str, str]
    digest: str


@cache
def _headers(root: Path) -> Headers:
    # Every start reads them all, and pathlib would take three times as long.
    files = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    texts = {}
    for path in sorted(file for file in files if file.endswith(".cuh")):
        with open(path, "rb", buffering=0) as header:
            texts[path.removeprefix(f"{root}{os.sep}")] = header.read().decode()
    return Headers(texts, _digest(*(part for header in texts.items() for part in header)))


def _entry_name(source: KernelSource, arch: str, headers: Headers, compiler: str) -> str:
    key = _digest(
        str(CACHE_FORMAT), source.name, source.text, headers.digest, compiler, arch, *OPTIONS
    )
    return f"{source.name}-{arch}-{key[:32]}"


def _digest(*parts: str) -> str:
    """A hash that tells ``("ab", "c")`` from ``("a", "bc")``."""
    hashed = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        hashed.update(len(encoded).to_bytes(8, "little"))
        hashed.update(encoded)
    return hashed.hexdigest()


# Loading ------------------------------------------------------------------------------------------

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A kernel on one device.

    Attributes:
        name: its name.
        function: the driver's ``CUfunction`` as an int.
    """

    def __init__(self, compiled: CompiledKernel, device_index: int) -> None:
        import cupy

        self.name = compiled.name
        self._device = cupy.cuda.Device(device_index)
        self._shared = 0
        with self._device:
            # Both are kept: the driver unloads the code when the module goes.
            if compiled.code is None:
                self._module = cupy.RawModule(path=str(compiled.cubin))
                self._function = self._module.get_function(compiled.name).kernel
            else:
                self._module = cupy.cuda.function.Module()
                self._module.load(compiled.code)
                self._function = self._module.get_function(compiled.name)
            self.function = int(self._function.ptr)

    def set_shared(self, nbytes: int) -> None:
        """Allow launches with this much dynamic shared memory per block, in bytes."""
        if nbytes <= self._shared:
            return
        import cupy

        with self._device:
            cupy.cuda.driver.funcSetAttribute(self.function, _MAX_DYNAMIC_SHARED, nbytes)
        self._shared = nbytes


_kernels: dict[tuple[Path, int], Kernel] = {}
_kernels_lock = threading.Lock()


def load(compiled: CompiledKernel, device_index: int) -> Kernel:
    """Load a compiled kernel on a CUDA device, once per process."""
    key = (compiled.cubin, device_index)
    with _kernels_lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = _kernels[key] = Kernel(compiled, device_index)
    return kernel
