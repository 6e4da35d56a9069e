"""Plans that are bound to the order of a call's addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import Alibi, Direction, Scale
from tests.cuda_driver import install
from tests.unit.test_ragged_plans import HOPPER, geometry, problem


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", [FwdSm80, FwdSm90, BwdSm80, BwdSm90])
def test_a_bound_call_enqueues_what_execute_does(
    family, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, grids and arguments in the same order, of addresses in any order, call
    after call, on another stream, too; with tables of the plan's own."""
    driver = install(monkeypatch)
    direction = Direction.FORWARD if family in (FwdSm80, FwdSm90) else Direction.BACKWARD
    wanted = replace(problem(direction), edits=(Scale(), Alibi(symmetric=False)))
    shape = geometry(direction)
    if not ragged:
        roles = {
            role: replace(spec, ragged=False)
            for role, spec in shape.tensors.items()
            if "offset" not in role
        }
        wanted, shape = replace(wanted, ragged=False), replace(shape, tensors=roles)
    plan = family(wanted, shape, HOPPER)
    plan.build()
    backwards = list(reversed(list(shape.tensors)))
    run = plan.bind({role: (at, 64) for at, role in enumerate(backwards)})
    for stream in (0, 0, 7):
        addresses = [(1 << 30) + 4096 * (at + 100 * stream) for at in range(len(backwards))]
        workspace = 1 << 40 if plan.workspace_size else 0
        calls = []
        for call in (
            lambda a=addresses, w=workspace, s=stream: run(a, w, s),
            lambda a=addresses, w=workspace, s=stream: plan.execute(
                {role: at + 64 for role, at in zip(backwards, a, strict=True)}, w, s
            ),
        ):
            driver.done.clear()
            driver.streams.clear()
            call()
            calls.append((list(driver.done), list(driver.streams)))
        assert calls[0] == calls[1] and calls[0][0]
