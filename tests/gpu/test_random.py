"""Random calls through the graph API on a GPU, forward and backward, against the oracle.

``pytest tests/gpu/test_random.py --examples 480 --parts 16 -n 16`` draws more of them, side by
side; ``--seconds 60`` ends each part. Cases do not shrink, because each step could compile kernels;
a failure prints the line that ``--repro`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings

from tests import tally
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph
from tests.few_blocks import run_on_few
from tests.serial import run_by_engine
from tests.strategies import families, for_hopper

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]


#: The best kernels for a case, here or with few blocks, or those of one family where it has some,
#: and what they are given.
RUNS: dict[str, tuple[Callable[..., None], Callable[[Case], Case]]] = {
    "best": (run_graph, lambda case: case),
    "few blocks": (partial(run_on_few, 5), for_hopper),
    "sm90": (partial(run_by_engine, "sm90"), for_hopper),
    "sm80": (partial(run_by_engine, "sm80"), lambda case: case),
}


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("run", RUNS)
@settings(settings.get_profile("gpu part"))
@given(family=families("gpu", size=24, least=12).filter(tally.is_random))
def test_graph(run: str, family: tuple[Case, ...]) -> None:
    """Graphs on the GPU are right for every case, and write nothing but their outputs."""
    by, fitting = RUNS[run]
    for case in tally.new(map(fitting, family)):
        check(case, gpu_library(), by)
