"""Query tiles whose keys several blocks of the Hopper forward share: kernels of those with keys of
their own, or many parts, and of those that put these together."""

from __future__ import annotations

import pytest

from dlattn.plans.fwd_sm90 import FwdSm90
from tests.compile.problems import complaints, problems, sources_of


def test_kernels_that_share_more(request: pytest.FixtureRequest) -> None:
    """None spills a register or draws a ptxas performance warning."""
    step = request.config.getoption("--kernels")
    every = sources_of(FwdSm90, problems(FwdSm90)[::step], "sm_90a")
    sources = {text: it for text, it in every.items() if "SharesMore" in text}
    assert sources
    found = complaints(sources, "sm_90a")
    assert not found, "\n".join(found)
