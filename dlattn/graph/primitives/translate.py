"""From primitive operations to what plans see: attention if that is what they are, or a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlattn.dtypes import data_type
from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.graph import infer, lower
from dlattn.graph.placement import Place, choose_target
from dlattn.graph.primitives import infer as primitive_infer
from dlattn.graph.primitives import lower as primitive_lower
from dlattn.graph.primitives.fuse import attention, is_opaque
from dlattn.graph.primitives.fuse_backward import backward, is_backward
from dlattn.graph.primitives.meanings import Misfit
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.runtime.target import Target


def translate_primitives(
    name: str,
    nodes: Sequence[PrimitiveNode],
    types: Mapping[str, data_type],
    place: Place,
) -> lower.Lowered:
    """Attention if that is what they are; else, on the CPU, one operation after the other."""
    primitive_infer.complete(nodes, types)
    tensors = [(node.label(role), t) for node in nodes for role, t in node.tensors.items()]
    target = choose_target(f"graph {name!r}", tensors, place)
    program = primitive_lower.lower(nodes, target, types["compute_data_type"])
    try:
        return _attention(nodes, target, types)
    except Misfit as misfit:
        if target.kind == "cuda":
            raise cudnnGraphNotSupportedError(
                f"Graph {name!r} runs on {target}, where kernels compute attention, and is not "
                f"attention: {misfit} Run it on the CPU, or change this node."
            ) from None
        _refuse_opaque(name, nodes, misfit)
    except cudnnGraphNotSupportedError as error:
        if target.kind == "cuda":
            raise
        _refuse_opaque(name, nodes, error)
    # What the attempt has inferred may differ.
    primitive_infer.complete(nodes, types)
    return program


def _refuse_opaque(name: str, nodes: Sequence[PrimitiveNode], why: Exception) -> None:
    """What is in S, only attention says: its signs are a keep mask."""
    for node in nodes:
        for operand, t in node.tensors.items():
            if is_opaque(t) and not t.get_is_virtual():
                raise cudnnGraphNotSupportedError(
                    f"Graph {name!r} has {node.label(operand)} in the layout F16x16, which "
                    f"attention alone writes and reads, and is not attention: {why} Change this "
                    "node, or declare the tensor without a reordering."
                ) from None


def _attention(
    nodes: Sequence[PrimitiveNode], target: Target, types: Mapping[str, data_type]
) -> lower.Lowered:
    found = backward(nodes) if is_backward(nodes) else attention(nodes)
    infer.complete(found.node, types["io_data_type"])
    return found.lower(target, types["compute_data_type"])
