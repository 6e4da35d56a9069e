"""CUDA graphs that are filled node by node: what a stream would be given, in a line.

Nodes own what they hold. "The kernelParams or extra array ..., as well as the argument values it
points to, are owned by the node" (CUDA Driver API, cuGraphKernelNodeGetParams), so a plan may write
other addresses into its argument as soon as the node is there, and may do so for every graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dlattn.errors import DlattnError, InvalidArgumentError
from dlattn.runtime import launch
from dlattn.runtime.launch import (
    Clear,
    Launch,
    LaunchAttribute,
    Operation,
    call_in_context,
    error_name,
)

_KERNEL_NODE, _MEMSET_NODE = 0, 2  # CUgraphNodeType
_NODE_TYPES = ("kernel", "memcpy", "memset", "host", "graph", "empty")


class KernelNodeParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class MemsetNodeParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class EdgeData(ctypes.Structure):
    """``CUgraphEdgeData``."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


#: The second kernel may start once all blocks of the first have said so, or have ended.
_PROGRAMMATIC_EDGE = (1, 0, 1)


def populate(graph: int, operations: Sequence[Operation], times: int = 1) -> None:
    """Add operations to an empty CUDA graph, each after the one before; of empty grids, no node.

    Args:
        graph: a ``cudaGraph_t``, the same as the driver's ``CUgraph``.
        times: how often, one after the other.

    Raises:
        InvalidArgumentError: the graph is null, or not empty.
        DlattnError: the driver refused; the graph is empty again.
    """
    if not graph:
        raise InvalidArgumentError("The CUDA graph is null; make one with cudaGraphCreate().")
    count = ctypes.c_size_t()
    _check(_call("cuGraphGetNodes", _handle(graph), None, ctypes.byref(count)), "Reading", graph)
    if count.value:
        raise InvalidArgumentError(
            f"The CUDA graph at {graph:#x} has {count.value} nodes already; populate an empty one, "
            "and add it to yours as a child, or update_cuda_graph() one that was populated before."
        )
    added: list[int] = []
    before: Operation | None = None
    try:
        for operation in (*operations,) * times:
            if operation.is_empty:
                continue
            added.append(_add(graph, operation, before, added[-1:]))
            before = operation
    except DlattnError:
        for node in reversed(added):
            _call("cuGraphDestroyNode", _handle(node))
        raise


def update(graph: int, operations: Sequence[Operation]) -> None:
    """Give the nodes of a graph that :func:`populate` filled, or of a clone of it, what operations
    are now: other addresses, and numbers.

    Raises:
        InvalidArgumentError: these are not the graph's nodes; nothing is changed.
        DlattnError: the driver refused.
    """
    if not graph:
        raise InvalidArgumentError("The CUDA graph is null; pass one that was populated.")
    wanted = [operation for operation in operations if not operation.is_empty]
    nodes = _line(graph, len(wanted))
    found = None if nodes is None else [_type(graph, node) for node in nodes]
    if nodes is None or found != [_type_of(operation) for operation in wanted]:
        names = ", ".join(_NODE_TYPES[_type_of(operation)] for operation in wanted)
        raise InvalidArgumentError(
            f"The CUDA graph at {graph:#x} is not a line of the nodes {names}; pass one that "
            "populate_cuda_graph() of this graph and plan filled, or a clone of it."
        )
    for node, operation in zip(nodes, wanted, strict=True):
        params = ctypes.byref(_params(operation))
        _check(
            _call(f"cuGraph{_KIND[type(operation)][1]}", _handle(node), params), "Updating", graph
        )


#: The driver's functions that add a node, and that set its parameters.
_KIND = {
    Launch: ("AddKernelNode_v2", "KernelNodeSetParams_v2"),
    Clear: ("AddMemsetNode", "MemsetNodeSetParams"),
}


def _add(graph: int, operation: Operation, before: Operation | None, after: Sequence[int]) -> int:
    """The new node, which depends on those of ``after``: at most one, ``before``'s."""
    node = ctypes.c_void_p()
    programmatic = (
        isinstance(operation, Launch)
        and operation.programmatic
        and isinstance(before, Launch)
        and hasattr(launch.driver(), "cuGraphAddDependencies_v2")  # before 12.3: a full dependency
    )
    plain = () if programmatic else after
    dependencies = (ctypes.c_void_p * len(plain))(*plain)
    arguments: list[Any] = [
        ctypes.byref(node),
        _handle(graph),
        dependencies,
        ctypes.c_size_t(len(plain)),
        ctypes.byref(_params(operation)),
    ]
    if isinstance(operation, Clear):
        arguments.append(_current_context(graph))
    _check(_call(f"cuGraph{_KIND[type(operation)][0]}", *arguments), "Populating", graph)
    made = node.value or 0
    status = 0
    if isinstance(operation, Launch) and operation.cluster is not None:
        attribute = operation.cluster
        value = ctypes.byref(attribute, LaunchAttribute.value.offset)
        status = _call("cuGraphKernelNodeSetAttribute", node, attribute.id, value)
    if programmatic and not status:
        edge = EdgeData(*_PROGRAMMATIC_EDGE)
        ends = [ctypes.byref(_handle(it)) for it in (*after, made)]
        one = ctypes.c_size_t(1)
        status = _call("cuGraphAddDependencies_v2", _handle(graph), *ends, ctypes.byref(edge), one)
    if status:
        _call("cuGraphDestroyNode", node)
    _check(status, "Populating", graph)
    return made


def _params(operation: Operation) -> ctypes.Structure:
    if isinstance(operation, Clear):
        return MemsetNodeParams(operation.address, 0, 0, 1, operation.nbytes, 1)
    assert isinstance(operation, Launch)
    config = operation.config
    params = ctypes.addressof(operation.params)
    return KernelNodeParams(operation.kernel, config.grid, config.block, config.shared, params)


def _type_of(operation: Operation) -> int:
    return _MEMSET_NODE if isinstance(operation, Clear) else _KERNEL_NODE


def _line(graph: int, length: int) -> list[int] | None:
    """The nodes, the first one first, or ``None`` where they are no line of this length."""
    nodes = _at_most_two("cuGraphGetRootNodes", graph, graph)
    line: list[int] = []
    while len(nodes) == 1 and len(line) < length:
        line += nodes
        nodes = _at_most_two("cuGraphNodeGetDependentNodes", graph, nodes[0])
    return line if not nodes and len(line) == length else None


def _at_most_two(function: str, graph: int, of: int) -> list[int]:
    """What a query of nodes finds first."""
    nodes, count = (ctypes.c_void_p * 2)(), ctypes.c_size_t(2)
    edges: tuple[Any, ...] = ()
    if function.endswith("DependentNodes") and hasattr(launch.driver(), f"{function}_v2"):
        # The older function refuses to leave out what edges say.
        function, edges = f"{function}_v2", ((EdgeData * 2)(),)
    status = _call(function, _handle(of), nodes, *edges, ctypes.byref(count))
    _check(status, "Reading", graph)
    return [node or 0 for node in nodes[: count.value]]


def _type(graph: int, node: int) -> int:
    kind = ctypes.c_int()
    _check(_call("cuGraphNodeGetType", _handle(node), ctypes.byref(kind)), "Reading", graph)
    return kind.value


def _current_context(graph: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _check(_call("cuCtxGetCurrent", ctypes.byref(context)), "Populating", graph)
    if not context.value:
        launch.make_context_current()
        _check(_call("cuCtxGetCurrent", ctypes.byref(context)), "Populating", graph)
    return context


# Graphs of our own --------------------------------------------------------------------------------


@contextmanager
def replayed(operations: Sequence[Operation], times: int) -> Iterator[Replay]:
    """``with`` it: a CUDA graph of operations, instantiated, which runs them on a stream when it is
    called; gone after the block, when all its runs must have ended.

    Raises:
        DlattnError: the driver refused.
    """
    graph, made = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0)), "Making", 0)
    try:
        handle = graph.value or 0
        populate(handle, operations, times)
        flags = ctypes.c_ulonglong(0)
        status = _call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, flags)
        _check(status, "Instantiating", handle)
        try:
            yield Replay(made)
        finally:
            _call("cuGraphExecDestroy", made)
    finally:
        _call("cuGraphDestroy", graph)


class Replay:
    """An instantiated CUDA graph; calling it enqueues one run on a stream."""

    def __init__(self, made: ctypes.c_void_p) -> None:
        self._made = made

    def __call__(self, stream: int) -> None:
        status = _call("cuGraphLaunch", self._made, ctypes.c_void_p(stream))
        _check(status, "Launching", self._made.value or 0)


# The driver ---------------------------------------------------------------------------------------


def _handle(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _call(function: str, *arguments: Any) -> int:
    return call_in_context(getattr(launch.driver(), function), *arguments)


def _check(status: int, doing: str, graph: int) -> None:
    if status:
        raise DlattnError(
            f"{doing} the CUDA graph at {graph:#x} failed with {error_name(status)}. It must be a "
            "cudaGraph_t that exists and that no other thread changes meanwhile."
        )
