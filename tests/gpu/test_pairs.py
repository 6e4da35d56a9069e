"""Every two features together, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests import pairs
from tests.cases import Case
from tests.drivers import check, gpu_library
from tests.serial import run_by_engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]


def rows() -> Iterator[Any]:
    """Those of each family's own levels."""
    for engine, without in pairs.LEFT_BY.items():
        for n, case in enumerate(pairs.cases(without)):
            yield pytest.param(case, engine, id=f"row {n}-{engine}")


@pytest.mark.parametrize(("case", "engine"), list(rows()))
def test_pair(case: Case, engine: str) -> None:
    """Forward and backward of the kernels agree with float64."""
    check(case, gpu_library(), partial(run_by_engine, engine))
