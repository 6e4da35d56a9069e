"""Options, Hypothesis profiles, and what a machine without a GPU skips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from dlattn.runtime.target import cuda_device_count
from tests import tally
from tests.calls import Called
from tests.cases import Case
from tests.flash import FlashCase
from tests.kvcache import CacheCase
from tests.mha import Mha
from tests.mha_backward import MhaBackward
from tests.states import States

#: What ``--repro`` takes.
_KINDS = (Case, Called, FlashCase, CacheCase, States, Mha, MhaBackward)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dlattn")
    group.addoption(
        "--examples",
        type=int,
        default=50,
        help="kernels that each random GPU test compiles, most with several calls of each (50)",
    )
    group.addoption(
        "--parts",
        type=int,
        default=1,
        help="into how many tests each random GPU test is divided, for as many workers of "
        "pytest-xdist (1)",
    )
    group.addoption(
        "--seconds",
        type=float,
        default=math.inf,
        help="after which a random GPU test, or a part of it, begins no more cases (never)",
    )
    group.addoption(
        "--kernels",
        type=int,
        default=16,
        help="of how many problems the compile tests take one, others for each architecture; of "
        "those for Hopper's kernels, twice as many; 1 takes all, which takes hours (16)",
    )
    group.addoption("--repro", help='the case of tests/test_repro.py: --repro "Case(...)"')


def pytest_configure(config: pytest.Config) -> None:
    # Importing frameworks and compiling kernels makes first examples slow.
    slow = [HealthCheck.too_slow]
    settings.register_profile("cpu", deadline=None, suppress_health_check=slow)
    examples = config.getoption("--examples")
    settings.register_profile(
        "gpu", settings.get_profile("cpu"), max_examples=examples, phases=[Phase.generate]
    )
    # Of tests that are divided.
    settings.register_profile(
        "gpu part",
        settings.get_profile("gpu"),
        max_examples=-(-examples // config.getoption("--parts")),
    )
    settings.load_profile("cpu")
    config.pluginmanager.register(_ReproducedBy(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and cuda_device_count() == 0:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device that CuPy can use"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parts = metafunc.config.getoption("--parts")
    if parts > 1 and "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(parts))


@pytest.fixture
def part() -> int:
    """Which part of a random test this is; a test that uses this can be divided."""
    return 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    tally.begin(item.config.getoption("--seconds"))
    try:
        return (yield)
    finally:
        counts = tally.take()
        if "part" in getattr(item, "fixturenames", ()):
            item.user_properties.append((item.nodeid.partition("[")[0], counts))


class _ReproducedBy:
    """Prints what reproduces a failing case at once: a long run may be cut off before its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        lines = report.capstdout.splitlines() if report.failed else []
        lines = [line for line in lines if line.startswith("pytest tests/test_repro.py")]
        if terminal is not None and lines:
            terminal.write(f"\n{lines[-1]}\n", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for found in terminalreporter.stats.values() for report in found)
    calls = (report for report in reports if getattr(report, "when", None) == "call")
    for line in tally.summary(found for report in calls for found in report.user_properties):
        terminalreporter.write_line(line)


@pytest.fixture
def repro(request: pytest.FixtureRequest) -> Any:
    """The case given with ``--repro``; without one, the test is skipped."""
    text = request.config.getoption("--repro")
    if text is None:
        pytest.skip("runs with --repro only")
    case = eval(text, {kind.__name__: kind for kind in _KINDS})
    assert isinstance(case, _KINDS), f"--repro takes a Case(...), not {text}"
    return case
