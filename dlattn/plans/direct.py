"""What the small functions beside attention share: one kernel with an argument of its own, or its
twin in NumPy."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import ClassVar

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.plans.host import host_array
from dlattn.plans.kernels import KernelLaunch
from dlattn.problem import TensorSpec
from dlattn.problem.layout import WIDEST_ACCESS, is_wide
from dlattn.problem.score import Array
from dlattn.runtime import jit
from dlattn.runtime.launch import Launch, guards_of
from dlattn.runtime.target import Target, cuda_device_count

#: Lanes of a warp, and the fewest that have a row: threads with rows of their own go more ways than
#: ptxas has barriers for.
_WARP, _FEWEST = 32, 4


class DirectPlan(ABC):
    """One function for tensors of certain shapes, strides and types on one device.

    Life as of :class:`dlattn.plans.base.Plan`.

    Attributes:
        tensors: role -> spec; each role is a field of the argument, whose first member is the
            address, or of what is by value an int32 number.
        wide: every address is a multiple of 16 bytes.
    """

    name: ClassVar[str]

    def __init__(self, tensors: Mapping[str, TensorSpec], target: Target, wide: bool) -> None:
        self.tensors = tensors
        self.target = target
        self.wide = wide
        self._argument = self.make_argument()
        kind = type(self._argument)
        self._slots = [
            (role, ctypes.c_uint64.from_buffer(self._argument, getattr(kind, role).offset))
            for role, spec in tensors.items()
            if not spec.by_value
        ]
        self._numbers = [
            (role, ctypes.c_int32.from_buffer(self._argument, getattr(kind, role).offset))
            for role, spec in tensors.items()
            if spec.by_value
        ]
        self._lock = Lock()  # by `with` alone; see CudaPlan
        self._guard: Callable[[], AbstractContextManager[object]] = nullcontext
        self._launch: Launch | None = None

    @abstractmethod
    def make_argument(self) -> ctypes.Structure:
        """The kernel's argument, with every address null."""

    @abstractmethod
    def kernel(self) -> KernelLaunch:
        """The kernel and its grid."""

    @abstractmethod
    def on_host(self, arrays: Mapping[str, Array]) -> None:
        """The same in NumPy."""

    def build(self) -> None:
        """Compile and load; idempotent.

        Raises:
            CompileError: NVRTC refused the kernel.
        """
        if self._launch is not None or self.target.kind == "cpu":
            return
        kernel = self.kernel()
        loaded = jit.load(jit.compile_kernel(kernel.source, self.target.arch), self.target.index)
        self._guard = guards_of(self.target.index, cuda_device_count())
        self._launch = Launch(
            loaded.function,
            kernel.grid,
            kernel.block,
            kernel.shared,
            ctypes.addressof(self._argument),
            name=kernel.source.name,
        )

    @property
    def workspace_size(self) -> int:
        return 0

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Enqueue the work; see :meth:`dlattn.plans.base.Plan.execute`."""
        if self.target.kind == "cpu":
            tensors = self.tensors.items()
            self.on_host({role: host_array(pointers[role], spec) for role, spec in tensors})
            return
        assert self._launch is not None, "build() comes before execute()"
        with self._guard(), self._lock:
            for role, slot in self._slots:
                slot.value = pointers[role]
            for role, number in self._numbers:
                number.value = ctypes.c_int32.from_address(pointers[role]).value
            self._launch(stream)


def direct_source(
    kernel: str, argument: type[ctypes.Structure], threads: int, *parameters: object
) -> jit.KernelSource:
    """The source that instantiates ``kernels/<kernel>.cuh`` with these template parameters."""
    entry = f"dlattn_{kernel}"
    given = ", ".join(str(p).lower() if isinstance(p, bool) else str(p) for p in parameters)
    text = f"""\
#include "kernels/{kernel}.cuh"

using namespace dlattn;

static_assert(sizeof({argument.__name__}) == {ctypes.sizeof(argument)}, "dlattn/plans");

extern "C" __global__ void __launch_bounds__({threads})
{entry}(const __grid_constant__ {argument.__name__} p) {{
  {kernel}<{given}>(p);
}}
"""
    return jit.KernelSource(entry, text)


def unit_size(wide: bool, *types: data_type) -> int:
    """Elements that a thread moves at once: 16 bytes of each type (``cuda_src/tile/unit.cuh``)."""
    return WIDEST_ACCESS // min(map(dtypes.itemsize, types)) if wide else 1


def lanes_of(columns: int, unit: int) -> int:
    """Lanes for a row: as few as have a unit each, at most a warp."""
    units = max(_FEWEST, -(-columns // unit))
    return min(_WARP, 1 << (units - 1).bit_length())


def has_wide_rows(spec: TensorSpec) -> bool:
    """Whether every row of a tensor is aligned for the widest access if its first one is."""
    return is_wide(spec.dim, spec.stride, spec.dtype, WIDEST_ACCESS, ragged=False)
