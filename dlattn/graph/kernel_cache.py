"""Kernel caches: which compiled kernels some graphs use, to be carried to another process."""

from __future__ import annotations

from typing import Any

from dlattn.errors import InvalidArgumentError
from dlattn.plans.base import Runnable
from dlattn.runtime import jit
from dlattn.runtime.bundle import code_of, read_kernels, seal, unseal, write_kernels

_KIND = "kernel cache"


class KernelCache:
    """The kernels of the graphs that were built with it (cuDNN frontend 1.23 ``KernelCache``).

    Graphs of dlattn share kernels without one: sizes, strides and scales are not compiled in, a
    process compiles each kernel once, and a folder keeps them for other processes. What this object
    adds is that a program can take along the kernels that it uses, and start elsewhere without
    NVRTC and without that folder.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple[jit.KernelSource, str], jit.CompiledKernel] = {}

    def add(self, plan: Runnable) -> None:
        """Hold what a compiled plan launches, and what it would with other sizes."""
        sources, arch = [*plan.sources(), *plan.companions()], plan.target.arch
        for source, kernel in zip(sources, jit.compile_kernels(sources, arch), strict=True):
            self._kernels[source, arch] = kernel

    def __len__(self) -> int:
        return len(self._kernels)

    @property
    def names(self) -> list[str]:
        """Of each kernel, its name and architecture."""
        return [f"{source.name} {arch}" for source, arch in self._kernels]

    @property
    def nbytes(self) -> int:
        """Bytes of all cubins."""
        return sum(len(code_of(kernel)) for kernel in self._kernels.values())

    def serialize(self) -> str:
        """JSON text with every kernel that it holds."""
        kernels = [(source, kernel) for (source, _), kernel in self._kernels.items()]
        return seal(_KIND, {"kernels": write_kernels(kernels)})

    def deserialize(self, text: str) -> None:
        """Hold what another cache held; graphs of this process then find its kernels.

        Raises:
            InvalidArgumentError: the cache has kernels already, or the text is damaged.
            cudnnGraphNotSupportedError: the text is of another version of dlattn.
        """
        if self._kernels:
            raise InvalidArgumentError(
                f"The kernel cache holds {len(self)} kernels already; deserialise into a new one."
            )
        for source, kernel in read_kernels(unseal(_KIND, text).get("kernels")):
            jit.remember(source, kernel)
            self._kernels[source, kernel.arch] = kernel


def checked(kernel_cache: Any) -> KernelCache | None:
    """The argument ``kernel_cache`` of a graph.

    Raises:
        TypeError: it is no kernel cache.
    """
    if kernel_cache is None or isinstance(kernel_cache, KernelCache):
        return kernel_cache
    raise TypeError(f"kernel_cache must be made by create_kernel_cache(); got {kernel_cache!r}.")
