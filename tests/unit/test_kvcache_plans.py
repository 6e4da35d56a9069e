"""Which plans attend to a cache on GPUs that are not here."""

from __future__ import annotations

import pytest

from dlattn.calls import call
from dlattn.calls.request import Request
from dlattn.flash import kvcache
from dlattn.plans.base import Plan
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.select import select
from dlattn.runtime.target import KNOWN, Target
from tests.callers import Caller
from tests.kvcache import SMALL, check_cache


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("arch", KNOWN)
def test_every_cache_has_a_plan(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache is reduced to what CUDA plans take; on Hopper its own, where rows are aligned."""
    plans: list[Plan] = []

    def built(request: Request, target: Target) -> Plan:
        plans.append(call.built(request, target))
        return plans[-1]

    monkeypatch.setattr(kvcache, "built", built)
    kvcache._calls.clear()
    check_cache(SMALL[name], Caller("numpy"))
    (plan,) = plans
    chosen = select(plan.problem, plan.geometry, KNOWN[arch])[0]
    assert issubclass(chosen, CudaPlan)
    if arch == "sm_90a":
        assert (chosen is FwdSm80) == (name == "element-wise access")
