"""Module-level helpers: ``graph``, ``jit``, ``graph_cache``, and what is refused."""

from __future__ import annotations

import pytest

import dlattn as cudnn

DIM = (2, 4, 8, 16)


def declare(handle, builds=False):
    """A forward graph and its tensors, through the context manager."""
    with cudnn.graph(handle) as (graph, _):
        tensors = [graph.tensor(DIM, name=name) for name in "qkv"]
        o, _ = graph.sdpa(*tensors, generate_stats=False)
        o.set_output(True)
        if builds:
            graph.build([cudnn.heur_mode.A])
    return graph, [*tensors, o]


@pytest.fixture
def handle():
    return cudnn.create_handle(device="cpu")


def test_graph_yields_a_graph_and_a_list(handle):
    """The context manager makes a half-precision graph and builds nothing."""
    with cudnn.graph(handle) as (graph, uids):
        assert isinstance(graph, cudnn.pygraph) and uids == []
    graph, (_, _, _, o) = declare(handle)
    assert graph.get_execution_plan_count() == 0
    graph.validate()
    assert o.get_data_type() is cudnn.data_type.HALF


@pytest.mark.parametrize("builds", [True, False])
def test_jit_builds_what_is_not_built(handle, builds):
    """A decorated declaration returns a built graph and the uids of its tensors."""
    graph, uids = cudnn.jit(heur_modes=cudnn.heur_mode.A)(declare)(handle, builds)
    assert graph.get_execution_plan_count() == 1
    assert uids == [1, 2, 3, 4]


def test_graph_cache_keeps_the_newest():
    """Equal keys give the same result without a call; beyond maxsize the oldest goes."""
    calls = []

    @cudnn.graph_cache(key_fn=lambda n, **_: n % 10, maxsize=2)
    def make(n, *, tag=""):
        """Make."""
        calls.append(n)
        return object()

    assert make(1) is make(11, tag="other") and calls == [1]
    make(2)
    make(3)
    make(2)
    assert calls == [1, 2, 3]
    make(1)
    assert calls == [1, 2, 3, 1]
    assert make.__doc__ == "Make."


def test_graph_cache_of_no_size():
    """With maxsize 0, every call makes anew."""
    make = cudnn.graph_cache(key_fn=lambda: 0, maxsize=0)(object)
    assert make() is not make()


def test_there_is_no_last_error():
    """Errors are exceptions, so there is nothing to fetch afterwards."""
    assert cudnn.get_last_error_string() == ""
