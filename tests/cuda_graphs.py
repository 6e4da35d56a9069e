"""Ways to run a built graph through a CUDA graph, by the driver alone; each does what
``pygraph.execute`` does, and is complete when it returns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any
from unittest.mock import patch

import dlattn as cudnn
from tests.cases import Case
from tests.drivers import Tensors, run_graph

Pack = Mapping[Any, Any]
Way = Callable[[cudnn.pygraph, Pack, Any], None]

_EXECUTE = cudnn.pygraph.execute


def run_by(way: Way) -> Callable[[Case, Tensors], None]:
    """``run_graph``, with another way in the place of ``execute``."""

    def run(case: Case, tensors: Tensors) -> None:
        with patch.object(cudnn.pygraph, "execute", way):
            run_graph(case, tensors)

    return run


def ask(function: str, *arguments: Any) -> None:
    """A call of the driver that must succeed."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    assert status == 0, f"{function} failed with CUresult {status}"


class CudaGraph:
    """A ``cudaGraph_t``, and what is instantiated of it; ``with`` it, and it is gone afterwards."""

    def __init__(self) -> None:
        self._graph, self._made = ctypes.c_void_p(), ctypes.c_void_p()
        ask("cuGraphCreate", ctypes.byref(self._graph), 0)

    def __enter__(self) -> CudaGraph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._made:
            ask("cuGraphExecDestroy", self._made)
        ask("cuGraphDestroy", self._graph)

    def __int__(self) -> int:
        return self._graph.value or 0

    @property
    def types(self) -> list[int]:
        """``CUgraphNodeType`` of each node."""
        count = ctypes.c_size_t()
        ask("cuGraphGetNodes", self._graph, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        ask("cuGraphGetNodes", self._graph, nodes, ctypes.byref(count))
        found = []
        for node in nodes:
            kind = ctypes.c_int()
            ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            found.append(kind.value)
        return found

    def add_child(self, child: CudaGraph, after: int | None = None) -> int:
        """A node that is a copy of another graph, after another node; the node."""
        node = ctypes.c_void_p()
        before = (ctypes.c_void_p * 1)(after)
        count = ctypes.c_size_t(after is not None)
        ask(
            "cuGraphAddChildGraphNode",
            ctypes.byref(node),
            self._graph,
            before,
            count,
            child._graph,
        )
        return node.value or 0

    def child(self, node: int) -> int:
        """The copy that a node is."""
        found = ctypes.c_void_p()
        ask("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(found))
        return found.value or 0

    def instantiate(self) -> None:
        ask("cuGraphInstantiateWithFlags", ctypes.byref(self._made), self._graph, ctypes.c_uint64())

    def update(self) -> None:
        """Give the instantiated graph what the nodes have become."""
        result = (ctypes.c_void_p * 3)()
        ask("cuGraphExecUpdate_v2", self._made, self._graph, result)

    def launch(self) -> None:
        """Run once, after everything on the device, and wait."""
        ask("cuCtxSynchronize")
        ask("cuGraphLaunch", self._made, None)
        ask("cuCtxSynchronize")


def populated(graph: cudnn.pygraph, pack: Pack, workspace: Any) -> None:
    """By ``populate_cuda_graph``."""
    with CudaGraph() as native:
        graph.populate_cuda_graph(None, pack, workspace, native)
        assert set(native.types) <= {0, 2}, "kernels and what clears, and no child graphs"
        native.instantiate()
        native.launch()


def updated(graph: cudnn.pygraph, pack: Pack, workspace: Any) -> None:
    """By ``update_cuda_graph`` of a graph that was populated, and instantiated, with addresses of
    nothing, and with another workspace."""
    decoys = {
        t: value if t.attributes.is_pass_by_value else (1 << 40) + (number << 32)
        for number, (t, value) in enumerate(pack.items())
    }
    elsewhere = workspace
    if workspace is not None:
        elsewhere = (workspace.clone if hasattr(workspace, "clone") else workspace.copy)()
    with CudaGraph() as native:
        graph.populate_cuda_graph(None, decoys, elsewhere, native)
        native.instantiate()
        graph.update_cuda_graph(None, pack, workspace, native)
        native.update()
        native.launch()


def captured_by_torch(graph: cudnn.pygraph, pack: Pack, workspace: Any) -> None:
    """By ``execute`` inside ``torch.cuda.graph``."""
    import torch

    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        _EXECUTE(graph, pack, workspace)
    captured.replay()
    torch.cuda.synchronize()


def captured_by_cupy(graph: cudnn.pygraph, pack: Pack, workspace: Any) -> None:
    """By ``execute`` on a stream that CuPy captures."""
    import cupy

    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, stream)
    with stream:
        stream.begin_capture()
        _EXECUTE(graph, pack, workspace, handle)
        captured = stream.end_capture()
        captured.launch(stream)
    stream.synchronize()
    cudnn.destroy_handle(handle)
