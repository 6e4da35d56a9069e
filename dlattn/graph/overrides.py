"""A graph with other shapes: ``override_uids``, ``override_shapes`` and ``override_strides``.

Other shapes are the same graph declared again, and so checked as every graph is; what runs them is
made when it is first asked for, and kept.
"""

from __future__ import annotations

import operator
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.graph.execution import Execution
from dlattn.graph.recipe import declare, overridden, recipe
from dlattn.plans.base import Runnable

if TYPE_CHECKING:
    from dlattn.graph.planning import Planning
    from dlattn.graph.portable import Portable

#: Executions that are kept; beyond them, that which was made first goes.
MOST_KEPT = 256


class Overrides:
    """The executions of one built graph with other shapes."""

    def __init__(self, graph: Portable) -> None:
        self._graph = graph
        self._kept: dict[Any, Execution] = {}
        self._lock = threading.Lock()
        self._recipe: dict[str, Any] | None = None
        #: Bytes of workspace that callers know of.
        self._known_size = 0

    def __reduce__(self) -> Any:
        # Graphs are copied before they have plans: there is nothing but the graph.
        return Overrides, (self._graph,)

    @property
    def plans(self) -> list[Runnable]:
        """What was built so far."""
        with self._lock:
            return [execution.plan for execution in self._kept.values()]

    def workspace_size(self, uids: Any, shapes: Any, strides: Any) -> int:
        """Bytes that a call with these shapes needs; from then on, addresses promise as many."""
        size = self._execution(uids, shapes, strides, None).plan.workspace_size
        self._known_size = max(self._known_size, size)
        return size

    def execution(
        self, uids: Any, shapes: Any, strides: Any, workspace: Any, index: int | None = None
    ) -> Execution:
        """What runs these shapes, by the best plan, or by the graph's plan at an index.

        Raises:
            InvalidGraphError: the shapes are wrong, as those of a graph can be.
            cudnnGraphNotSupportedError: no plan runs them.
            InvalidVariantPackError: the workspace is an address, which has as many bytes as
                ``get_workspace_size`` said, and these shapes need more.
        """
        planning = self._planning()
        name = None if index is None else planning.at(index).name
        execution = self._execution(uids, shapes, strides, name)
        size = execution.plan.workspace_size
        if size > self._known_size and (workspace is None or type(workspace) is int):
            declared = planning.workspace_size
            if size > max(self._known_size, declared):
                raise InvalidVariantPackError(
                    f"workspace: these shapes need {size} bytes, more than the {declared} of the "
                    "declared ones. Ask get_workspace_size(override_uids, override_shapes, "
                    "override_strides), or give a tensor of so many bytes."
                )
        return execution

    def forget(self) -> None:
        """Makes plans anew, as other ones may be left to choose from."""
        with self._lock:
            self._kept.clear()
            self._known_size = 0

    def _execution(self, uids: Any, shapes: Any, strides: Any, plan: str | None) -> Execution:
        try:
            # Each is read once, as it may be an iterator; what is none stays, to be told of below.
            uids = None if uids is None else tuple(uids)
            shapes = None if shapes is None else tuple(shapes)
            strides = None if strides is None else tuple(strides)
            shapes = None if shapes is None else tuple(map(tuple, shapes))
            strides = None if strides is None else tuple(map(tuple, strides))
            key = (plan, *map(_numbers, (uids, shapes, strides)))
            found = self._kept.get(key)
        except TypeError:
            overridden(self._graph, uids, shapes, strides)  # says which argument is no sequence
            raise
        if found is not None:
            return found
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._make(overridden(self._graph, uids, shapes, strides), plan)
                if len(self._kept) >= MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = found
        return found

    def _make(self, said: dict[int, Any], plan: str | None) -> Execution:
        from dlattn.graph.pygraph import pygraph

        graph = self._graph
        self._planning()
        if self._recipe is None:
            self._recipe = recipe(graph)
        other = pygraph(handle=graph._handle, kernel_cache=graph._kernel_cache)
        other._decided, other._filters = graph.lowered.target, [*graph._filters]
        declare(other, self._recipe, said)
        if plan is not None:
            other._filter(lambda it: it.name == plan)
        other.build()
        assert other._planning is not None and other._planning.chosen is not None
        # The pack's keys are the tensors of the graph that the user knows.
        own = {t.attributes.uid: t for t in graph._tensors}
        lowered = other.lowered
        tensors = {role: own[t.attributes.uid] for role, t in lowered.tensors.items()}
        numbers = tuple(replace(it, tensor=own[it.tensor.attributes.uid]) for it in lowered.numbers)
        lowered = replace(lowered, tensors=tensors, numbers=numbers)
        return type(other._planning.chosen)(lowered, other._planning.chosen.plan)

    def _planning(self) -> Planning:
        planning = self._graph._planning
        if planning is None or planning.chosen is None:
            raise InvalidArgumentError(
                f"Graph {self._graph._name!r} has no built plan to execute; call build() first."
            )
        return planning


def _numbers(given: Any) -> Any:
    """Of Python's integers: as parts of a key, elements of a tensor are equal to nothing else."""
    if given is None:
        return None
    return tuple(map(_numbers, given)) if isinstance(given, tuple) else operator.index(given)
