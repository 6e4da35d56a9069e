"""Which plans attend to a cache on GPUs that are not here."""

from __future__ import annotations

import pytest

from dlattn.calls import call
from dlattn.calls.request import Request
from dlattn.flash import caches, kvcache
from dlattn.plans.base import Plan
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.select import select
from dlattn.runtime.target import KNOWN, Target
from tests.callers import Caller
from tests.kvcache import SMALL, check_cache


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Those that calls are given."""
    made: list[Plan] = []

    def built(request: Request, target: Target) -> Plan:
        made.append(call.built(request, target))
        return made[-1]

    monkeypatch.setattr(kvcache, "built", built)
    return made


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("arch", KNOWN)
def test_every_cache_has_a_plan(name: str, arch: str, plans: list[Plan]) -> None:
    """Every cache is reduced to what CUDA plans take; on Hopper its own, where rows are aligned."""
    kvcache._calls.clear()
    check_cache(SMALL[name], Caller("numpy"))
    (plan,) = plans
    chosen = select(plan.problem, plan.geometry, KNOWN[arch])[0]
    assert issubclass(chosen, CudaPlan)
    if arch == "sm_90a":
        assert (chosen is FwdSm80) == (name == "element-wise access")


def test_the_copy_engine_does_not_reach_all_of_a_huge_cache(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that begin anywhere in it."""
    monkeypatch.setattr(caches, "MOST_RAGGED_ELEMENTS", 100)
    for case in SMALL.values():
        kvcache._calls.clear()
        check_cache(case, Caller("numpy"))
    kvcache._calls.clear()
    ragged = [it for it in plans if it.problem.paged_k is False and it.geometry.is_ragged("k")]
    assert ragged
    for it in ragged:
        assert FwdSm90.supports(it.problem, it.geometry, KNOWN["sm_90a"]) is not None
