"""The plans of one graph: chosen, filtered, built, and ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dlattn.config import settings
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.graph.checks import integer
from dlattn.graph.execution import Elsewhere, Execution
from dlattn.graph.kernel_cache import KernelCache
from dlattn.graph.lower import Lowered
from dlattn.graph.vocabulary import build_plan_policy
from dlattn.plans.base import Choice, Runnable
from dlattn.plans.select import interpreter, select
from dlattn.problem import Problem
from dlattn.records import dataclass
from dlattn.runtime.log import log


@dataclass(frozen=True)
class Engine:
    """A kind of plan that can run a graph; calling it makes one.

    Attributes:
        name: the plan's.
        make: makes it, with ``tiling=`` one of ``choices``.
        choices: see :meth:`dlattn.plans.base.Plan.choices`.
    """

    name: str
    make: Callable[..., Runnable]
    choices: Sequence[Choice] = ()

    def __call__(self, configuration: int = 0) -> Runnable:
        if not configuration:
            return self.make()
        plan = self.make(tiling=self.choices[configuration])
        plan.configuration = configuration
        return plan

    @property
    def configurations(self) -> int:
        """How many plans it can make; at least 1."""
        return max(1, len(self.choices))


def supported_plans(lowered: Lowered, engine: str | None = None) -> list[Engine]:
    """What makes the plans that can run a graph, best first.

    Args:
        engine: only plans of this name, in place of ``DLATTN_ENGINE``.

    Raises:
        cudnnGraphNotSupportedError: none can; the message lists every plan's reason.
    """
    problem, geometry, target = lowered.problem, lowered.geometry, lowered.target
    engine = engine or settings().engine
    if not isinstance(problem, Problem):
        runs = interpreter(engine)
        return [Engine(runs.name, partial(runs, problem, geometry, target))]
    what = (problem, geometry, target)
    return [
        Engine(kind.name, partial(kind, *what), kind.choices(*what))
        for kind in select(*what, engine)
    ]


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
        self.built_at(index)
        self._chosen = index
        log(2, f"graph on {self._lowered.target}: {self.at(index).title}")

    def built_at(self, index: int) -> Execution:
        """A plan, built if it was not; the one that runs stays the one that runs."""
        plan = self.at(index)
        if index not in self._executions:
            is_here = self._lowered.target.is_here
            if is_here:
                plan.build()
            else:
                plan.compile()
            if self._kernel_cache is not None:
                self._kernel_cache.add(plan)
            self._executions[index] = (Execution if is_here else Elsewhere)(self._lowered, plan)
        return self._executions[index]

    def at(self, index: int) -> Runnable:
        """The plan at an index.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not 0 <= integer("index", index) < len(self._plans):
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
    def index(self) -> int:
        """Which plan runs, or would be built first."""
        self.check()
        return self._chosen or 0

    @property
    def workspace_size(self) -> int:
        """Bytes for that plan."""
        return self._plans[self.index].workspace_size
