"""Which NVRTC is used, and how that is remembered; nothing is compiled here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dlattn.runtime import nvrtc


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """NVRTC as if this process had not loaded it; the list's last path is what a search finds."""
    found: list[Path | None] = [None]
    monkeypatch.setattr(nvrtc, "_loaded", None)
    monkeypatch.setattr(nvrtc, "_find", lambda: nvrtc.Nvrtc(None, found[-1]))  # type: ignore[arg-type]
    return found


def test_identity_is_remembered(unloaded: list[Path | None], tmp_path: Path) -> None:
    """Known from its file without loading it again, and new when the file changes."""
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(bytes(200_000))
    unloaded.append(library)
    first = nvrtc.identity(tmp_path / "memory")
    assert nvrtc._loaded is not None

    nvrtc._loaded = None
    unloaded.append(tmp_path / "never searched for")
    assert nvrtc.identity(tmp_path / "memory") == first
    assert nvrtc._loaded is None

    library.write_bytes(bytes(199_999) + b"\1")  # an upgrade in place
    assert nvrtc.identity(tmp_path / "memory") != first
    assert nvrtc._loaded is None

    library.unlink()  # removed: searched for anew
    other = tmp_path / "libnvrtc.so.13"
    other.write_bytes(b"another")
    unloaded.append(other)
    assert nvrtc.identity(tmp_path / "memory").startswith("7-")
    assert nvrtc._loaded.path == other


@pytest.mark.parametrize("name", ["CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH"])
def test_memory_is_per_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever may lead to another NVRTC is not answered from memory."""
    before = nvrtc._note(tmp_path)
    monkeypatch.setenv(name, str(tmp_path))
    assert nvrtc._note(tmp_path) != before


def test_installing_a_package_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new NVRTC may arrive beside the old one."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    before = nvrtc._note(tmp_path)
    os.utime(packages, (1, 1))
    assert nvrtc._note(tmp_path) != before
