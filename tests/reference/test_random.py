"""Random calls on the CPU: the reference engine against the oracle, by plan and by graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.cases import Case
from tests.drivers import check, run_graph
from tests.engine import run_plan
from tests.libraries import Library
from tests.strategies import cases


@settings(max_examples=300)
@given(cases())
def test_plan(case: Case) -> None:
    """The reference plan is right for every case, and writes nothing but its outputs."""
    check(case, Library(), run_plan)


@settings(max_examples=150)
@given(cases())
def test_graph_on_numpy(case: Case) -> None:
    """A graph of NumPy arrays is right for every case, and writes nothing but its outputs."""
    check(case, Library(), run_graph)


@settings(max_examples=100)
@given(cases())
def test_graph_on_torch(case: Case) -> None:
    """A graph of torch tensors is right for every case, and writes nothing but its outputs."""
    torch = pytest.importorskip("torch")
    check(case, Library(torch), run_graph)
