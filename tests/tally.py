"""How long random tests take, and what they did: added up over all processes that they run in, and
printed at the end."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

#: Name -> one number for each time that it was counted, or what was measured.
Counts = dict[str, list[float]]

_counts: defaultdict[str, list[float]] = defaultdict(list)
_deadline = math.inf
_tried: set[Hashable] = set()

_Case = TypeVar("_Case", bound=Hashable)


def is_random(family: Sequence[Any]) -> bool:
    """Whether cases are not the simplest ones, with which Hypothesis would begin each part."""
    return any(case.seed for case in family)


def begin(seconds: float) -> None:
    """A test, which may begin no case after so many seconds."""
    global _deadline
    _deadline = time.monotonic() + seconds
    _tried.clear()


def new(cases: Iterable[_Case]) -> Iterator[_Case]:
    """Those of them that the test has not tried, while there is time: Hypothesis varies what it
    drew before, and two of three cases are ones that it had."""
    for case in cases:
        if time.monotonic() > _deadline:
            return
        if case not in _tried:
            _tried.add(case)
            yield case


def count(name: str) -> None:
    """One more of what has this name."""
    _counts[name].append(1)


def measure(name: str, value: float) -> None:
    """One more number of those with this name."""
    _counts[f"{name}:"].append(value)


def take() -> Counts:
    """All since this was called last."""
    taken = dict(_counts)
    _counts.clear()
    return taken


def summary(tests: Iterable[tuple[str, Counts]]) -> Iterator[str]:
    """A line for each test, by its name: how often what was counted; of measurements the tenths and
    the largest."""
    added: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for test, counts in tests:
        for name, values in counts.items():
            added[test][name] += values
    for test, by_name in sorted(added.items()):
        parts = (_told(name, values) for name, values in sorted(by_name.items()))
        yield f"{test}: {', '.join(parts)}"


def _told(name: str, values: list[float]) -> str:
    if not name.endswith(":"):
        return f"{len(values)} {name}"
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    told = " ".join(f"{x:.2f}" for x in (*tenths, max(values)))
    return f"{len(values)} {name} {told}"
