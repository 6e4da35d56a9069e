"""One case, given on the command line: ``pytest tests/test_repro.py --repro "Case(...)"``."""

from __future__ import annotations

import pytest

from tests import flash_check
from tests.callers import Caller, gpu_callers
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph
from tests.flash import FlashCase
from tests.libraries import Library


def test_on_cpu(repro: Case | FlashCase) -> None:
    """The case is right on the CPU."""
    if isinstance(repro, FlashCase):
        flash_check.check(repro, Caller("numpy"))
    else:
        check(repro, Library(), run_graph)


@pytest.mark.gpu
def test_on_gpu(repro: Case | FlashCase) -> None:
    """The case is right on the GPU."""
    if isinstance(repro, FlashCase):
        for caller in gpu_callers():
            flash_check.check(repro, caller)
    else:
        check(repro, gpu_library(), run_graph)
