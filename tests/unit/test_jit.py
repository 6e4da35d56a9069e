"""Compiling and caching kernels, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlattn.errors import CompileError
from dlattn.runtime import jit, nvrtc
from dlattn.runtime.jit import KernelSource, compile_kernel, compile_kernels

INNER = "#pragma once\n__device__ inline float twice(float x) { return x + x; }\n"
OUTER = '#pragma once\n#include "base/inner.cuh"\n'


def source(
    name: str = "scale", body: str = "p[threadIdx.x] = twice(p[threadIdx.x]);"
) -> KernelSource:
    return KernelSource(
        name,
        '#include "kernels/outer.cuh"\n#include "base/inner.cuh"\n'
        f'extern "C" __global__ void {name}(float* p) {{ {body} }}\n',
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source root of two headers, and an empty cache."""
    root = tmp_path / "cuda_src"
    for name, text in (("base/inner.cuh", INNER), ("kernels/outer.cuh", OUTER)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr(jit, "cuda_source_root", lambda: root)
    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path / "cache"))
    jit.forget()
    yield root
    jit.forget()


@pytest.fixture
def compiler(root: Path, tmp_path: Path) -> Path:
    """The source root, where NVRTC is installed."""
    try:
        nvrtc.load(tmp_path / "cache")
    except CompileError:
        pytest.skip("NVRTC is not installed")
    return root


def counts() -> tuple[int, int, int]:
    s = jit.statistics
    return (s.compiles, s.disk_hits, s.memory_hits)


def entries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("[!n]*"))


# Compiling ----------------------------------------------------------------------------------------


def test_compile(compiler: Path) -> None:
    """A cubin for exactly the asked architecture, its facts, and everything kept beside it."""
    kernel = compile_kernel(source(), "sm_90a")
    assert kernel.name == "scale"
    assert kernel.arch == "sm_90a"
    assert kernel.cubin.read_bytes().startswith(b"\x7fELF")
    assert "'scale' for 'sm_90a'" in kernel.log
    assert 0 < kernel.registers < 64
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack, kernel.shared) == (0, 0, 0, 0)
    assert kernel.warnings == ()
    names = {path.name for path in kernel.cubin.parent.iterdir()}
    assert names == {"kernel.cu", "kernel.cubin", "kernel.log", "kernel.json"}
    assert (kernel.cubin.parent / "kernel.cu").read_text() == source().text


def test_spills_and_shared_memory_are_reported(compiler: Path) -> None:
    """Register pressure beyond the limit, and static shared memory."""
    body = """
        __shared__ float s[64]; float r[64];
        for (int i = 0; i < 64; ++i) r[i] = p[i * 97 + threadIdx.x];
        s[threadIdx.x] = p[0]; __syncthreads();
        #pragma unroll
        for (int i = 0; i < 64; ++i) p[i * 89 + threadIdx.x] = r[i] * r[63 - i] + s[i];
    """
    text = source(body=body).text.replace("void", "void __launch_bounds__(1024, 2)")
    kernel = compile_kernel(KernelSource("scale", text), "sm_80")
    assert kernel.registers == 32
    assert kernel.shared == 256
    assert kernel.spill_stores > 0
    assert kernel.stack > 0


def test_memory_then_disk(compiler: Path) -> None:
    """The second request is answered from memory, that of a new process from the disk."""
    first = compile_kernel(source(), "sm_80")
    assert counts() == (1, 0, 0)
    assert compile_kernel(source(), "sm_80") == first
    assert counts() == (1, 0, 1)
    jit.forget()
    assert compile_kernel(source(), "sm_80") == first
    assert counts() == (0, 1, 0)


def test_several(compiler: Path) -> None:
    """Kernels of one plan come back in order, equal ones compiled once."""
    sources = [source("a"), source("b"), source("a"), source("c")]
    kernels = compile_kernels(sources, "sm_80")
    assert [kernel.name for kernel in kernels] == ["a", "b", "a", "c"]
    assert counts() == (3, 0, 1)
    assert compile_kernels([], "sm_80") == []


def test_header_change_invalidates(compiler: Path, tmp_path: Path) -> None:
    """Editing a header, even one included indirectly, makes a new entry; undoing it does not."""
    first = compile_kernel(source(), "sm_80")
    (compiler / "base/inner.cuh").write_text(INNER.replace("x + x", "2.5f * x"))
    jit.forget()
    second = compile_kernel(source(), "sm_80")
    assert counts() == (1, 0, 0)
    assert second.cubin != first.cubin
    assert second.cubin.read_bytes() != first.cubin.read_bytes()
    (compiler / "base/inner.cuh").write_text(INNER)
    jit.forget()
    assert compile_kernel(source(), "sm_80") == first
    assert counts() == (0, 1, 0)


def test_key_holds_everything(root: Path) -> None:
    """Source, name, architecture, compiler, header names and texts: each changes the entry."""

    def name(**changes: str) -> str:
        given = {"name": "k", "text": "t", "arch": "sm_80", "compiler": "c", **changes}
        kernel = KernelSource(given["name"], given["text"])
        return jit._entry_name(kernel, given["arch"], jit._headers(root), given["compiler"])

    names = [name()]
    names += [name(**{what: "other"}) for what in ("name", "text", "arch", "compiler")]
    (root / "base/inner.cuh").rename(root / "base/renamed.cuh")
    jit.forget()
    names.append(name())
    (root / "base/more.cuh").write_text("")
    jit.forget()
    names.append(name())
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", ["kernel.cu", "kernel.cubin", "kernel.log", "kernel.json"])
def test_damage(compiler: Path, file: str) -> None:
    """A damaged entry is compiled again and repaired in place."""
    first = compile_kernel(source(), "sm_80")
    intact = first.cubin.read_bytes()
    path = first.cubin.with_name(file)
    path.write_bytes(path.read_bytes()[:-2])
    jit.forget()
    assert compile_kernel(source(), "sm_80").cubin == first.cubin
    assert counts() == (1, 0, 0)
    assert first.cubin.read_bytes() == intact
    jit.forget()
    compile_kernel(source(), "sm_80")
    assert counts() == (0, 1, 0)


def test_many_threads(compiler: Path) -> None:
    """One request compiles, the others wait for it."""
    with ThreadPoolExecutor(16) as pool:
        kernels = list(pool.map(lambda _: compile_kernel(source(), "sm_80"), range(32)))
    assert len(set(map(id, kernels))) == 1
    assert counts() == (1, 0, 31)


# Failing ------------------------------------------------------------------------------------------


def test_refused(compiler: Path, tmp_path: Path) -> None:
    """The error has the first complaint with its place, and keeps the source; trying again too."""
    broken = source(body="p[0] = undefined_name;")
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compile_kernel(broken, "sm_80")
        message = str(caught.value)
        assert 'kernel.cu(3): error: identifier "undefined_name" is undefined' in message
        kept = Path(message.rpartition("full log: ")[2].rstrip(")"))
        assert (kept / "kernel.cu").read_text() == broken.text
        assert "undefined_name" in (kept / "kernel.log").read_text()
    assert counts() == (0, 0, 0)


def test_refused_in_a_header(compiler: Path) -> None:
    """Headers are named as the source includes them."""
    (compiler / "base/inner.cuh").write_text("int broken = ;\n")
    with pytest.raises(CompileError, match=r"base/inner.cuh\(1\): error"):
        compile_kernel(source(), "sm_80")


def test_missing_header(compiler: Path) -> None:
    """Nothing but the source root is searched."""
    with pytest.raises(CompileError, match='cannot open source file "cuda_bf16.h"'):
        compile_kernel(KernelSource("k", '#include "cuda_bf16.h"\n'), "sm_80")


def test_wrong_name(compiler: Path) -> None:
    """A source without the kernel it promises is found out before it is cached."""
    with pytest.raises(CompileError, match='no extern "C" kernel named other'):
        compile_kernel(KernelSource("other", source().text), "sm_80")


def test_unknown_architecture(compiler: Path) -> None:
    """A GPU that is newer than NVRTC: what NVRTC knows instead, and what to do."""
    with pytest.raises(CompileError, match=r"for sm_990, only for .*sm_90, .*Install a newer one"):
        compile_kernel(source(), "sm_990")
    assert counts() == (0, 0, 0)


def test_failure_reaches_every_thread(compiler: Path) -> None:
    """Whoever waited for a compilation that failed gets its error."""

    def attempt(_: int) -> str:
        with pytest.raises(CompileError) as caught:
            compile_kernel(source(body="?"), "sm_80")
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(attempt, range(16)))) == 1


def test_no_nvrtc(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVRTC, the sentence says what to install."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "_loaded", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(CompileError, match=r'pip install "\.\[cu12\]"'):
        compile_kernel(source(), "sm_80")


# Other processes ----------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from dlattn.runtime import jit
jit.cuda_source_root = lambda: Path(sys.argv[1])
kernel = jit.compile_kernel(jit.KernelSource("scale", sys.argv[2]), "sm_80")
nvrtc = "libnvrtc" in Path("/proc/self/maps").read_text()
print(jit.statistics.compiles, jit.statistics.disk_hits, nvrtc, kernel.cubin)
"""


def start(root: Path, text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_warm_start_does_not_load_nvrtc(compiler: Path) -> None:
    """A process that finds its kernel on the disk never maps libnvrtc; one that compiles does."""
    kernel = compile_kernel(source(), "sm_80")
    warm, _ = start(compiler, source().text).communicate()
    assert warm.split() == ["0", "1", "False", str(kernel.cubin)]
    cold, _ = start(compiler, source(body="p[0] = 7;").text).communicate()
    assert cold.split()[:3] == ["1", "0", "True"]


def test_many_processes(compiler: Path, tmp_path: Path) -> None:
    """Processes that start together on an empty cache all succeed and leave one entry."""
    results = [
        p.communicate()[0].split() for p in [start(compiler, source().text) for _ in range(4)]
    ]
    assert len({result[3] for result in results}) == 1
    assert len(entries(tmp_path)) == 1
    compile_kernel(source(), "sm_80")
    assert counts() == (0, 1, 0)


def test_wrong_memory_is_only_a_miss(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is stored under the identity of the compiler that made it."""
    true = nvrtc.load(tmp_path).identity
    stale = tmp_path / "old-libnvrtc.so"
    stale.write_bytes(b"old")
    memory = tmp_path / "cache"
    memory.mkdir(exist_ok=True)
    nvrtc._note(memory).write_text(str(stale))
    monkeypatch.setattr(nvrtc, "_loaded", None)
    kernel = compile_kernel(source(), "sm_80")
    expected = jit._entry_name(source(), "sm_80", jit._headers(compiler), true)
    assert kernel.cubin.parent.name == expected
    assert nvrtc._note(memory).read_text() != str(stale)


# Loading ------------------------------------------------------------------------------------------


class FakeCupy:
    """As much of CuPy as loading needs: devices that nest, modules, and settable attributes."""

    def __init__(self) -> None:
        self.current: list[int] = []
        self.loaded: list[tuple[str | bytes, str, int]] = []
        self.attributes: list[tuple[int, int, int]] = []
        self.cuda = SimpleNamespace(
            Device=self.device,
            function=SimpleNamespace(Module=self.module),
            driver=SimpleNamespace(funcSetAttribute=lambda *given: self.attributes.append(given)),
        )

    def device(self, index: int) -> contextlib.ExitStack:
        current = self.current

        class Device(contextlib.ExitStack):
            def __enter__(self) -> contextlib.ExitStack:
                current.append(index)
                self.callback(current.pop)
                return super().__enter__()

        return Device()

    def module(self) -> SimpleNamespace:
        made = SimpleNamespace()

        def load(code: bytes) -> None:
            made.code = code

        def get_function(name: str) -> SimpleNamespace:
            self.loaded.append((made.code, name, self.current[-1]))
            return SimpleNamespace(ptr=2000 + self.current[-1])

        made.load, made.get_function = load, get_function
        return made

    def RawModule(self, path: str) -> SimpleNamespace:  # noqa: N802 - CuPy's name
        def get_function(name: str) -> SimpleNamespace:
            self.loaded.append((path, name, self.current[-1]))
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + self.current[-1]))

        return SimpleNamespace(get_function=get_function)


def test_load_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One module per cubin and device, loaded with that device current."""
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(jit, "_kernels", {})
    compiled = jit.CompiledKernel(name="k", arch="sm_80", cubin=Path("k.cubin"), log="")
    first, second = jit.load(compiled, 0), jit.load(compiled, 1)
    assert jit.load(compiled, 0) is first
    assert cupy.loaded == [("k.cubin", "k", 0), ("k.cubin", "k", 1)]
    assert (first.function, second.function) == (1000, 1001)


def test_load_from_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that came in data is found by its source, and loaded without a file."""
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(jit, "_kernels", {})
    came = jit.CompiledKernel(
        name="scale", arch="sm_80", cubin=Path("scale-0.cubin"), log="", code=b"\x7fELF"
    )
    jit.remember(source(), came)
    kernel = jit.load(compile_kernel(source(), "sm_80"), 1)
    assert cupy.loaded == [(b"\x7fELF", "scale", 1)] and kernel.function == 2001
    kernel.set_shared(100_000)
    kernel.set_shared(1000)
    assert cupy.attributes == [(2001, 8, 100_000)]  # 8: the most dynamic shared memory
    assert counts() == (0, 0, 1)


# Sources ------------------------------------------------------------------------------------------


def test_source_root() -> None:
    """The headers are beside the package in a checkout, inside it in a wheel."""
    assert jit.cuda_source_root().name == "cuda_src"
    assert (jit.cuda_source_root() / "kernels").is_dir()
