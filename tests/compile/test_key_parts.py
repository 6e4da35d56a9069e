"""Query tiles whose keys several blocks of the Hopper forward share: kernels of those with keys of
their own, or many parts, and of those that put these together."""

from __future__ import annotations

import pytest

from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.runtime import jit
from tests.compile.problems import every_source, plan_for, problems


def test_kernels_that_share_more(request: pytest.FixtureRequest) -> None:
    """None spills a register or draws a ptxas performance warning."""
    step = request.config.getoption("--kernels")
    sources = {
        source.text: (problem, source)
        for problem in problems(FwdSm90)[::step]
        for source in every_source(plan_for(FwdSm90, problem, "sm_90a"))
        if "SharesMore" in source.text
    }
    assert sources
    compiled = jit.compile_kernels([source for _, source in sources.values()], "sm_90a")
    complaints = [
        f"{kernel.spill_stores} bytes spilled, {kernel.warnings}: {problem}"
        for (problem, _), kernel in zip(sources.values(), compiled, strict=True)
        if kernel.spill_stores or kernel.spill_loads or kernel.warnings
    ]
    assert not complaints, "\n".join(complaints)
