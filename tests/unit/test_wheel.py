"""The wheel: what is in it, and that it works from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout, with the build tools that are installed."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def sources(folder: Path) -> set[str]:
    """Files below a folder, by path from its parent, without caches."""
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder.parent).as_posix() for p in files}


def test_wheel_holds_the_package_and_the_kernels(wheel: Path) -> None:
    """The wheel has every file of dlattn and, inside it, of cuda_src; and no other file."""
    expected = sources(ROOT / "dlattn") | {f"dlattn/{f}" for f in sources(ROOT / "cuda_src")}
    files = {f for f in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in f}
    assert files == expected
    assert {Path(f).suffix for f in files} <= {".py", ".cuh", ".md", ".typed"}


def test_wheel_is_pure_python(wheel: Path) -> None:
    """One wheel serves every platform and Python, and carries its licence."""
    assert wheel.name.endswith("-py3-none-any.whl")
    assert any(f.endswith("licenses/LICENSE") for f in zipfile.ZipFile(wheel).namelist())


def test_unpacked_wheel_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout, dlattn runs and reads the kernels inside the package."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "from dlattn.runtime.jit import cuda_source_root; print(cuda_source_root())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "dlattn" / "cuda_src")


def test_editable_install_finds_the_checkout(tmp_path: Path) -> None:
    """``pip install -e`` builds a wheel that links the checkout, kernels included."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel:editable",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    (link,) = (f for f in wheel.namelist() if f.endswith(".pth"))
    assert wheel.read(link).decode().strip() == str(ROOT)
    assert not any(f.startswith("dlattn/") for f in wheel.namelist())
