"""Dataclasses whose methods are not compiled one by one.

``dataclasses`` writes the methods of every class as source text, and compiles it: 0.4 ms for a
frozen one, which was half of what importing dlattn took. Here, all classes share a few closures.
Fields, ``replace``, ``asdict`` and type checkers see the dataclasses that they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, kw_only: bool = False
    ) -> Any:
        """As ``dataclasses.dataclass`` with these arguments; without ``__post_init__``."""

        def made(cls: type) -> type:
            own = {*vars(cls)}
            if cls.__doc__ is None:
                # Or dataclasses would look for a signature, for 2 ms.
                cls.__doc__ = cls.__name__
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            fields = dataclasses.fields(cls)
            methods = {"__init__": _init(cls.__qualname__, fields), "__repr__": _repr(fields)}
            methods |= _comparison(fields)
            if frozen:
                methods |= {"__setattr__": _refuse_to_assign, "__delattr__": _refuse_to_delete}
            else:
                methods["__hash__"] = None
            for name in methods.keys() - own:
                setattr(cls, name, methods[name])
            return cls

        return made if cls is None else made(cls)


def _init(owner: str, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    # Every name is there from the start, so that values are in the order of the fields.
    start = {field.name: field.default for field in fields}
    factories = [
        (field.name, field.default_factory)
        for field in fields
        if field.default_factory is not MISSING
    ]
    needed = [field.name for field in fields if field.default is field.default_factory is MISSING]
    positional = [field.name for field in fields if not field.kw_only]

    def __init__(self: Any, /, *given: Any, **named: Any) -> None:
        values = self.__dict__
        values.update(start)
        if given:
            values.update(zip(positional, given, strict=False))
        if named:
            values.update(named)
        for name, make in factories:
            if values[name] is MISSING:
                values[name] = make()
        for name in needed:
            if values[name] is MISSING:
                raise TypeError(f"{owner} needs {name}, which was not given.")
        if len(values) > len(start) or len(given) > len(positional):
            raise TypeError(f"{owner} takes {list(start)}; got {len(given)} and {list(named)}.")
        if given and named and not named.keys().isdisjoint(positional[: len(given)]):
            raise TypeError(f"{owner} was given one of {list(named)} by position, too.")

    return __init__


def _repr(fields: tuple[dataclasses.Field[Any], ...]) -> Callable[[Any], str]:
    names = [field.name for field in fields if field.repr]

    def __repr__(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({values})"

    return __repr__


def _comparison(fields: tuple[dataclasses.Field[Any], ...]) -> dict[str, Callable[..., Any]]:
    names = [field.name for field in fields if field.compare]
    values: Callable[[Any], tuple[Any, ...]] = (
        attrgetter(*names)
        if len(names) > 1
        else lambda self: tuple(getattr(self, name) for name in names)
    )

    def __eq__(self: Any, other: Any) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return values(self) == values(other)

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__}


def _refuse_to_assign(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
