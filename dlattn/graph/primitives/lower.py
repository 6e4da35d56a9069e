"""From primitive nodes to a program: the translator of graphs that are no attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlattn.dtypes import data_type
from dlattn.errors import InvalidGraphError
from dlattn.graph.lower import Lowered, spec_of
from dlattn.graph.primitives.infer import compute_type
from dlattn.graph.primitives.match import needed
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.tensor import tensor
from dlattn.problem import Geometry, Program, Step, Value
from dlattn.problem.layout import canonical_stride
from dlattn.runtime.target import Target


def lower(nodes: Sequence[PrimitiveNode], target: Target, compute: data_type) -> Lowered:
    """Translate completed nodes (see :func:`dlattn.graph.primitives.infer.complete`), those aside
    on which no output depends.

    Raises:
        InvalidGraphError: nothing is an output.
    """
    nodes = needed(nodes)
    if not nodes:
        raise InvalidGraphError(
            "Every result of the graph is virtual, so that there is nothing to compute; call "
            "set_output(True) on what you want."
        )
    roles: dict[tensor, str] = {}
    labels: dict[tensor, str] = {}
    for node in nodes:
        for operand, t in node.tensors.items():
            roles.setdefault(t, f"t{len(roles)}")
            labels.setdefault(t, node.label(operand))
    made = {t for node in nodes for t in node.outputs.values()}
    in_memory = [t for t in roles if not t.get_is_virtual() and t.attributes.value is None]
    program = Program(
        steps=tuple(
            Step(
                node.operation,
                {operand: roles[t] for operand, t in node.inputs.items()},
                {operand: roles[t] for operand, t in node.outputs.items()},
                _numbers(node),
                compute_type(node, compute),
            )
            for node in nodes
        ),
        values={
            role: Value(t.attributes.dim, t.get_data_type(), t.attributes.value)
            for t, role in roles.items()
        },
    )
    specs = {roles[t]: spec_of(labels[t], t.attributes, is_output=t in made) for t in in_memory}
    return Lowered(
        problem=program,
        geometry=Geometry(tensors=specs),
        tensors={roles[t]: t for t in in_memory},
        outputs=frozenset(roles[t] for t in in_memory if t in made),
        target=target,
    )


def _numbers(node: PrimitiveNode) -> dict[str, Any]:
    """A step's numbers; of a view, both strides."""
    if node.operation != "reshape":
        return dict(node.numbers)
    if node.numbers["mode"] == "LOGICAL":
        return {}
    both = (node.inputs["input"].attributes, node.result.attributes)
    return {"strides": tuple(canonical_stride(it.dim, it.stride) for it in both)}
