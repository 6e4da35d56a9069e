"""``autotune``: which plans are timed, which one runs afterwards, and what is remembered."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import autotune, placement
from dlattn.plans.base import Plan
from dlattn.runtime.target import KNOWN
from tests.cuda_driver import Driver, install
from tests.plans import put_plans

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
AUTOTUNED = cudnn.heur_mode.AUTOTUNED
DIM = (2, 4, 8, 16)


class Tiling:
    """A way to divide no work."""

    def __init__(self, cpp):
        self.cpp = cpp


def plan_of(plan_name, *seconds, nbytes=0):
    """A plan that sleeps for so long in each of its tilings."""

    class Sleeping(Plan):
        name = plan_name
        workspace_size = nbytes
        calls = 0
        tilings = tuple(map(Tiling, map(str, range(len(seconds)))))

        def __init__(self, problem, geometry, target, tiling=None):
            super().__init__(problem, geometry, target)
            self.tiling = tiling or self.tilings[0]

        @classmethod
        def supports(cls, problem, geometry, target):
            return None

        @classmethod
        def choices(cls, problem, geometry, target):
            return cls.tilings if len(seconds) > 1 else ()

        def build(self): ...

        def execute(self, pointers, workspace, stream):
            type(self).calls += 1
            time.sleep(seconds[int(self.tiling.cpp)])

    return Sleeping


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def plans(monkeypatch, folder):
    """``slow`` is ranked before ``fast``, whose second tiling is the fastest."""
    made = plan_of("slow", 0.02), plan_of("fast", 0.01, 0.0, nbytes=64)
    put_plans(monkeypatch, *made)
    return made


def declared(dim=DIM, name="q", heuristics=None):
    """A built graph, and a pack."""
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    tensors = [graph.tensor(dim, name=it) for it in (name, "k", "v")]
    o, _ = graph.sdpa(*tensors, generate_stats=False)
    o.set_output(True)
    graph.build(heuristics)
    return graph, {t: np.zeros(dim, np.float16) for t in (*tensors, o)}


def aligned(nbytes):
    memory = np.empty(nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes]


def first_name(**options):
    return declared(**options)[0].get_plan_name_at_index(0)


def remembered(folder):
    return [json.loads((it / "kernel.json").read_text()) for it in folder.glob("autotune-*")]


# What is timed ------------------------------------------------------------------------------------


def test_filters_may_leave_nothing_to_tune(plans):
    """Where filters have left no plan, both calls say so in the words of ``check_support``."""
    graph, pack = declared()
    graph.deselect_engines(["slow", "fast"])
    for call in (graph.get_autotune_workspace_size, lambda: graph.autotune(pack, aligned(64))):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="No execution plans support"):
            call()


def test_the_fastest_runs(plans):
    """Every tiling of every plan is timed, and the fastest is the one that runs."""
    graph, pack = declared()
    assert graph.get_workspace_size() == 0
    assert graph.get_autotune_workspace_size() == 64
    times = graph.autotune(pack, aligned(64), rounds=2)
    assert [name for name, _ in times] == ["fast#1", "fast", "slow"]
    assert all(us >= least for (_, us), least in zip(times, (0, 1e4, 2e4), strict=True))
    assert graph.get_workspace_size() == 64
    count = plans[1].calls
    graph.execute(pack, aligned(64))
    assert plans[1].calls == count + 1
    assert graph.get_execution_plan_count() == 3
    assert graph.autotune(pack, aligned(64), rounds=1)[0][0] == "fast#1"
    assert graph.get_execution_plan_count() == 3


def test_only_what_is_left_is_timed(plans, folder):
    """Neither what a filter drops nor engines that were not asked for; then, nothing is
    remembered."""
    graph, pack = declared()
    graph.deselect_workspace_greater_than(0)
    assert [name for name, _ in graph.autotune(pack)] == ["slow"]
    graph, pack = declared()
    graph.create_execution_plans()
    graph.deselect_engines(["fast#1"])
    assert [name for name, _ in graph.autotune(pack, aligned(64))] == ["fast", "slow"]
    graph.create_execution_plan(0)
    times = graph.autotune(pack, aligned(64))
    assert [name for name, _ in times] == ["fast", "slow", "slow"]
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    q = graph.tensor(DIM)
    o, _ = graph.sdpa(q, q, q, generate_stats=False)
    o.set_output(True)
    graph.create_execution_plan(1)
    pack = {t: np.zeros(DIM, np.float16) for t in (q, o)}
    assert [name for name, _ in graph.autotune(pack, aligned(64))] == ["fast#1", "fast"]
    assert remembered(folder) == []


def test_a_bad_call_changes_nothing(plans, folder):
    """What ran before still does, and nothing is remembered."""
    graph, pack = declared()
    with pytest.raises(ValueError, match="workspace: expected 64"):
        graph.autotune(pack, None)
    with pytest.raises(ValueError, match="missing from the variant pack"):
        graph.autotune({}, aligned(64))
    with pytest.raises(RuntimeError, match="rounds: expected at least 1, got 0"):
        graph.autotune(pack, aligned(64), rounds=0)
    assert graph.get_workspace_size() == 0
    assert remembered(folder) == []


def test_the_reference_engine(folder):
    """On the CPU there is one plan, which is timed and runs, and nothing to remember."""
    graph, pack = declared()
    ((name, microseconds),) = graph.autotune(pack)
    assert name == "reference" and microseconds > 0
    graph.execute(pack)
    assert remembered(folder) == []


# What is remembered -------------------------------------------------------------------------------


def test_remembered_when_asked(plans, folder):
    """A later graph of the same problem, whatever its names, has the best first if it asks for it
    by heuristic, and never else; graphs of other shapes do not."""
    assert first_name(heuristics=[AUTOTUNED]) == "slow"
    graph, pack = declared()
    graph.autotune(pack, aligned(64), rounds=1)
    assert first_name() == "slow"
    assert first_name(heuristics=[cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]) == "slow"
    asking, _ = declared(name="other", heuristics=[AUTOTUNED, cudnn.heur_mode.A])
    names = [asking.get_plan_name_at_index(i) for i in range(asking.get_execution_plan_count())]
    assert names == ["fast#1", "slow", "fast"]
    assert asking.get_workspace_size() == 64
    assert first_name(dim=(2, 4, 16, 16), heuristics=[AUTOTUNED]) == "slow"
    (facts,) = remembered(folder)
    assert (facts["plan"], facts["tiling"], facts["device"]) == ("fast", "1", "cpu")
    assert list(facts["microseconds"]) == ["fast#1", "fast", "slow"]


def test_the_newest_is_remembered(plans, folder, monkeypatch):
    """Timing again replaces what was remembered."""
    graph, pack = declared()
    graph.autotune(pack, aligned(64), rounds=1)
    monkeypatch.setattr(autotune, "_on_host", lambda *_: [1.0, 2.0, 3.0])
    assert [name for name, _ in graph.autotune(pack, aligned(64))] == ["slow", "fast", "fast#1"]
    assert first_name(heuristics=[AUTOTUNED]) == "slow"
    assert [facts["plan"] for facts in remembered(folder)] == ["slow"]


@pytest.mark.parametrize("change", ["damage", "kernels", "plans", "device"])
def test_forgotten(plans, folder, monkeypatch, change):
    """A damaged entry, other kernels, other plans, or another device: then, nothing is known."""
    graph, pack = declared()
    graph.autotune(pack, aligned(64), rounds=1)
    if change == "damage":
        (entry,) = folder.glob("autotune-*/kernel.json")
        entry.write_text(entry.read_text().replace("fast", "slow"))
    elif change == "kernels":
        monkeypatch.setattr(autotune.jit, "headers_digest", lambda: "others")
    elif change == "plans":
        monkeypatch.setattr(plans[1], "tilings", tuple(map(Tiling, "201")))
    else:
        monkeypatch.setattr(autotune, "device_name", lambda target: "another")
    assert first_name(heuristics=[AUTOTUNED]) == "slow"


def test_filters_hold_for_what_is_remembered(plans):
    """A filter drops it as any other plan."""
    graph, pack = declared()
    graph.autotune(pack, aligned(64), rounds=1)
    graph.deselect_engines(["fast"])
    graph.create_execution_plans([AUTOTUNED])
    assert graph.get_plan_name_at_index(0) == "slow" and graph.get_execution_plan_count() == 1


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch, folder) -> Driver:
    """A machine with a Hopper GPU whose driver is a stand-in."""
    monkeypatch.setattr(placement, "default_target", lambda: KNOWN["sm_90a"])
    monkeypatch.setattr(autotune, "device_name", lambda target: "NVIDIA H200")
    return install(monkeypatch)


def on_gpu(heuristics=None):
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT)
    q, k, v = (graph.tensor((2, 4, 300, 64), uid=uid) for uid in (1, 2, 3))
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True).set_uid(4)
    graph.build(heuristics)
    return graph


def test_by_replay(driver):
    """Calls back to back in a CUDA graph are timed between events; nothing is left behind."""
    graph = on_gpu()
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, 99)
    pack = {uid: uid << 20 for uid in (1, 2, 3, 4)}
    size = graph.get_autotune_workspace_size()
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    assert names == ["fwd_sm90", "fwd_sm80", "fwd_sm90#1", "fwd_sm90#2"]
    # Functions count from 16, in the order in which plans are built.
    driver.microseconds = {16: 300.0, 32: 50.0, 48: 2.0, 64: 9.0}
    times = graph.autotune(pack, 1 << 30 if size else None, handle)
    assert [(name, round(us)) for name, us in times] == [
        ("fwd_sm90#1", 2),
        ("fwd_sm90#2", 9),
        ("fwd_sm80", 50),
        ("fwd_sm90", 300),
    ]
    assert driver.streams[:3] == [99] * 3, "a call of each, on the caller's stream"
    assert driver.graphs == driver.objects == {}
    kernels = [it[1] for it in driver.done]
    # One call, three timings of one, and five of as many as take a millisecond, at most twenty.
    assert [kernels.count(function) for function in (16, 32, 48)] == [24, 104, 104]
    driver.done.clear()
    graph.execute(pack, 1 << 30, handle)
    assert [it[1] for it in driver.done] == [48]
    assert on_gpu([AUTOTUNED]).get_plan_name_at_index(0) == "fwd_sm90#1"


def test_knobs(driver):
    """``KERNEL_CFG`` counts the tilings of an engine, of which 0 is its own choice."""
    graph = on_gpu()
    (knob,) = graph.get_knobs_for_engine(0)
    assert (knob.type, knob.min_value, knob.max_value) == (cudnn.knob_type.KERNEL_CFG, 0, 2)
    assert isinstance(knob, cudnn.knob) and knob.stride == 1
    assert graph.get_knobs_for_engine(1) == []
    for setting in range(knob.min_value, knob.max_value + 1, knob.stride):
        graph.create_execution_plan(0, {knob.type: setting})
    count = graph.get_execution_plan_count()
    names = [graph.get_plan_name_at_index(i) for i in range(count)]
    assert names == ["fwd_sm90", "fwd_sm80", "fwd_sm90", "fwd_sm90#1", "fwd_sm90#2"]
    pack = {uid: uid << 20 for uid in (1, 2, 3, 4)}
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, 99)
    for index in (2, 3):
        graph.build_plan_at_index(index)
        graph.execute_plan_at_index(pack, None, index, handle)
    first, second = driver.done
    assert first[1] != second[1]
    for engine, knobs in (
        (0, {knob.type: 3}),
        (0, {cudnn.knob_type.TILE_M: 0}),
        (1, {knob.type: 0}),
    ):
        with pytest.raises(
            cudnn.cudnnGraphNotSupportedError, match=r"\(fwd_sm.0\) cannot set knob"
        ):
            graph.create_execution_plan(engine, knobs)
    for call in (graph.get_knobs_for_engine, graph.create_execution_plan):
        with pytest.raises(RuntimeError, match="There is no engine 2; 2 can run this graph"):
            call(2)
