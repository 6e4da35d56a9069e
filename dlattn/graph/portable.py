"""A graph as others see it: its key, its text, its bytes, and the device that it is for."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.graph.description import describe, key_of
from dlattn.graph.devices import described_target
from dlattn.graph.lifecycle import Lifecycle
from dlattn.graph.lower import Lowered
from dlattn.graph.placement import Place
from dlattn.graph.recipe import recipe
from dlattn.plans.base import Runnable
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.graph.planning import Engine


class Portable(Lifecycle):
    """What a graph is besides the steps of its life, which :class:`pygraph` has."""

    _types: dict[str, data_type]
    _handle: int | None
    _sm_version: int | None
    _sm_count: int | None
    _device_property: Any
    #: Where a graph runs that was compiled before, or that is another with other shapes.
    _decided: Target | None = None

    @property
    @abstractmethod
    def lowered(self) -> Lowered:
        """What plans see of the graph."""

    @abstractmethod
    def _lower(self, engine: str | None = None) -> tuple[Lowered, list[Engine]]: ...

    @abstractmethod
    def _freeze(self, engine: str | None = None) -> list[Engine]: ...

    def key(self) -> int:
        """A hash of everything that execution depends on, the same in every process.

        Names do not count; uids count when the user set them.
        """
        lowered = self._lowered or self._lower()[0]
        return key_of(self._nodes, self._types, str(lowered.target))

    def __repr__(self) -> str:
        nodes = [describe(node) for node in self._nodes]
        try:
            known = recipe(self)
        except Exception:  # a text there is always, from which not every graph can be made again
            types = {name: dtype.name for name, dtype in self._types.items()}
            known = {"name": self._name, **types}
        return json.dumps({**known, "nodes": nodes})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickling and copying ask for.

        Raises:
            InvalidArgumentError: the graph has plans, whose kernels and memory are this process's.
        """
        if self._planning is None:
            return super().__reduce_ex__(protocol)
        raise InvalidArgumentError(
            f"Graph {self._name!r} has plans, and is neither pickled nor copied with them; keep "
            "the bytes of serialize(), of which deserialize() makes a new graph."
        )

    def serialize(self) -> list[int]:
        """The built graph as bytes, for :meth:`deserialize` in this or another process.

        They hold what was declared, the plan that ``execute`` runs, and its compiled kernels; with
        ``is_override_shape_enabled`` also the kernels of every shape that was executed.

        Raises:
            InvalidArgumentError: the graph is not built.
        """
        from dlattn.graph.serial import serialize

        return [*serialize(self)]

    def deserialize(self, *args: Any) -> None:
        """Become the graph that was serialised: ``deserialize(data)``, or with a handle before it.

        The graph must be new. It is then built, and packs name tensors by uid (set uids before
        serialising). Nothing is compiled, and NVRTC is not loaded. The device may be another one
        of the same architecture. Of a graph's JSON text, ``repr(graph)``, it becomes a graph that
        is declared and not built.

        Raises:
            InvalidArgumentError: the data is damaged (a ``RuntimeError``).
            InvalidGraphError: this graph is not new, or the data describes none.
            cudnnGraphNotSupportedError: the data is of another version of dlattn or for another
                architecture.
        """
        from dlattn.graph.serial import deserialize

        deserialize(self, *args)

    @property
    def _place(self) -> Place:
        described = described_target(self._device_property, self._sm_version, self._sm_count)
        told = self._device_property is not None
        return Place(self._handle, described, told, self._decided)

    def _adopt(self, plan: Runnable) -> None:
        """Build one plan, and run no other."""
        from dlattn.graph.planning import Planning

        self._planning = Planning(self.lowered, self._kernel_cache)
        self._planning.append(plan)
        self._planning.build_at(0)
