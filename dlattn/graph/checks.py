"""Arguments of the graph API: one of the wrong Python type is a ``TypeError`` that names it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

Member = TypeVar("Member")


def flag(name: str, value: Any) -> bool:
    """True or false; ``None`` is false."""
    if value is None or (isinstance(value, (int, np.bool_)) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True, False or None; got {value!r:.100}.")


def integer(name: str, value: Any) -> int:
    """An ``int``, or what is one to Python, such as NumPy's integers and ``IntEnum`` members."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r:.100}.") from None


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Python ints from any sequence of integers, ``torch.Size`` included."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers; got {values!r:.100}.") from None


def text(name: str, value: Any) -> str:
    """A ``str``."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str; got {value!r:.100}.")
    return value


def member(name: str, value: Any, kind: type[Member]) -> Member:
    """A member of an enumeration, or another object of one type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a dlattn.{kind.__name__}; got {value!r:.100}.")
    return value


def members(name: str, values: Any, kind: type[Member]) -> list[Member]:
    """Several of them; a ``str`` is not its letters."""
    try:
        found = None if isinstance(values, str) else [*values]
    except TypeError:  # it is none, or an array without axes
        found = None
    if found is None or not all(isinstance(value, kind) for value in found):
        plain = kind is str
        wanted = "str" if plain else f"dlattn.{kind.__name__} members"
        raise TypeError(f"{name} must be a sequence of {wanted}; got {values!r:.100}.")
    return found


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """A ``dict``, or another mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict; got {value!r:.100}.")
    return value
