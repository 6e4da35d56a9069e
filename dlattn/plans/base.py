"""What every engine is: a plan that says whether it can run a problem, and runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar, Protocol

from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.problem import Geometry, Problem
from dlattn.runtime.jit import CompiledKernel, KernelSource
from dlattn.runtime.launch import Operation
from dlattn.runtime.target import Target


class Choice(Protocol):
    """One of several ways to divide the same work."""

    @property
    def cpp(self) -> str:
        """All that it is."""
        ...


class Runnable(ABC):
    """One way to run one graph on one device.

    Life: ``__init__`` (cheap) -> ``workspace_size`` -> ``build`` (slow: compiles, which
    :meth:`compile` does without a device, and loads) ->
    ``execute`` (often; thread-safe; never allocates device memory, copies or synchronises).
    """

    name: ClassVar[str]

    #: The plans that it runs, one after the other; of most, none.
    plans: Sequence[Runnable] = ()

    #: Which of :meth:`Plan.choices` it was made with; 0 is what it takes by itself.
    configuration: int = 0

    def __init__(self, geometry: Geometry, target: Target) -> None:
        self.geometry = geometry
        self.target = target

    @property
    def title(self) -> str:
        """The name, and the number of a configuration that was asked for."""
        return f"{self.name}#{self.configuration}" if self.configuration else self.name

    @property
    @abstractmethod
    def workspace_size(self) -> int:
        """Bytes of 16-byte aligned scratch memory that :meth:`execute` needs; may be 0."""

    def sources(self) -> list[KernelSource]:
        """The kernels that it launches, in order."""
        return [source for plan in self.plans for source in plan.sources()]

    def companions(self) -> list[KernelSource]:
        """Kernels that other sizes of the same problem take: compiled when these are, so that a new
        size compiles nothing."""
        return [source for plan in self.plans for source in plan.companions()]

    def elsewhere(self) -> list[KernelSource]:
        """Kernels that the same plan launches on devices of more or fewer multiprocessors."""
        return [source for plan in self.plans for source in plan.elsewhere()]

    def compile(self) -> list[CompiledKernel]:
        """The part of :meth:`build` that needs no device: compile :meth:`sources`."""
        return [kernel for plan in self.plans for kernel in plan.compile()]

    @abstractmethod
    def build(self) -> None:
        """Compile and load; idempotent.

        Raises:
            CompileError: NVRTC refused a kernel.
        """

    @abstractmethod
    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Enqueue the work.

        Args:
            pointers: role -> address; exactly the roles of ``geometry.tensors``. The memory has
                been checked against the specs there. By-value scalars are host addresses.
            workspace: address of ``workspace_size`` bytes on the device (0 when none is needed).
            stream: CUDA stream handle (0 is the legacy default stream); ignored on the CPU.
        """

    def operations(
        self, pointers: Mapping[str, int], workspace: int
    ) -> AbstractContextManager[Sequence[Operation]]:
        """``with`` it: what :meth:`execute` would enqueue, in order. After the block, the plan may
        give them other addresses.

        Args:
            pointers, workspace: as for :meth:`execute`.

        Raises:
            cudnnGraphNotSupportedError: it has none, as what runs on the host.
        """
        raise cudnnGraphNotSupportedError(
            f"{self.name} on {self.target} has nothing that a CUDA graph holds; call execute(), or "
            "make the graph for a CUDA device."
        )


#: A plan's ``execute`` of addresses in a fixed order: they, the workspace, the stream.
Bound = Callable[[Sequence[int], int, int], None]

#: Of each role the number of its address in an order, and what is added to that address.
Places = Mapping[str, tuple[int, int]]


class Executable(Protocol):
    """What can be built and run as a plan."""

    @property
    def workspace_size(self) -> int: ...
    def build(self) -> None: ...
    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None: ...


def bound(plan: Executable, places: Places) -> Bound:
    """What executes a plan that was built, of addresses in a fixed order."""
    if isinstance(plan, Plan):
        return plan.bind(places)
    return partial(_execute, plan, places)


def _execute(
    plan: Executable, places: Places, addresses: Sequence[int], workspace: int, stream: int
) -> None:
    pointers = {role: addresses[at] + more for role, (at, more) in places.items()}
    plan.execute(pointers, workspace, stream)


class Plan(Runnable):
    """One way to run one problem; ``supports`` comes first."""

    def __init__(self, problem: Problem, geometry: Geometry, target: Target) -> None:
        super().__init__(geometry, target)
        self.problem = problem

    def bind(self, places: Places) -> Bound:
        """See :func:`bound`."""
        return partial(_execute, self, places)

    @classmethod
    @abstractmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        """``None`` when this plan can run the problem, else one sentence that says why not."""

    @classmethod
    def gives_way(cls, to: str, problem: Problem, geometry: Geometry, target: Target) -> bool:
        """Whether the next plan that supports the problem, of this name, runs it faster."""
        return False

    @classmethod
    def choices(cls, problem: Problem, geometry: Geometry, target: Target) -> Sequence[Choice]:
        """Tilings that a plan for a supported problem can be made with, as ``tiling=``; its own
        choice comes first. Empty where there is one way only."""
        return ()
