"""``populate_cuda_graph`` and ``update_cuda_graph`` of graphs for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import placement
from dlattn.runtime.target import CPU, KNOWN, Target
from tests.cuda_driver import Driver, install

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


class Call:
    """A forward graph with lengths on the device and a scale in host memory, and a handle with a
    stream."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "default_target", lambda: target)
        self.graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT)
        q, k, v = (self.graph.tensor((2, 4, 100, 64), uid=uid) for uid in (1, 2, 3))
        seq_len_q, seq_len_kv = (
            self.graph.tensor((2, 1, 1, 1), data_type=cudnn.data_type.INT32, uid=uid)
            for uid in (4, 5)
        )
        scale = self.graph.tensor((1,) * 4, data_type=FLOAT, is_pass_by_value=True, uid=6)
        lengths = {"use_padding_mask": True, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
        o, _ = self.graph.sdpa(q, k, v, attn_scale=scale, **lengths, generate_stats=False)
        o.set_output(True).set_uid(7)
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, 99)
        self.graph.build()

    def pack(self, number: int) -> dict[int, Any]:
        return {**{uid: (number << 32) + (uid << 20) for uid in (1, 2, 3, 4, 5, 7)}, 6: number / 8}


@pytest.fixture
def call(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(KNOWN["sm_90a"], monkeypatch)


def test_graph(driver: Driver, call: Call) -> None:
    """``populate_cuda_graph`` and ``update_cuda_graph`` give nodes what ``execute`` enqueues:
    numbers are read from host memory, and no stream is touched."""
    populated = driver.create()
    arguments = [(call.pack(1), 1 << 30), (call.pack(2), 1 << 31)]
    change = (call.graph.populate_cuda_graph, call.graph.update_cuda_graph)
    for (pack, workspace), to_graph in zip(arguments, change, strict=True):
        call.graph.execute(pack, workspace, call.handle)
        assert {*driver.streams} == {99}
        enqueued = [*driver.done]
        driver.done.clear()
        to_graph(call.handle, pack, workspace, populated)
        assert driver.done == []
        assert driver.line(populated) == enqueued
        assert [it[0] for it in enqueued] == ["kernel"]
        assert np.float32(pack[6]).tobytes() in enqueued[0][-1]


def test_graph_handles_and_addresses(driver: Driver, call: Call) -> None:
    """Handles are optional and must exist; CUDA graphs are numbers, or become them."""
    populated = driver.create()
    with pytest.raises(RuntimeError, match="Handle -1 is unknown"):
        call.graph.populate_cuda_graph(-1, call.pack(1), 1 << 30, populated)
    with pytest.raises(RuntimeError, match="expected a cudaGraph_t as an int, got object; pass"):
        call.graph.populate_cuda_graph(None, call.pack(1), 1 << 30, object())
    with pytest.raises(ValueError, match="missing from the variant pack"):
        call.graph.populate_cuda_graph(None, {1: 1 << 20}, 1 << 30, populated)
    with pytest.raises(ValueError, match="workspace: expected"):
        call.graph.populate_cuda_graph(None, call.pack(1), 0, populated)
    assert driver.graphs[populated] == {}
    call.graph.populate_cuda_graph(None, call.pack(1), 1 << 30, np.int64(populated))
    assert len(driver.line(populated)) == 1


def test_graph_without_a_plan(driver: Driver) -> None:
    """There is nothing to add before a plan is built."""
    graph = cudnn.pygraph()
    for call, purpose in ((graph.populate_cuda_graph, "populate"), (graph.update_cuda_graph, "up")):
        with pytest.raises(RuntimeError, match=f"has no built plan to {purpose}"):
            call(None, {}, 0, driver.create())


def test_graphs_of_the_cpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference engine adds no nodes, and has no note that says it does."""
    note = cudnn.behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API
    graph = Call(CPU, monkeypatch).graph
    assert note not in graph.get_behavior_notes()
    memory = {uid: np.zeros((2, 4, 100, 64), np.float16) for uid in (1, 2, 3, 7)}
    memory |= {uid: np.full((2, 1, 1, 1), 100, np.int32) for uid in (4, 5)}
    for call in (graph.populate_cuda_graph, graph.update_cuda_graph):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="reference on cpu has nothing"):
            call(None, {**memory, 6: 0.5}, None, driver.create())


def test_the_note(call: Call) -> None:
    """Every CUDA plan says that it can be added to a CUDA graph."""
    note = cudnn.behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API
    assert call.graph.get_behavior_notes() == [cudnn.behavior_note.RUNTIME_COMPILATION, note]
    count = call.graph.get_execution_plan_count()
    call.graph.select_behavior_notes([note])
    assert call.graph.get_execution_plan_count() == count > 1
    assert note in call.graph.get_behavior_notes()
