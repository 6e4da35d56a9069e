"""Every two features together, on a GPU."""

from __future__ import annotations

import pytest

from tests import pairs
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", pairs.cases(), ids=repr)
def test_pair(case: Case) -> None:
    """Forward and backward of the kernels agree with float64."""
    check(case, gpu_library(), run_graph)
