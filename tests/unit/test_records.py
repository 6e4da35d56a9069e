"""Dataclasses with shared methods do what the standard library's do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn import records
from dlattn.problem import Geometry, Problem

OWN, STANDARD = records.dataclass, dataclasses.dataclass


def classes(dataclass: Any) -> dict[str, Any]:
    """Classes of every kind that dlattn has, made by one decorator."""

    @dataclass(frozen=True)
    class Point:
        """Fields with and without defaults, and what a call makes."""

        x: int
        y: float = 1.0
        seen: dict[str, int] = dataclasses.field(default_factory=dict)
        aside: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @dataclass(frozen=True)
    class Place(Point):
        """More of them."""

        z: int = 3

        def __repr__(self) -> str:
            return f"here at {self.x}"

    @dataclass(frozen=True)
    class Nothing:
        """None."""

    @dataclass(frozen=True, kw_only=True)
    class Named:
        """By name alone."""

        x: int
        y: int = 2

    @dataclass
    class Counter:
        """One that changes."""

        x: int = 0

    return {it.__name__: it for it in (Point, Place, Nothing, Named, Counter)}


CLASSES, EXPECTED = classes(OWN), classes(STANDARD)
#: The last has no hash.
VALUES = st.one_of(st.integers(0, 2), st.just(1.0), st.just({}))
CALLS = st.tuples(
    st.sampled_from([*CLASSES]),
    st.lists(VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["x", "y", "z", "seen", "aside", "w"]), VALUES, max_size=3),
)


def outcome(function: Any, *arguments: Any, **named: Any) -> Any:
    """What it returns, or the error that it raises."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        return type(error)


def facts(it: Any) -> Any:
    """All that can be asked of an instance, or of an error."""
    if isinstance(it, type):
        return it
    return repr(it), vars(it), [*vars(it)], dataclasses.asdict(it), is_hashable(it)


def is_hashable(it: Any) -> bool:
    return outcome(hash, it) is not TypeError


@given(call=CALLS, other=CALLS)
def test_instances_are_those_of_a_dataclass(call: Any, other: Any) -> None:
    """Made of the same arguments they have the same fields in the same order, text, equality and
    hashability; what one refuses, so does the other."""
    (a, b), (c, d) = (
        [outcome(kinds[name], *given, **named) for name, given, named in (call, other)]
        for kinds in (CLASSES, EXPECTED)
    )
    assert facts(a) == facts(c) and facts(b) == facts(d)
    assert (a == b) == (c == d) and (a != b) == (c != d)
    if a == b and is_hashable(a):
        assert hash(a) == hash(b)
    if not isinstance(a, type):
        assert facts(copy.copy(a)) == facts(a)
        for changes in ({"x": 7}, {"w": 7}):
            changed = [outcome(dataclasses.replace, it, **changes) for it in (a, c)]
            assert facts(changed[0]) == facts(changed[1])


@pytest.mark.parametrize("name", CLASSES)
def test_frozen_ones_stay(name: str) -> None:
    """Nothing can be assigned or deleted, with the standard library's error; others change."""
    given = {} if name == "Nothing" else {"x": 1}
    it, expected = CLASSES[name](**given), EXPECTED[name](**given)
    for act in (lambda x: setattr(x, "x", 5), lambda x: delattr(x, "x")):
        assert name == "Nothing" or outcome(act, it) is outcome(act, expected)
        assert vars(it) == vars(expected)


def test_factories_make_one_for_each() -> None:
    """Instances do not share what a factory makes."""
    first, second = CLASSES["Point"](1), CLASSES["Point"](1)
    assert first.seen == second.seen and first.seen is not second.seen


def test_errors_name_what_is_wrong() -> None:
    """The missing field, and the one that there is not."""
    with pytest.raises(TypeError, match="Problem needs head_dim_v"):
        Problem(None, None, 64)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"Geometry takes .*; got 0 and \['nothing'\]"):
        Geometry(nothing=1)  # type: ignore[call-arg]


def test_instances_are_pickled() -> None:
    """So are graphs' problems, by frameworks that send them to other processes."""
    it = Geometry(attn_scale=0.5)
    assert pickle.loads(pickle.dumps(it)) == it
