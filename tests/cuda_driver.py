"""A stand-in for the driver that notes what it is asked to run, or to put into CUDA graphs, with a
copy of every kernel's argument; and plans that are built on it, without a GPU or a compiler."""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dlattn.plans import cuda
from dlattn.runtime import cuda_graph, jit, launch, tables, tensormap

#: CUresult.
INVALID_VALUE = 1

#: What is done: ``("kernel", function, grid, block, shared, argument)``, or
#: ``("memset", address, nbytes)``.
Done = tuple[Any, ...]


@dataclass
class Node:
    """Of a graph: what it does, the nodes that it waits for, with the data of each edge, and the
    blocks of its clusters."""

    done: Done
    after: dict[int, bytes] = field(default_factory=dict)
    cluster: tuple[int, ...] = (1, 1, 1)


class Driver:
    """``libcuda``, as far as plans and CUDA graphs go.

    Attributes:
        done: what was enqueued, in order.
        graphs: handle -> node -> what it is.
        sizes: function -> bytes of its argument.
        refuse_after: calls that may still add nodes, or ``None`` for any number.
        microseconds: function -> how long its kernels take; 1 where nothing is said.
        objects: streams and events that there are, and when each event was recorded.
    """

    def __init__(self) -> None:
        self.done: list[Done] = []
        self.streams: list[int | None] = []
        self.graphs: dict[int, dict[int, Node]] = {}
        self.sizes: dict[int, int] = {}
        self.refuse_after: int | None = None
        self.microseconds: dict[int, float] = {}
        self.objects: dict[int, float] = {}
        self._numbers = itertools.count(0x1000, 8)

    def line(self, graph: int) -> list[Done]:
        """What a graph does, which must be one thing after the other."""
        nodes = self.graphs[graph]
        before: list[int] = []
        found = []
        for _ in nodes:
            (node,) = (
                n for n, it in nodes.items() if n not in before and set(it.after) <= {*before}
            )
            assert list(nodes[node].after) == before[-1:]
            before.append(node)
            found.append(nodes[node].done)
        return found

    # Running

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: None) -> int:  # noqa: N802
        it = config._obj
        self.streams.append(it.stream)
        self.done.append(
            self._kernel(function.value, tuple(it.grid), tuple(it.block), it.shared, params[0])
        )
        return 0

    def cuMemsetD8Async(self, address: Any, value: Any, nbytes: Any, stream: Any) -> int:  # noqa: N802
        assert value.value == 0
        self.streams.append(stream.value)
        self.done.append(("memset", address.value, nbytes.value))
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        name._obj.value = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE"}.get(status)
        return 0

    def _kernel(self, function: int, grid: Any, block: Any, shared: int, address: int) -> Done:
        argument = ctypes.string_at(address, self.sizes[function])
        return "kernel", function, tuple(grid), tuple(block), shared, argument

    # Graphs

    def cuGraphCreate(self, graph: Any, flags: Any) -> int:  # noqa: N802
        graph._obj.value = self.create()
        return 0

    def create(self) -> int:
        """An empty graph."""
        graph = next(self._numbers)
        self.graphs[graph] = {}
        return graph

    def clone(self, graph: int) -> int:
        """A graph of other nodes that do the same, the last one made first."""
        copied = self.create()
        names = {node: next(self._numbers) for node in reversed(self.graphs[graph])}
        for node, name in names.items():
            it = self.graphs[graph][node]
            after = {names[other]: edge for other, edge in it.after.items()}
            self.graphs[copied][name] = Node(it.done, after, it.cluster)
        return copied

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        del self.graphs[graph.value]
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: None, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.graphs[graph.value])
        return 0

    def cuGraphAddKernelNode_v2(  # noqa: N802
        self, node: Any, graph: Any, after: Any, count: Any, params: Any
    ) -> int:
        return self._add(node, graph, after, count, self._of_kernel(params))

    def cuGraphAddMemsetNode(  # noqa: N802
        self, node: Any, graph: Any, after: Any, count: Any, params: Any, context: Any
    ) -> int:
        assert context.value == 77, "the current context"
        return self._add(node, graph, after, count, self._of_memset(params))

    def cuGraphKernelNodeSetParams_v2(self, node: Any, params: Any) -> int:  # noqa: N802
        return self._set(node, self._of_kernel(params))

    def cuGraphMemsetNodeSetParams(self, node: Any, params: Any) -> int:  # noqa: N802
        return self._set(node, self._of_memset(params))

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 77
        return 0

    def _of_kernel(self, params: Any) -> Done:
        it = struct.unpack("=Q3I3II4xQQQQ", bytes(params._obj))
        assert it[9:] == (0, 0, 0)
        (argument,) = struct.unpack("=Q", ctypes.string_at(it[8], 8))
        return self._kernel(it[0], it[1:4], it[4:7], it[7], argument)

    def _of_memset(self, params: Any) -> Done:
        address, _, value, size, width, height = struct.unpack("=QQIIQQ", bytes(params._obj))
        assert (value, height) == (0, 1)
        return "memset", address, size * width

    def _add(self, node: Any, graph: Any, after: Any, count: Any, done: Done) -> int:
        if self.refuse_after is not None:
            if not self.refuse_after:
                return INVALID_VALUE
            self.refuse_after -= 1
        node._obj.value = next(self._numbers)
        edges = {other: bytes(8) for other in after[: count.value]}
        self.graphs[graph.value][node._obj.value] = Node(done, edges)
        return 0

    def _find(self, node: int) -> tuple[dict[int, Node], Node]:
        return next((nodes, nodes[node]) for nodes in self.graphs.values() if node in nodes)

    def _set(self, node: Any, done: Done) -> int:
        it = self._find(node.value)[1]
        assert it.done[0] == done[0], "a node stays what it is"
        it.done = done
        return 0

    def cuGraphKernelNodeSetAttribute(self, node: Any, name: int, value: Any) -> int:  # noqa: N802
        assert name == 4, "the dimension of clusters"
        address = ctypes.cast(value, ctypes.c_void_p).value
        assert address is not None
        self._find(node.value)[1].cluster = tuple((ctypes.c_int * 3).from_address(address))
        return INVALID_VALUE if self._find(node.value)[1].cluster[0] > 8 else 0

    def cuGraphDestroyNode(self, node: Any) -> int:  # noqa: N802
        nodes, _ = self._find(node.value)
        del nodes[node.value]
        for other in nodes.values():
            other.after.pop(node.value, None)
        return 0

    def cuGraphAddDependencies_v2(  # noqa: N802
        self, graph: Any, before: Any, after: Any, edge: Any, count: Any
    ) -> int:
        assert count.value == 1
        self.graphs[graph.value][after._obj.value].after[before._obj.value] = bytes(edge._obj)
        return 0

    def cuGraphGetRootNodes(self, graph: Any, found: Any, count: Any) -> int:  # noqa: N802
        nodes = self.graphs[graph.value]
        return _fill(found, count, [n for n, it in nodes.items() if not it.after])

    def cuGraphNodeGetDependentNodes_v2(  # noqa: N802
        self, node: Any, found: Any, edges: Any, count: Any
    ) -> int:
        nodes, _ = self._find(node.value)
        return _fill(found, count, [n for n, it in nodes.items() if node.value in it.after])

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = {"kernel": 0, "memset": 2}[self._find(node.value)[1].done[0]]
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        made._obj.value = self.clone(graph.value)
        return 0

    def cuGraphLaunch(self, made: Any, stream: Any) -> int:  # noqa: N802
        self.streams.append(stream.value)
        self.done += self.line(made.value)
        return 0

    def cuGraphExecDestroy(self, made: Any) -> int:  # noqa: N802
        return self.cuGraphDestroy(made)

    # Time

    def _make(self, made: Any, flags: Any) -> int:
        made._obj.value = next(self._numbers)
        self.objects[made._obj.value] = 0.0
        return 0

    cuStreamCreate = cuEventCreate = _make  # noqa: N815

    def _destroy(self, made: Any) -> int:
        del self.objects[made.value]
        return 0

    cuStreamDestroy_v2 = cuEventDestroy_v2 = _destroy  # noqa: N815

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        kernels = (it[1] for it in self.done if it[0] == "kernel")
        self.objects[event.value] = sum(self.microseconds.get(it, 1.0) for it in kernels)
        return 0

    def cuEventElapsedTime(self, time: Any, begin: Any, end: Any) -> int:  # noqa: N802
        time._obj.value = 1e-3 * (self.objects[end.value] - self.objects[begin.value])
        return 0

    def cuEventSynchronize(self, event: Any) -> int:  # noqa: N802
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return 0


def _fill(found: Any, count: Any, nodes: list[int]) -> int:
    count._obj.value = min(len(found), len(nodes))
    found[: count._obj.value] = nodes[: count._obj.value]
    return 0


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver in the place of the real one, and kernels that need no compiler."""
    driver = Driver()
    functions: dict[jit.KernelSource, int] = {}
    memory = itertools.count(1 << 44, 1 << 20)

    def load(source: jit.KernelSource, index: int) -> Any:
        function = functions.setdefault(source, 0x10 * (1 + len(functions)))
        size = re.search(r"static_assert\(sizeof\(\w+\) == (\d+)", source.text)
        assert size is not None
        driver.sizes[function] = int(size[1])
        return SimpleNamespace(function=function, set_shared=lambda nbytes: None)

    def to_device(array: Any, index: int) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=next(memory)), nbytes=0)

    for module in (launch, cuda_graph.launch, tensormap):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(tables, "to_device", to_device)
    monkeypatch.setattr(tables, "is_capturing", lambda stream: False)
    monkeypatch.setattr(jit, "compile_kernels", lambda sources, arch, companions: sources)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(cuda, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(tensormap, "encode", lambda *arguments: None)
    monkeypatch.setattr(tensormap, "address_slot", ctypes.c_uint64.from_address)
    return driver
