"""Options, markers and Hypothesis profiles of every test."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from dlattn.runtime.target import cuda_device_count
from tests.strategies import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dlattn")
    group.addoption("--examples", type=int, help="examples of each random GPU test (50)")
    group.addoption("--repro", help='run one case: --repro "Case(...)"')


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    settings.register_profile(
        "dlattn",
        deadline=None,
        # Cases are drawn from dozens of small choices, and the first draw of a run is the slowest.
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("dlattn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and cuda_device_count() == 0:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device that CuPy can use"))


@pytest.fixture
def repro(request: pytest.FixtureRequest) -> Case:
    """The case given with ``--repro``; without one, the test is skipped."""
    text = request.config.getoption("--repro")
    if text is None:
        pytest.skip("runs with --repro only")
    case = eval(text, {"Case": Case})
    assert isinstance(case, Case), f"--repro takes a Case(...), not {text}"
    return case
