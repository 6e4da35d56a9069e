"""Every two features together, on the CPU."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests import pairs
from tests.cases import Case
from tests.drivers import check, run_graph
from tests.libraries import Library


def test_every_pair_is_there() -> None:
    """No two levels of two features are left out, in a number of cases that one can run."""
    rows = pairs.rows()
    assert set().union(*(pairs.pairs_of(row) for row in rows)) == pairs.every_pair()
    assert len(rows) < 50


def test_every_field_takes_part() -> None:
    """Each field of a case varies, or is named as one that is no feature."""
    cases = pairs.cases()
    varied = {f.name for f in fields(Case) if len({getattr(case, f.name) for case in cases}) > 1}
    assert {f.name for f in fields(Case)} - pairs.NO_FEATURES <= varied


@pytest.mark.parametrize("case", pairs.cases(), ids=repr)
def test_pair(case: Case) -> None:
    """Forward and backward of the reference engine agree with float64."""
    check(case, Library(), run_graph)
