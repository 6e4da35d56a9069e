"""Random calls through the graph API on a GPU, forward and backward, against the oracle.

``pytest tests/gpu/test_random.py --examples 500`` draws more of them. Cases do not shrink, because
each step could compile kernels; a failure prints the line that ``--repro`` takes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph
from tests.strategies import families

pytestmark = pytest.mark.gpu


@settings(settings.get_profile("gpu"))
@given(families("gpu", size=6))
def test_graph(family: tuple[Case, ...]) -> None:
    """Graphs on the GPU are right for every case, and write nothing but their outputs."""
    for case in family:
        check(case, gpu_library(), run_graph)
