"""Random calls on the CPU by graphs that were bytes, or were declared for other sizes."""

from __future__ import annotations

from hypothesis import given, settings

from tests.cases import Case
from tests.drivers import check
from tests.libraries import Library
from tests.serial import run_overridden, run_serialized
from tests.strategies import cases


@settings(max_examples=100)
@given(cases())
def test_serialized(case: Case) -> None:
    """A graph that was serialised is right for every case, and writes nothing but its outputs."""
    check(case, Library(), run_serialized)


@settings(max_examples=150)
@given(cases())
def test_overridden(case: Case) -> None:
    """So is a graph of other sizes that is given those of the case."""
    check(case, Library(), run_overridden)
