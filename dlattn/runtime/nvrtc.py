"""NVRTC by ctypes: finding the library, and turning CUDA C into cubins.

Finding and loading NVRTC costs about 0.1 s, which a program whose kernels are all cached should
not pay, and yet the cache's key must change with the compiler. So :func:`identity` remembers, in
the cache folder, the path that NVRTC was last loaded from, and derives the identity from that
file's bytes. The memory is only a hint: whatever is compiled is stored under the identity of the
library that compiled it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from dlattn.errors import CompileError
from dlattn.records import dataclass

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class Rejected(Exception):
    """NVRTC refused a source; the argument is its log."""


@dataclass(frozen=True)
class Nvrtc:
    """The loaded library.

    Attributes:
        library: its functions.
        path: the file it was loaded from; ``None`` when unknown.
    """

    library: ctypes.CDLL
    path: Path | None

    @cached_property
    def version(self) -> str:
        """``"12.9"``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    @cached_property
    def identity(self) -> str:
        """What the cache's key holds of the compiler; see :func:`identity`."""
        return (self.path and _file_identity(self.path)) or self.version

    @cached_property
    def architectures(self) -> tuple[int, ...]:
        """What it compiles for, e.g. ``(..., 90, 100, 120)``, the oldest first."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def compile(
        self, source: str, headers: Mapping[str, str], options: Iterable[str]
    ) -> tuple[bytes, str]:
        """The cubin and the log of one translation unit.

        Args:
            source: CUDA C++.
            headers: text by the name that ``#include`` lines use; nothing is read from disk.
            options: NVRTC's options.

        Raises:
            Rejected: NVRTC refused.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            b"kernel.cu",
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        try:
            given = tuple(options)
            status = self.library.nvrtcCompileProgram(program, len(given), _strings(given))
            log = self._text("nvrtcGetProgramLog", program).decode(errors="replace")
            log = log.rstrip("\0").strip()
            if status:
                raise Rejected(log or self._error(status))
            return self._text("nvrtcGetCUBIN", program), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, getter: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self.library, function)(*arguments)
        if status:
            raise CompileError(f"{function} failed: {self._error(status)} (NVRTC at {self.path})")

    def _error(self, status: int) -> str:
        explain = self.library.nvrtcGetErrorString
        explain.restype = ctypes.c_char_p
        text: bytes = explain(status)
        return text.decode()


_loaded: Nvrtc | None = None
_lock = threading.Lock()


def load(memory: Path) -> Nvrtc:
    """NVRTC, loaded once per process.

    Args:
        memory: folder where :func:`identity` remembers locations, one file per environment.

    Raises:
        CompileError: there is none.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _find()
        _remember(_note(memory), _loaded.path)
    return _loaded


def identity(memory: Path) -> str:
    """A text that changes when the NVRTC that this process would use changes.

    Loads NVRTC only when ``memory`` does not tell where it was found last.

    Raises:
        CompileError: there is no NVRTC.
    """
    if _loaded is not None:
        return _loaded.identity
    try:
        remembered = _file_identity(Path(_note(memory).read_text()))
    except OSError:
        remembered = None
    return remembered or load(memory).identity


def _find() -> Nvrtc:
    """cuda-pathfinder knows wheels, conda, the system and CUDA_PATH; CuPy depends on it."""
    reason = "the cuda-pathfinder package is missing"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        pass
    else:
        try:
            path = load_nvidia_dynamic_lib("nvrtc").abs_path
            if path is not None:
                return Nvrtc(ctypes.CDLL(path), Path(path))
        except (RuntimeError, OSError) as error:  # DynamicLibNotFoundError is a RuntimeError
            reason = str(error)
    for name in _SONAMES:
        try:
            return Nvrtc(ctypes.CDLL(name), None)
        except OSError:
            continue
    raise CompileError(
        "NVRTC, NVIDIA's run-time compiler, was not found, and the kernels that this graph needs "
        'are not in the cache. Install it with pip install ".[cu12]" (or ".[cu13]") in a checkout '
        f"of dlattn, or set CUDA_PATH to a CUDA toolkit. Details: {reason}"
    )


def _file_identity(path: Path) -> str | None:
    """Size, and hash of both ends: ELF header, symbol hashes, build id, section table."""
    end = 64 * 1024
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(end)
            file.seek(max(size - end, 0))
            return f"{size}-{hashlib.sha256(head + file.read(end)).hexdigest()[:16]}"
    except OSError:
        return None


def _note(memory: Path) -> Path:
    """Where the location is remembered, named by all that decides which NVRTC is found: variables,
    installed packages, the system loader's cache."""
    variables = ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH")
    facts = [sys.prefix, *(os.environ.get(name, "") for name in variables)]
    packages = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    for place in (*packages, "/etc/ld.so.cache"):
        try:
            facts.append(f"{place} {os.stat(place).st_mtime_ns}")
        except OSError:
            facts.append(place)
    return memory / f"nvrtc-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _remember(note: Path, path: Path | None) -> None:
    if path is None:
        return
    draft = note.with_name(f".{note.name}-{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(str(path))
        draft.replace(note)
    except OSError:
        pass  # a cache that cannot be written: NVRTC is loaded at each start


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
