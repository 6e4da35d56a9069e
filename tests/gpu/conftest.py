"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dlattn.runtime import jit


@pytest.fixture(scope="module")
def compiles_what_it_launches() -> Iterator[None]:
    """Kernels that other sizes of a problem would take are not compiled with it: where each test is
    of another problem, they would be most of what is compiled."""
    compile_kernels = jit.compile_kernels

    def alone(
        sources: Sequence[jit.KernelSource], arch: str, companions: Any = None
    ) -> list[jit.CompiledKernel]:
        return compile_kernels(sources, arch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "compile_kernels", alone)
        yield
