"""The plans of one graph: chosen, filtered, built, and ready to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dlattn.config import settings
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.graph.execution import Elsewhere, Execution
from dlattn.graph.kernel_cache import KernelCache
from dlattn.graph.lower import Lowered
from dlattn.graph.vocabulary import build_plan_policy
from dlattn.plans.base import Runnable
from dlattn.plans.select import interpreter, select
from dlattn.problem import Program


def supported_plans(lowered: Lowered, engine: str | None = None) -> list[Callable[[], Runnable]]:
    """What makes the plans that can run a graph, best first.

    Args:
        engine: only plans of this name, in place of ``DLATTN_ENGINE``.

    Raises:
        cudnnGraphNotSupportedError: none can; the message lists every plan's reason.
    """
    problem, geometry, target = lowered.problem, lowered.geometry, lowered.target
    engine = engine or settings().engine
    if isinstance(problem, Program):
        return [partial(interpreter(engine), problem, geometry, target)]
    kinds = select(problem, geometry, target, engine)
    return [partial(kind, problem, geometry, target) for kind in kinds]


class Planning:
    """The plans made for a graph, best first, and those of them that are built."""

    def __init__(self, lowered: Lowered, kernel_cache: KernelCache | None = None) -> None:
        self._lowered = lowered
        self._kernel_cache = kernel_cache
        self._plans: list[Runnable] = []
        self._executions: dict[int, Execution] = {}
        self._chosen: int | None = None

    @property
    def plans(self) -> list[Runnable]:
        return self._plans

    def append(self, plan: Runnable) -> None:
        """Add one plan after the others."""
        self._plans.append(plan)

    def keep(self, wanted: Callable[[Runnable], bool]) -> None:
        """Drop the plans that are not wanted; what was built must be built again."""
        kept = [plan for plan in self._plans if wanted(plan)]
        if len(kept) < len(self._plans):
            self._plans = kept
            self._executions.clear()
            self._chosen = None

    def check(self) -> None:
        """Refuse to go on without a plan.

        Raises:
            cudnnGraphNotSupportedError: the filters left none.
        """
        if not self._plans:
            raise cudnnGraphNotSupportedError(
                "No execution plans support the graph: the notes, engines and workspace limits "
                "that were selected or deselected left none; relax them."
            )

    def build(self, policy: build_plan_policy) -> None:
        """Build the best plan, or all of them; the best is the one that runs.

        Raises:
            CompileError: NVRTC refused a kernel.
        """
        self.check()
        count = len(self._plans) if policy is build_plan_policy.ALL else 1
        for index in reversed(range(count)):
            self.build_at(index)

    def build_at(self, index: int) -> None:
        """Build one plan, which becomes the one that runs."""
        plan = self.at(index)
        if index not in self._executions:
            self._executions[index] = self._built(plan)
        self._chosen = index

    def _built(self, plan: Runnable) -> Execution:
        is_here = self._lowered.target.is_here
        if is_here:
            plan.build()
        else:
            plan.compile()
        if self._kernel_cache is not None:
            self._kernel_cache.add(plan)
        return (Execution if is_here else Elsewhere)(self._lowered, plan)

    def at(self, index: int) -> Runnable:
        """The plan at an index.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not 0 <= index < len(self._plans):
            raise InvalidArgumentError(
                f"There is no plan {index}; the graph has {len(self._plans)}, counted from 0."
            )
        return self._plans[index]

    def execution_at(self, index: int) -> Execution:
        """A built plan.

        Raises:
            InvalidArgumentError: there is no such plan, or it is not built.
        """
        self.at(index)
        if index not in self._executions:
            raise InvalidArgumentError(
                f"Plan {index} is not built; call build_plan_at_index({index}) first."
            )
        return self._executions[index]

    @property
    def chosen(self) -> Execution | None:
        """What ``execute`` runs: the plan that was built last, or ``None`` before that."""
        return None if self._chosen is None else self._executions[self._chosen]

    @property
    def workspace_size(self) -> int:
        """Bytes for the plan that runs, or that would be built first."""
        self.check()
        return self._plans[self._chosen or 0].workspace_size
