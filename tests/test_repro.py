"""One case, given on the command line: ``pytest tests/test_repro.py --repro "Case(...)"``."""

from __future__ import annotations

from typing import Any

import pytest

from tests import flash_check
from tests.callers import Caller, gpu_callers
from tests.calls import Called, check_attention
from tests.drivers import check, gpu_library, run_graph
from tests.flash import FlashCase
from tests.kvcache import CacheCase, check_cache
from tests.libraries import Library
from tests.mha import Mha
from tests.mha_backward import MhaBackward, check_backward
from tests.mha_checks import check_mha
from tests.states import States, check_states


def test_on_cpu(repro: Any) -> None:
    """The case is right on the CPU."""
    check_any(repro, Library(), [Caller("numpy")])


@pytest.mark.gpu
def test_on_gpu(repro: Any) -> None:
    """The case is right on the GPU."""
    check_any(repro, gpu_library(), gpu_callers())


def check_any(repro: Any, library: Library, callers: list[Caller]) -> None:
    """Checks a case of any kind."""
    if isinstance(repro, (FlashCase, CacheCase)):
        for caller in callers:
            if isinstance(repro, FlashCase):
                flash_check.check(repro, caller)
            else:
                check_cache(repro, caller)
    elif isinstance(repro, Mha):
        for caller in callers:
            check_mha(repro, caller)
    elif isinstance(repro, MhaBackward):
        for caller in callers:
            check_backward(repro, caller)
    elif isinstance(repro, States):
        check_states(repro, library)
    elif isinstance(repro, Called):
        check_attention(repro.case, library)
    else:
        check(repro, library, run_graph)
