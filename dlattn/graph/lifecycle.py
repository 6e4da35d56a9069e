"""From a graph's operations to the plan that runs it: plans made, chosen, built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.graph.checks import integer, mapping, member, members
from dlattn.graph.declarations import Declarations
from dlattn.graph.kernel_cache import KernelCache
from dlattn.graph.lower import Lowered
from dlattn.graph.notes import behavior_notes, numerical_notes
from dlattn.graph.overrides import Overrides
from dlattn.graph.vocabulary import (
    behavior_note,
    build_plan_policy,
    heur_mode,
    knob,
    knob_type,
    numerical_note,
)
from dlattn.plans.base import Runnable

if TYPE_CHECKING:
    from dlattn.graph.planning import Engine, Planning


class Lifecycle(Declarations):
    """The plans of a graph, from the first to the one that is built."""

    _kernel_cache: KernelCache | None
    _overrides: Overrides | None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lowered: Lowered | None = None
        self._engines: list[Engine] | None = None
        self._filters: list[Callable[[Runnable], bool]] = []
        self._planning: Planning | None = None

    @abstractmethod
    def build_operation_graph(self) -> None:
        """Freeze the graph: from then on it is known what can run it."""

    def create_execution_plans(
        self, heuristics: Iterable[heur_mode] = (heur_mode.A, heur_mode.FALLBACK)
    ) -> None:
        """Make the plans, best first.

        dlattn has one ranking, whatever the heuristic's name; but with ``heur_mode.AUTOTUNED``
        among them, the plan that :meth:`autotune` remembered comes before all others, if it
        remembered one, in this process or another, for the same graph and device.

        Raises:
            TypeError: a heuristic is no ``heur_mode``.
            InvalidGraphError, cudnnGraphNotSupportedError: as of :meth:`validate`.
        """
        modes = members("heuristics", heuristics, heur_mode)
        wanted = [(engine, 0) for engine in range(self.get_engine_count())]
        if heur_mode.AUTOTUNED in modes:
            from dlattn.graph.autotune import recall

            assert self._lowered is not None
            best = recall(self._lowered, self._makers)
            wanted = [*best, *(it for it in wanted if it not in best)]
        self._plan(wanted, keep_others=False)

    def create_execution_plan(self, engine_id: int, knobs: Mapping[Any, int] | None = None) -> None:
        """Add the plan of one engine, from 0 to ``get_engine_count() - 1``, best first.

        Args:
            engine_id: which one.
            knobs: settings of what :meth:`get_knobs_for_engine` lists.

        Raises:
            InvalidArgumentError: there is no such engine.
            cudnnGraphNotSupportedError: the engine has no such knob, or not that setting of it.
        """
        knobs = {} if knobs is None else mapping("knobs", knobs)
        known = {knob.type: knob for knob in self.get_knobs_for_engine(engine_id)}
        for kind, setting in knobs.items():
            if kind not in known or setting not in range(known[kind].max_value + 1):
                have = ", ".join(map(str, known.values())) or "none"
                raise cudnnGraphNotSupportedError(
                    f"Engine {engine_id} ({self._makers[engine_id].name}) cannot set {kind} to "
                    f"{setting}; it has the knobs {have}."
                )
        configuration = int(knobs.get(knob_type.KERNEL_CFG, 0))
        self._plan([(engine_id, configuration)], keep_others=True)

    def check_support(self) -> None:
        """Check that filtering left a plan.

        Raises:
            cudnnGraphNotSupportedError: it left none.
        """
        self._planned().check()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Compile and load the best plan, or all of them: the slow step.

        Raises:
            CompileError: NVRTC refused a kernel.
        """
        self._planned().build(member("policy", policy, build_plan_policy))

    def build(self, heuristics: Iterable[heur_mode] | None = None) -> None:
        """All steps at once."""
        self.create_execution_plans(*() if heuristics is None else (heuristics,))
        self.build_plans()

    def build_plan_at_index(self, index: int) -> None:
        """Compile and load one plan, which becomes the one that ``execute`` runs."""
        self._planned().build_at(index)

    # Choosing among plans ---------------------------------------------------------------------

    def get_engine_count(self) -> int:
        """How many plans can run the graph."""
        self.build_operation_graph()
        return len(self._makers)

    def get_knobs_for_engine(self, engine_id: int) -> list[knob]:
        """``KERNEL_CFG``, where a plan can divide its work in several ways; 0 is its own choice.

        Raises:
            InvalidArgumentError: there is no such engine.
        """
        if not 0 <= integer("engine_id", engine_id) < self.get_engine_count():
            raise InvalidArgumentError(
                f"There is no engine {engine_id}; {len(self._makers)} can run this graph, counted "
                "from 0."
            )
        settings = self._makers[engine_id].configurations
        return [knob(knob_type.KERNEL_CFG, 0, settings - 1)] if settings > 1 else []

    def get_execution_plan_count(self) -> int:
        """Plans made so far; 0 before ``create_execution_plans``."""
        return 0 if self._planning is None else len(self._planning.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """The engine's name; of a configuration that was asked for, with ``#`` and its number."""
        return self._planned().at(index).title

    def get_workspace_size(
        self, override_uids: Any = None, override_shapes: Any = None, override_strides: Any = None
    ) -> int:
        """Bytes of scratch memory that ``execute`` needs; may be 0.

        Of the declared shapes; with dlattn's own arguments, of a call of ``execute`` with these
        shapes, for which all is then ready.
        """
        if not (override_uids is override_shapes is override_strides is None):
            return self._overriding().workspace_size(
                override_uids, override_shapes, override_strides
            )
        return self._planned().workspace_size

    def get_autotune_workspace_size(self) -> int:
        """Bytes that :meth:`autotune` needs: the most that any plan does."""
        self.check_support()
        return max(plan.workspace_size for plan in self._plan_every_configuration().plans)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of scratch memory that ``execute_plan_at_index`` needs; may be 0."""
        return self._planned().at(index).workspace_size

    def get_behavior_notes(self) -> list[behavior_note]:
        """The notes of the plan that runs, or that would be built first."""
        return self.get_behavior_notes_for_plan_at_index(self._planned().index)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """The notes of one plan, by name."""
        return sorted(behavior_notes(self._planned().at(index)), key=lambda note: note.name)

    def select_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Keep only plans that have every note."""
        wanted = set(members("notes", notes, behavior_note))
        self._filter(lambda plan: wanted <= behavior_notes(plan))

    def deselect_behavior_notes(self, notes: Iterable[behavior_note]) -> None:
        """Keep only plans that have none of the notes."""
        unwanted = set(members("notes", notes, behavior_note))
        self._filter(lambda plan: not unwanted & behavior_notes(plan))

    def select_numeric_notes(self, notes: Iterable[numerical_note]) -> None:
        """Keep only plans that have every note."""
        wanted = set(members("notes", notes, numerical_note))
        self._filter(lambda plan: wanted <= numerical_notes(plan))

    def deselect_numeric_notes(self, notes: Iterable[numerical_note]) -> None:
        """Keep only plans that have none of the notes."""
        unwanted = set(members("notes", notes, numerical_note))
        self._filter(lambda plan: not unwanted & numerical_notes(plan))

    def deselect_engines(self, names: Iterable[str]) -> None:
        """Keep only plans with other names than these; an engine's name is that of all its
        configurations."""
        unwanted = set(members("names", names, str))
        self._filter(lambda plan: not {plan.name, plan.title} & unwanted)

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        """Keep only plans that need at most this much workspace."""
        nbytes = integer("nbytes", nbytes)
        self._filter(lambda plan: plan.workspace_size <= nbytes)

    # Details ----------------------------------------------------------------------------------

    @property
    def _makers(self) -> list[Engine]:
        """What makes the plans that can run the graph, best first; of a graph that was
        deserialised, whose plan is known, found when others are asked for."""
        if self._engines is None:
            from dlattn.graph.planning import supported_plans

            assert self._lowered is not None
            self._engines = supported_plans(self._lowered)
        return self._engines

    def _planned(self) -> Planning:
        if self._planning is None:
            self.create_execution_plans()
        assert self._planning is not None
        return self._planning

    def _plan(self, wanted: Iterable[tuple[int, int]], keep_others: bool) -> None:
        """Makes plans of engines and their configurations."""
        from dlattn.graph.planning import Planning

        assert self._lowered is not None
        if self._planning is None or not keep_others:
            self._planning = Planning(self._lowered, self._kernel_cache)
        for engine, configuration in wanted:
            self._planning.append(self._makers[engine](configuration))
        for keep in self._filters:
            self._planning.keep(keep)

    def _plan_every_configuration(self) -> Planning:
        """Beside the plans that there are, those of their engines' other configurations."""
        plans = self._planned().plans
        names, made = {it.name for it in plans}, {(it.name, it.configuration) for it in plans}
        missing = [
            (number, configuration)
            for number, engine in enumerate(self._makers)
            for configuration in range(engine.configurations)
            if engine.name in names and (engine.name, configuration) not in made
        ]
        self._plan(missing, keep_others=True)
        return self._planned()

    def _overriding(self) -> Overrides:
        if self._overrides is None:
            raise InvalidArgumentError(
                f"Graph {self._name!r} was made without is_override_shape_enabled=True, which "
                "executing it with other shapes takes."
            )
        return self._overrides

    def _filter(self, wanted: Callable[[Runnable], bool]) -> None:
        self._filters.append(wanted)
        if self._planning is not None:
            self._planning.keep(wanted)
        if self._overrides is not None:
            self._overrides.forget()
