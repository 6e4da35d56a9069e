"""What a ``Graph``'s tensors are called: ports, names, uids, and the objects they came from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlattn.errors import InvalidGraphError
from dlattn.graph.tensor import Tensor


class Names:
    """The tensors of one graph, found under everything that a user may call them."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._ports: dict[str, Tensor] = {}
        # While a graph is declared its objects are kept: a freed one's id could come back.
        self._kept: dict[int, tuple[Any, Tensor]] = {}
        self._released: dict[int, tuple[weakref.ref[Any], Tensor]] = {}

    def add(self, t: Tensor, source: Any = None) -> Tensor:
        """Know a tensor, and the framework's object that it was declared from."""
        self._tensors.append(t)
        if source is not None:
            self._kept[id(source)] = (source, t)
        return t

    def add_port(self, port: str, t: Tensor) -> None:
        """Know a tensor by its place in an operation."""
        self._ports[port] = t

    def declared_from(self, source: Any) -> Tensor | None:
        """The tensor that was declared from this very object."""
        if id(source) in self._kept:
            return self._kept[id(source)][1]
        if id(source) in self._released:
            reference, t = self._released[id(source)]
            return t if reference() is source else None
        return None

    def source_of(self, t: Tensor) -> Any:
        """The object that a tensor was declared from, until :meth:`release`."""
        return next((source for source, other in self._kept.values() if other is t), None)

    def release(self) -> None:
        """Stop keeping the objects' memory, and still recognise those that live on."""
        for number, (source, t) in self._kept.items():
            try:
                self._released[number] = (weakref.ref(source), t)
            except TypeError:
                continue
        self._kept.clear()

    def find(self, entry: Any) -> Tensor:
        """The tensor that has memory and is called ``entry``.

        Raises:
            InvalidGraphError: there is none, there are several, or it is virtual.
        """
        found = self._lookup(entry)
        if found is None:
            raise InvalidGraphError(
                f"{_said_entry(entry, 'A')} is not a tensor of this graph; it has "
                f"{', '.join(self._all())}."
            )
        if found.get_is_virtual():
            raise InvalidGraphError(
                f"{said_name(found)} is virtual, so it has no memory; call set_output(True) on it."
            )
        return found

    def keys(self, given: Mapping[Any, Any]) -> dict[Any, Tensor]:
        """The tensor of each key of a call but ``None``; several keys of one hold the same object.

        Raises:
            InvalidGraphError: they hold different ones, or a key is none that :meth:`find` knows.
        """
        keys: dict[Any, Tensor] = {}
        first: dict[Tensor, Any] = {}
        for key, value in given.items():
            if key is None:
                continue
            t = keys[key] = self.find(key)
            other = first.setdefault(t, key)
            if given[other] is not value:
                raise InvalidGraphError(
                    f"{_said_entry(other, 'A')} and {_said_entry(key)} are both {said_name(t)}, "
                    "and the call gives different values for them; give one."
                )
        return keys

    def _lookup(self, entry: Any) -> Tensor | None:
        if isinstance(entry, Tensor):
            return entry if any(t is entry for t in self._tensors) else None
        if isinstance(entry, (int, np.integer)):
            return next((t for t in self._tensors if t.attributes.uid == entry), None)
        if not isinstance(entry, str):
            return self.declared_from(entry)
        if entry in self._ports:
            return self._ports[entry]
        named = [t for t in self._tensors if t.get_name() == entry]
        if len(named) > 1:
            raise InvalidGraphError(f"{len(named)} tensors are named {entry!r}; use their uids.")
        return named[0] if named else None

    def _all(self) -> list[str]:
        return sorted({said_name(t) for t in self._tensors} | {repr(port) for port in self._ports})


class Once:
    """Where functions of scores declare the tensors of a ``Graph``: an array that was seen before,
    by an operation or by them, is the tensor that it was, unless it is given a name."""

    def __init__(self, graph: Any, names: Names) -> None:
        self.tensor, self.tensor_scalar = graph.tensor, graph.tensor_scalar
        self._tensor_like, self._names = graph.tensor_like, names

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        known = None if name or isinstance(source, Tensor) else self._names.declared_from(source)
        like: Tensor = self._tensor_like(source, name) if known is None else known
        return like


def _said_entry(entry: Any, article: str = "a") -> str:
    """How messages call what a user calls a tensor."""
    return (
        repr(entry)
        if isinstance(entry, (str, int, np.integer))
        else f"{article} {type(entry).__qualname__}"
    )


def said_name(t: Tensor) -> str:
    """How messages call a tensor."""
    return repr(t.get_name()) if t.get_name() else f"the tensor of uid {t.get_uid()}"
