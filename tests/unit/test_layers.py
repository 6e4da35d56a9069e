"""The repository's own rules: who may import whom, where asm lives, how long a file may grow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dlattn"
KERNELS = ROOT / "cuda_src"

#: Leaves that anyone may import; they import only each other.
BASICS = {"config", "dtypes", "enums", "errors", "lazy", "opaque", "records"}

#: What each room may import besides itself and the basics. A room that is not named here is a
#: surface (flash, attention, torch, ...) and may import every room of this table.
MAY_IMPORT = {
    "runtime": set(),
    "problem": set(),
    "plans": {"problem", "runtime"},
    "graph": {"problem", "plans", "runtime"},
    "calls": {"problem", "plans", "runtime"},
    "one_call": {"problem", "plans", "runtime", "calls"},
}

#: The commands use dlattn as any user does.
CLIENTS = {"cli", "__main__"}

#: Modules that may import a framework, and which. Commands may import CuPy to make device arrays.
KNOWS_FRAMEWORKS = {
    "runtime/frameworks.py": {"cupy", "jax", "torch"},
    "runtime/buffers.py": {"cupy"},
    "runtime/streams.py": {"cupy", "jax", "torch"},
    "runtime/target.py": {"cupy"},
    "runtime/jit.py": {"cupy"},
    "runtime/launch.py": {"cupy"},
    "cli/demo.py": {"cupy"},
    "cli/machine.py": {"cupy"},
    **{
        f"{framework}/{path.name}": {framework}
        for framework in ("jax", "torch")
        for path in (PACKAGE / framework).glob("*.py")
    },
}

#: Lowest first; a file includes only from its own layer or below.
CUDA_LAYERS = ("base", "ptx", "tile", "attn", "kernels")

MODULES = sorted(PACKAGE.rglob("*.py"))
BESIDE = sorted(p for folder in ("bench", "tests") for p in (ROOT / folder).rglob("*.py"))
HEADERS = sorted(p for p in KERNELS.rglob("*") if p.suffix in {".cuh", ".cu", ".h"})


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def room(module: str) -> str:
    """``dlattn.plans.base`` -> ``plans``; ``dlattn`` itself -> ``__init__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, inside functions too, by its full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} has a relative import"
            assert node.module is not None
            # `from dlattn import config` names a module; `from dlattn.errors import X` does not.
            submodules = node.module == "dlattn"
            yield from (f"dlattn.{a.name}" if submodules else node.module for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only its own room, the basics, and rooms nearer to the machine."""
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    targets = {room(m) for m in imports(path) if m.split(".")[0] == "dlattn"} - {here}
    if here in CLIENTS or here == "__init__":
        return
    if here in BASICS:
        allowed = BASICS
    else:
        allowed = BASICS | MAY_IMPORT.get(here, set(MAY_IMPORT))
    assert targets <= allowed, f"{relative(path)} may not import {sorted(targets - allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_frameworks_stay_in_adapters(path: Path) -> None:
    """torch, JAX and CuPy are imported by the adapters alone."""
    used = {m.split(".")[0] for m in imports(path)} & {"cupy", "cupyx", "jax", "torch"}
    extra = used - KNOWS_FRAMEWORKS.get(relative(path), set())
    assert not extra, f"{relative(path)} may not import {sorted(extra)}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_dataclasses_that_every_start_makes_are_records(path: Path) -> None:
    """What graphs load takes ``dataclass`` from ``dlattn.records``, which compiles nothing."""
    if path.relative_to(PACKAGE).parts[0] in {"graph", "plans", "problem", "runtime"}:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^from dataclasses import .*\bdataclass\b", text, re.M)


@pytest.mark.parametrize("path", HEADERS, ids=relative)
def test_cuda_includes_go_down(path: Path) -> None:
    """A kernel source includes files of its own layer or below, and no system header."""
    layer = CUDA_LAYERS.index(path.relative_to(KERNELS).parts[0])
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\s*#\s*include\s*(\S+)", line)
        if not found:
            continue
        name = found[1]
        assert name.startswith('"'), f"{name} is a system header: NVRTC has none, and they are slow"
        included = KERNELS / name.strip('"')
        assert included.is_file(), f"{name} does not exist"
        assert CUDA_LAYERS.index(included.relative_to(KERNELS).parts[0]) <= layer, name


@pytest.mark.parametrize("path", HEADERS, ids=relative)
def test_asm_lives_in_ptx(path: Path) -> None:
    """Inline assembly is written in cuda_src/ptx alone."""
    if path.relative_to(KERNELS).parts[0] == "ptx":
        return
    assert not re.search(r"\basm\b\s*(volatile\b)?\s*\(", path.read_text(encoding="utf-8"))


def most_lines(path: Path) -> int:
    if path.suffix == ".py":
        return 400
    return 600 if path.is_relative_to(KERNELS / "kernels") else 250


@pytest.mark.parametrize("path", MODULES + BESIDE + HEADERS, ids=relative)
def test_files_stay_small(path: Path) -> None:
    """400 lines a Python file, 600 a kernel, 250 any other header: split by idea beyond that."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= most_lines(path), f"{relative(path)} has {lines} lines"


def texts() -> Iterator[Path]:
    """The files that people and tools read here, caches and build output left out."""
    for folder in (".ci", "bench", "cuda_src", "dlattn", "notebooks", "tests"):
        files = (ROOT / folder).rglob("*")
        yield from (p for p in files if {"__pycache__", ".hypothesis"}.isdisjoint(p.parts))
    yield from ROOT.glob("*.md")
    yield from ROOT.glob("*.toml")
    yield from ROOT.glob(".*.yaml")


def test_no_machine_paths_or_registry_hosts() -> None:
    """No file names a folder of somebody's machine, or a package index by host."""
    machine = re.compile(r"/(?:home|opt|root|work|Users)/\w")
    host = re.compile(r"pypi\.\w|pythonhoste[d]|index-ur[l]")
    found = []
    for path in texts():
        if not path.is_file():
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if machine.search(line) or host.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
