"""What holds for all tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dlattn.runtime import jit


@pytest.fixture(autouse=True)
def compiles_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that other sizes of a problem would take are not compiled with it: they would be most
    of what random tests compile. A module of tests that are of them has a fixture of this name."""
    compile_kernels = jit.compile_kernels

    def alone(
        sources: Sequence[jit.KernelSource], arch: str, companions: Any = None
    ) -> list[jit.CompiledKernel]:
        return compile_kernels(sources, arch)

    monkeypatch.setattr(jit, "compile_kernels", alone)
