"""CUDA graphs that are filled node by node, against a stand-in for the driver."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn.dtypes import to_numpy
from dlattn.errors import DlattnError
from dlattn.plans.base import Plan
from dlattn.plans.chain import Chain
from dlattn.plans.cuda import CudaPlan
from dlattn.problem import Direction, Geometry, Problem, TensorSpec, offset_role
from dlattn.runtime import cuda_graph
from dlattn.runtime.cuda_graph import populate, replayed, update
from dlattn.runtime.launch import Clear, Launch
from dlattn.runtime.target import KNOWN
from tests.builders import make_tensors
from tests.cases import Case
from tests.cuda_driver import INVALID_VALUE, Driver, install
from tests.drivers import OPTIONS, geometry_of, problem_of
from tests.libraries import Library
from tests.plans import ALL
from tests.strategies import cases


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def shared_driver() -> Iterator[Driver]:
    """One for all examples of a test."""
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch)


def kernel(driver: Driver, function: int, number: int, **options: Any) -> tuple[Launch, Any]:
    """A launch of a kernel with one number as its argument, and the number."""
    driver.sizes[function] = 8
    argument = ctypes.c_uint64(number)
    grid = options.pop("grid", (2, 3, 4))
    return Launch(function, grid, 128, 64, ctypes.addressof(argument), **options), argument


def argument(number: int) -> bytes:
    return number.to_bytes(8, "little")


# Nodes --------------------------------------------------------------------------------------------


def test_layout() -> None:
    """The structs of CUDA 12 and 13 have these sizes on every 64-bit platform."""
    assert ctypes.sizeof(cuda_graph.KernelNodeParams) == 72
    assert cuda_graph.KernelNodeParams.params.offset == 40
    assert ctypes.sizeof(cuda_graph.MemsetNodeParams) == 40
    assert ctypes.sizeof(cuda_graph.EdgeData) == 8


def test_a_line_of_nodes(driver: Driver) -> None:
    """Operations follow each other, those of empty grids left out; nodes keep the arguments that
    they were made with."""
    first, number = kernel(driver, 16, 5)
    empty, _ = kernel(driver, 32, 6, grid=(0, 1, 1))
    cleared = Clear(256)
    cleared.address = 4096
    graph = driver.create()
    populate(graph, [cleared, first, empty, first])
    number.value = 9
    node = ("kernel", 16, (2, 3, 4), (128, 1, 1), 64, argument(5))
    assert driver.line(graph) == [("memset", 4096, 256), node, node]
    assert driver.done == []


def test_update(driver: Driver) -> None:
    """The nodes of the graph, or of a clone that lists them in another order, do what the
    operations do now."""
    one, number = kernel(driver, 16, 1)
    cleared = Clear(256)
    other, _ = kernel(driver, 32, 2)
    graph = driver.create()
    populate(graph, [cleared, one, other])
    clone = driver.clone(graph)
    number.value, cleared.address = 7, 512
    update(clone, [cleared, one, other])
    assert [it[-1] for it in driver.line(clone)] == [256, argument(7), argument(2)]
    assert driver.line(clone)[0] == ("memset", 512, 256)
    assert [it[-1] for it in driver.line(graph)] == [256, argument(1), argument(2)]


def test_programmatic_edges(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that may start early has a programmatic edge from the kernel before, but not from
    what is no kernel, nor with drivers that know no such edges; an update finds them all."""
    cleared = Clear(16)
    plain, _ = kernel(driver, 16, 1)
    early, _ = kernel(driver, 32, 2, programmatic=True)
    operations = [cleared, early, plain, early]
    graph = driver.create()
    populate(graph, operations)
    edges = [edge for it in driver.graphs[graph].values() for edge in it.after.values()]
    assert edges == [bytes(8), bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))]
    update(graph, operations)
    assert len(driver.line(graph)) == 4
    monkeypatch.delattr(Driver, "cuGraphAddDependencies_v2")
    graph = driver.create()
    populate(graph, operations)
    assert len(driver.line(graph)) == 4
    assert {edge for it in driver.graphs[graph].values() for edge in it.after.values()} == {
        bytes(8)
    }


def test_clusters(driver: Driver) -> None:
    """A node has the clusters of its launch; if the driver refuses them, it is taken away."""
    plain, _ = kernel(driver, 16, 1)
    clustered, _ = kernel(driver, 32, 2, cluster=2, programmatic=True)
    graph = driver.create()
    populate(graph, [plain, clustered])
    assert [it.cluster for it in driver.graphs[graph].values()] == [(1, 1, 1), (2, 1, 1)]
    graph = driver.create()
    with pytest.raises(DlattnError, match="CUDA_ERROR_INVALID_VALUE"):
        populate(graph, [plain, kernel(driver, 48, 3, cluster=16)[0]])
    assert driver.graphs[graph] == {}


def test_only_empty_graphs_are_populated(driver: Driver) -> None:
    """As in cuDNN; a null pointer is no graph."""
    operations = [kernel(driver, 16, 1)[0]]
    graph = driver.create()
    populate(graph, operations)
    with pytest.raises(RuntimeError, match="has 1 nodes already; populate an empty one"):
        populate(graph, operations)
    with pytest.raises(RuntimeError, match="is null"):
        populate(0, operations)
    with pytest.raises(RuntimeError, match="is null"):
        update(0, operations)
    assert len(driver.line(graph)) == 1


def test_a_refusal_leaves_an_empty_graph(driver: Driver) -> None:
    """What was added before the driver refused is taken away."""
    driver.refuse_after = 2
    graph = driver.create()
    with pytest.raises(DlattnError, match=f"{graph:#x} failed with CUDA_ERROR_INVALID_VALUE"):
        populate(graph, [kernel(driver, 16, n)[0] for n in range(3)])
    assert driver.graphs[graph] == {}


def test_other_graphs_are_not_updated(driver: Driver) -> None:
    """Not those of other nodes, in another order, of more or fewer, or with branches."""
    launch, cleared = kernel(driver, 16, 1)[0], Clear(16)
    for theirs in ([], [launch], [launch, cleared], [cleared, launch, launch]):
        graph = driver.create()
        populate(graph, theirs)
        before = driver.line(graph)
        with pytest.raises(RuntimeError, match="not a line of the nodes memset, kernel; pass one"):
            update(graph, [cleared, launch])
        assert driver.line(graph) == before
    graph = driver.create()
    populate(graph, [cleared, launch, launch])
    first, *others = driver.graphs[graph]
    for node in others:
        driver.graphs[graph][node].after = {first: bytes(8)}
    with pytest.raises(RuntimeError, match="not a line"):
        update(graph, [cleared, launch, launch])


def test_replays(driver: Driver) -> None:
    """A graph of our own runs its operations as often as it was told, and is gone afterwards."""
    operations = [Clear(16), kernel(driver, 16, 3)[0]]
    with replayed(operations, 2) as replay:
        assert driver.done == []
        replay(5)
    assert [it[0] for it in driver.done] == ["memset", "kernel"] * 2
    assert driver.streams == [5]
    assert driver.graphs == {}


def test_a_failed_instantiation_leaves_no_graph(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that cannot be filled."""
    monkeypatch.setattr(driver, "cuGraphInstantiateWithFlags", lambda *_: INVALID_VALUE)
    with pytest.raises(DlattnError, match="Instantiating"), replayed([Clear(16)], 1):
        pass
    driver.refuse_after = 0
    with pytest.raises(DlattnError, match="Populating"), replayed([Clear(16)], 1):
        pass
    assert driver.graphs == {}


# Plans --------------------------------------------------------------------------------------------

_FORWARD = ("q", "k", "v", "o", "stats", "score_max", "score_sum_exp", "debug_softmax")
_BACKWARD = ("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV", "dSink_token", "dBias")


def described(case: Case, direction: Direction) -> tuple[Problem, Geometry]:
    """What a graph of the case lowers to."""
    tensors = make_tensors(case, Library())
    roles = _FORWARD if direction is Direction.FORWARD else _BACKWARD
    used = {role: t for role, t in tensors.items() if role in (*roles, *OPTIONS, "rng_dump")}
    ragged = not set(case.ragged).isdisjoint(used)
    used |= {name: tensors[name] for role in used if (name := offset_role(role)) in tensors}
    return problem_of(case, direction, ragged), geometry_of(case, used)


class Memory:
    """Addresses for the tensors of a geometry, other ones for each instance; numbers in host
    memory."""

    _numbers = itertools.count(1)

    def __init__(self, geometry: Geometry) -> None:
        number = next(self._numbers)
        self._hosts = {
            role: np.full(spec.dim, number, to_numpy(spec.dtype))
            for role, spec in geometry.tensors.items()
            if spec.by_value
        }
        self.pointers = {
            role: self._hosts[role].ctypes.data if spec.by_value else (number << 40) + (index << 32)
            for index, (role, spec) in enumerate(geometry.tensors.items())
        }
        self.workspace = number << 36


def check_plan(driver: Driver, plan: Plan) -> None:
    plan.build()
    first, second = Memory(plan.geometry), Memory(plan.geometry)
    wanted = []
    for memory in (first, second):
        driver.done.clear()
        plan.execute(memory.pointers, memory.workspace, 0)
        wanted.append([*driver.done])
    driver.done.clear()
    graph = driver.create()
    for memory, change, want in ((first, populate, wanted[0]), (second, update, wanted[1])):
        with plan.operations(memory.pointers, memory.workspace) as operations:
            change(graph, operations)
        assert driver.line(graph) == want
    assert driver.done == []
    assert wanted[0] != wanted[1]
    assert {"kernel"} <= {it[0] for it in wanted[0]} <= {"kernel", "memset"}
    if isinstance(plan, CudaPlan):
        kernels = sum(0 not in it.grid for it in (*plan.first_kernels(), *plan.kernels()))
        assert len(wanted[0]) >= kernels


@given(
    case=cases("gpu"),
    direction=st.sampled_from([*Direction]),
    arch=st.sampled_from(["sm_80", "sm_90a"]),
)
def test_nodes_are_what_a_call_enqueues(
    shared_driver: Driver, case: Case, direction: Direction, arch: str
) -> None:
    """For every plan of every problem: the same kernels, with the same arguments, in the same
    order; after an update, those of another call."""
    if direction is Direction.BACKWARD and not case.stats:
        return
    problem, geometry = described(case, direction)
    what = (problem, geometry, KNOWN[arch])
    for kind in ALL:
        if kind.name != "reference" and kind.supports(*what) is None:
            check_plan(shared_driver, kind(*what))


@given(
    case=cases("gpu"),
    direction=st.sampled_from([*Direction]),
    arch=st.sampled_from([*KNOWN]),
)
def test_choices(case: Case, direction: Direction, arch: str) -> None:
    """The first tiling to choose is the plan's own; each fits the device, with kernels of its own,
    and needs no more of the problem than the first."""
    if direction is Direction.BACKWARD and not case.stats:
        return
    problem, geometry = described(case, direction)
    what = (problem, geometry, KNOWN[arch])
    for kind in ALL:
        if kind.supports(*what) is not None or not (choices := kind.choices(*what)):
            continue
        own: Any = kind(*what)
        assert choices[0] == own.tiling
        made = [own, *(kind(*what, tiling=choice) for choice in choices[1:])]  # type: ignore
        launches = [[*plan.first_kernels(), *plan.kernels()] for plan in made]
        assert len({tuple(it.source.text for it in kernels) for kernels in launches}) == len(made)
        assert all(it.shared <= KNOWN[arch].shared_memory for row in launches for it in row)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nodes_of_a_chain(driver: Driver, arch: str) -> None:
    """Plans one after another are one line of nodes."""
    case = Case(
        batch=2, heads_q=4, heads_k=4, heads_v=4, seq_q=96, seq_kv=96, head_dim_qk=64, head_dim_v=64
    )  # fmt: skip
    problem, geometry = described(case, Direction.BACKWARD)
    tensors = dict(geometry.tensors)
    del tensors["o"], tensors["stats"]
    tensors["debug_softmax"] = TensorSpec("S", (2, 4, 96, 96), (36864, 9216, 96, 1), problem.dtype)
    what = (replace(problem, stats=None), replace(geometry, tensors=tensors), KNOWN[arch])
    assert Chain.supports(*what) is None
    check_plan(driver, Chain(*what))
