"""Random calls through the graph API on a GPU, forward and backward, against the oracle.

``pytest tests/gpu/test_random.py --examples 480 --parts 16 -n 16`` draws more of them, side by
side. Cases do not shrink, because each step could compile kernels; a failure prints the line that
``--repro`` takes.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings

import dlattn as cudnn
from tests.cases import Case
from tests.drivers import Ready, Roles, Tensors, built, check, gpu_library, run_graph
from tests.strategies import families

pytestmark = pytest.mark.gpu


def built_by(engine: str, case: Case, tensors: Tensors, roles: Roles) -> Ready:
    """The graph of a case for kernels of one family, where it has one for this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLATTN_ENGINE", engine)
        try:
            return built(case, tensors, roles)
        except cudnn.cudnnGraphNotSupportedError as refusal:
            if "DLATTN_ENGINE" not in str(refusal):
                raise
    return built(case, tensors, roles)


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("engine", ["any", "sm90", "sm80"])
@settings(settings.get_profile("gpu"))
@given(family=families("gpu", size=12, least=4))
def test_graph(engine: str, family: tuple[Case, ...]) -> None:
    """Graphs on the GPU are right for every case, and write nothing but their outputs."""
    source = built if engine == "any" else partial(built_by, engine)
    for case in family:
        check(case, gpu_library(), partial(run_graph, source=source))
