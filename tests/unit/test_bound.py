"""Plans that are bound to the order of a call's addresses."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlattn.plans import cuda
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import Alibi, Direction, Geometry, Scale
from dlattn.runtime import launch
from tests.cuda_driver import install
from tests.unit.test_ragged_plans import HOPPER, geometry, problem


def built(family: type[CudaPlan], ragged: bool) -> tuple[CudaPlan, Geometry]:
    """A plan with slopes of its own, on the stand-in driver."""
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
    return plan, shape


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", [FwdSm80, FwdSm90, BwdSm80, BwdSm90])
def test_a_bound_call_enqueues_what_execute_does(
    family, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, grids and arguments in the same order, of addresses in any order, call
    after call, on another stream, too; with tables of the plan's own."""
    driver = install(monkeypatch)
    plan, shape = built(family, ragged)
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


@dataclass
class Called:
    """A plan of the first of some devices, while another one is current, and a call of it.

    Attributes:
        enqueue: what stands for the driver's functions.
        switches: to which devices, so far.
    """

    plan: CudaPlan
    call: Callable[[], None]
    enqueue: Callable[[], None] = lambda: None
    switches: list[int] = field(default_factory=list)


@pytest.fixture(params=["bound", "executed"])
def called(request: Any, devices: int, monkeypatch: pytest.MonkeyPatch) -> Called:
    """Of a plan that is bound, or executed."""
    install(monkeypatch)
    monkeypatch.setattr(cuda, "cuda_device_count", lambda: devices)
    plan, shape = built(FwdSm90, False)
    roles = list(shape.tensors)
    addresses = [(1 << 30) + 4096 * at for at in range(len(roles))]
    pointers = dict(zip(roles, addresses, strict=True))
    run = plan.bind({role: (at, 0) for at, role in enumerate(roles)})
    way = {"bound": lambda: run(addresses, 0, 0), "executed": lambda: plan.execute(pointers, 0, 0)}
    made = Called(plan, way[request.param])
    runtime = SimpleNamespace(getDevice=lambda: 1, setDevice=made.switches.append)
    monkeypatch.setattr(launch, "_runtime", lambda: runtime)
    for operation in plan._operations or ():
        operation.function = lambda *arguments: made.enqueue() or 0
    return made


@pytest.mark.parametrize(("devices", "switches"), [(1, []), (2, [0, 1])])
def test_one_thread_calls_at_a_time(called: Called, devices: int, switches: list) -> None:
    """Of one device, none is switched to; and the next thread has its turn after an error, too."""
    done: list[str] = []
    other = Thread(target=called.call)

    def fail() -> None:
        called.enqueue = lambda: done.append("other")
        other.start()
        other.join(0.05)
        assert not done
        raise ZeroDivisionError

    called.enqueue = fail
    with pytest.raises(ZeroDivisionError):
        called.call()
    other.join()
    assert {*done} == {"other"}
    # The second thread's device is made current before it waits.
    assert sorted(called.switches) == sorted(2 * switches)
    assert called.switches[-1:] == switches[-1:]


@pytest.mark.parametrize("devices", [1, 2])
def test_an_interrupted_call_leaves_the_plan_free(called: Called, devices: int) -> None:
    """Wherever in a call a signal comes, the next one, of any thread, need not wait for it."""
    is_armed = False

    def interrupt(*about: object) -> None:
        if is_armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in np.random.default_rng(0).uniform(2e-5, 8e-5, 1000):
            with suppress(KeyboardInterrupt):
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, delay)
                while True:
                    called.call()
            is_armed = False
            assert called.plan._lock.acquire(blocking=False)
            called.plan._lock.release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
