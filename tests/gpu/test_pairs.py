"""Every two features together, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest

from tests import pairs
from tests.cases import Case
from tests.drivers import check, gpu_library
from tests.serial import run_by_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", ["sm90", "sm80"])
@pytest.mark.parametrize("case", pairs.cases(), ids=[f"row {n}" for n in range(len(pairs.rows()))])
def test_pair(case: Case, engine: str) -> None:
    """Forward and backward of the kernels agree with float64."""
    check(case, gpu_library(), partial(run_by_engine, engine))
