"""From ``validate`` to ``build``: order, filters, plans by index, keys."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.plans.base import Plan
from tests.plans import put_plans

HALF = cudnn.data_type.HALF
DIM = (2, 4, 8, 16)


def recording_plan(plan_name, nbytes):
    """A plan class that counts builds and keeps what it was executed with."""

    class Recording(Plan):
        name = plan_name
        workspace_size = nbytes
        builds = 0

        @classmethod
        def supports(cls, problem, geometry, target):
            return None

        def build(self):
            type(self).builds += 1

        def execute(self, pointers, workspace, stream):
            type(self).last = (dict(pointers), workspace, stream)

    return Recording


@pytest.fixture
def plans(monkeypatch):
    """Two plans that run everything: ``big`` is better and needs 1024 bytes, ``small`` none."""
    made = recording_plan("big", 1024), recording_plan("small", 0)
    put_plans(monkeypatch, *made)
    return made


def declared(**uids):
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    tensors = [graph.tensor(DIM, name=name, uid=uids.get(name, -1)) for name in "qkv"]
    o, _ = graph.sdpa(*tensors, generate_stats=False, name="sdpa")
    o.set_output(True)
    return graph, [*tensors, o]


def aligned_bytes(nbytes):
    memory = np.empty(nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + nbytes]


def pack_of(tensors):
    return {t: np.zeros(DIM, np.float16) for t in tensors}


def test_steps_one_by_one(plans):
    """The five steps of cuDNN's programs end in a graph that executes its best plan."""
    graph, tensors = declared()
    graph.validate()
    graph.build_operation_graph()
    assert graph.get_execution_plan_count() == 0
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    assert graph.get_execution_plan_count() == 2
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    graph.execute(pack_of(tensors), aligned_bytes(1024))
    assert [plan.builds for plan in plans] == [1, 0]
    assert set(plans[0].last[0]) == {"q", "k", "v", "o"}


def test_build_takes_every_step(plans):
    """``build`` alone, with or without heuristics, is enough."""
    for arguments in ((), ([cudnn.heur_mode.A],)):
        graph, _ = declared()
        graph.build(*arguments)
        assert graph.get_execution_plan_count() == 2
    assert [plan.builds for plan in plans] == [2, 0]


def test_all_policy_builds_every_plan(plans):
    """With ``ALL`` each plan can be executed by its index; the best stays the default."""
    graph, tensors = declared()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.build_plans(cudnn.build_plan_policy.ALL)
    assert [plan.builds for plan in plans] == [1, 1]
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    assert names == ["big", "small"]
    assert graph.get_workspace_size() == 1024
    graph.execute_plan_at_index(pack_of(tensors), None, 1)
    assert plans[1].last[1] == 0 and not hasattr(plans[0], "last")


def test_plans_by_index(plans):
    """A plan built by index is the one that ``execute`` runs and whose workspace is asked for."""
    graph, tensors = declared()
    graph.create_execution_plans([cudnn.heur_mode.A])
    assert graph.get_workspace_size_plan_at_index(0) == 1024
    graph.build_plan_at_index(1)
    assert graph.get_workspace_size() == 0
    graph.execute(pack_of(tensors))
    assert hasattr(plans[1], "last")
    with pytest.raises(RuntimeError, match="Plan 0 is not built"):
        graph.execute_plan_at_index(pack_of(tensors), None, 0)
    with pytest.raises(RuntimeError, match="There is no plan 2; the graph has 2"):
        graph.build_plan_at_index(2)


def test_engines_by_number(plans):
    """``create_execution_plan`` adds engines one by one, in the order asked for."""
    graph, _ = declared()
    assert graph.get_engine_count() == 2
    assert graph.get_knobs_for_engine(0) == []
    graph.create_execution_plan(1, {})
    graph.create_execution_plan(0)
    assert [graph.get_plan_name_at_index(i) for i in (0, 1)] == ["small", "big"]
    with pytest.raises(RuntimeError, match="There is no engine 2"):
        graph.create_execution_plan(2)
    with pytest.raises(
        cudnn.cudnnGraphNotSupportedError,
        match="cannot set knob_type.TILE_M to 64; it has the knobs none",
    ):
        graph.create_execution_plan(0, {cudnn.knob_type.TILE_M: 64})


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "keep_small",
    [
        lambda graph: graph.deselect_workspace_greater_than(1000),
        lambda graph: graph.deselect_engines(["big"]),
    ],
)
def test_filters(plans, keep_small, early):
    """Filters hold whether they come before or after the plans are created."""
    graph, _ = declared()
    if early:
        keep_small(graph)
    graph.create_execution_plans([cudnn.heur_mode.A])
    if not early:
        keep_small(graph)
    graph.build_plans()
    assert graph.get_plan_name_at_index(0) == "small" and graph.get_execution_plan_count() == 1


def test_filters_that_leave_nothing(plans):
    """When nothing is left, check_support and build_plans say so."""
    graph, _ = declared()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.deselect_engines(["big", "small"])
    for step in (graph.check_support, graph.build_plans, graph.get_workspace_size):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="No execution plans support"):
            step()


def test_cpu_plans_have_no_notes(plans):
    """Nothing is compiled for the CPU, so selecting that note leaves nothing."""
    graph, _ = declared()
    assert graph.get_behavior_notes() == []
    graph.select_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        graph.check_support()


def test_heuristics_must_be_heuristics(plans):
    """A name instead of a member, or no sequence, such as an array without axes, is a TypeError."""
    graph, _ = declared()
    for wrong in (["A"], "A", 1, np.array(1), cudnn.heur_mode.A):
        with pytest.raises(TypeError, match=r"heuristics must be a sequence of dlattn.heur_mode"):
            graph.create_execution_plans(wrong)


def test_the_engine_of_the_environment(plans, monkeypatch):
    """``DLATTN_ENGINE`` leaves one plan, and a name that none has is told those that they have."""
    monkeypatch.setenv("DLATTN_ENGINE", "small")
    graph, _ = declared()
    graph.build()
    assert graph.get_plan_name_at_index(0) == "small"
    monkeypatch.setenv("DLATTN_ENGINE", "other")
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="'other', .* big, small, or"):
        declared()[0].validate()


# Uids ---------------------------------------------------------------------------------------------


def test_uids_are_assigned_around_the_users(plans):
    """Unset uids count from 1 past those in use, once the operation graph is built; 0 is legal."""
    graph, tensors = declared(q=2, k=0)
    assert [t.get_uid() for t in tensors] == [2, 0, 0, 0]
    graph.build_operation_graph()
    assert [t.get_uid() for t in tensors] == [2, 0, 1, 3]


def test_tensors_made_elsewhere_get_uids_too(plans):
    """A tensor made by ``tensor()`` or by another graph is adopted by the graph that uses it."""
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    alone = cudnn.tensor().set_name("alone").set_dim(DIM).set_stride((512, 128, 16, 1))
    foreign = cudnn.pygraph().tensor(DIM, name="foreign")
    own = graph.tensor(DIM, name="own")
    o, _ = graph.sdpa(alone, foreign, own, generate_stats=False)
    o.set_output(True)
    graph.build()
    uids = [t.get_uid() for t in (alone, foreign, own, o)]
    assert sorted(uids) == [1, 2, 3, 4]
    graph.execute(pack_of([alone, foreign, own, o]), aligned_bytes(1024))


def test_attributes_by_uid(plans):
    """A uid gives a copy of its tensor, and an unknown one is an error."""
    graph, _ = declared(q=7)
    copied = graph.query_tensor_attributes_of_uid(7)
    assert copied.get_name() == "q"
    with pytest.raises(RuntimeError, match="No tensor .* has uid 8"):
        graph.query_tensor_attributes_of_uid(8)


def test_a_built_graph_is_frozen(plans):
    """Changes that would come too late are refused instead of ignored."""
    graph, (q, *_) = declared()
    graph.validate()
    q.set_name("queries")
    graph.build_operation_graph()
    with pytest.raises(
        ValueError, match="Cannot set the dim of tensor 'queries': its graph is built"
    ):
        q.set_dim((1, 1, 1, 1))
    with pytest.raises(ValueError, match="is built, so sdpa cannot be added"):
        graph.sdpa(q, q, q, generate_stats=False)


# Keys ---------------------------------------------------------------------------------------------


def key(dim=DIM, stride=None, name="q", uid=-1, scale=0.5, **arguments):
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    q = graph.tensor(dim, stride, name=name, uid=uid)
    o, _ = graph.sdpa(q, q, q, attn_scale=scale, generate_stats=False, **arguments)
    o.set_output(True)
    return graph.key()


def test_keys_of_equal_graphs_are_equal():
    """Names do not count; the key is a plain int that does not change when the graph is built."""
    assert key() == key() == key(name="other") and isinstance(key(), int)
    graph, _ = declared()
    before = graph.key()
    graph.build()
    assert graph.key() == before


def test_keys_tell_graphs_apart():
    """Whatever changes execution changes the key."""
    keys = [
        key(),
        key(dim=(2, 4, 9, 16)),
        key(stride=(512, 16, 64, 1)),
        key(scale=0.25),
        key(uid=3),
        key(use_causal_mask=True),
        key(diagonal_band_right_bound=1),
        key(dropout=(0.1, 0, 0)),
        key(dropout=(0.2, 0, 0)),
        key(dropout=(0.1, 0, 1)),
        key(dropout=(0.1, 0, 0), dropout_algorithm="flash"),
    ]
    assert len(set(keys)) == len(keys)


def test_repr_is_json(plans):
    """A graph prints as JSON, before and after it is built."""
    graph, _ = declared()
    shown = json.loads(repr(graph))
    assert shown["nodes"][0]["tensors"]["q"]["name"] == "q"
    graph.build()
    assert json.loads(repr(graph))["nodes"][0]["tensors"]["o"]["dim"] == list(DIM)


def test_chosen_plan_is_logged(plans, monkeypatch, capsys):
    """``DLATTN_LOG=2`` says which plan a graph runs, and 1 does not."""
    for level, expected in (("1", ""), ("2", "dlattn: graph on cpu: big\n")):
        monkeypatch.setenv("DLATTN_LOG", level)
        declared()[0].build()
        assert capsys.readouterr().err == expected
