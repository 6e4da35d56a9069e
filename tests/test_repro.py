"""One case, given on the command line: ``pytest tests/test_repro.py --repro "Case(...)"``."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph
from tests.libraries import Library


def test_on_cpu(repro: Case) -> None:
    """The case is right on the CPU."""
    check(repro, Library(), run_graph)


@pytest.mark.gpu
def test_on_gpu(repro: Case) -> None:
    """The case is right on the GPU."""
    check(repro, gpu_library(), run_graph)
