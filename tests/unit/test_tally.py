"""What random tests did is added up, and a time that is up ends them."""

from __future__ import annotations

import math

import pytest

from tests import tally


@pytest.fixture(autouse=True)
def _unlimited() -> None:
    tally.take()
    tally.begin(math.inf)


def test_summary() -> None:
    """Counts of a test's parts are added, and of measurements the tenths are told."""
    tally.count("calls")
    tally.measure("ratios", 1.0)
    first = tally.take()
    for ratio in (2.0, 3.0):
        tally.count("calls")
        tally.measure("ratios", ratio)
    (line,) = tally.summary([("one", first), ("one", tally.take())])
    assert line == "one: 3 calls, 3 ratios: 1.20 1.40 1.60 1.80 2.00 2.20 2.40 2.60 2.80 3.00"
    assert tally.take() == {}


def test_time() -> None:
    """No case begins after it."""
    assert list(tally.new("abc")) == ["a", "b", "c"]
    tally.begin(-1)
    assert list(tally.new("def")) == []


def test_cases_are_tried_once() -> None:
    """A test tries no case again, and another test has it once more."""
    assert "".join(tally.new("abac")) + "".join(tally.new("cad")) == "abcd"
    tally.begin(math.inf)
    assert list(tally.new("aa")) == ["a"]
