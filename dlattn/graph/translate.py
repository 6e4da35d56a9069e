"""From what a graph holds to what plans see: one attention, or primitive operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dlattn.dtypes import data_type
from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.graph import infer, lower
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.placement import Place, choose_target

if TYPE_CHECKING:
    from dlattn.graph.declarations import Node


def translate(
    name: str, nodes: Sequence[Node], types: Mapping[str, data_type], place: Place
) -> lower.Lowered:
    """Complete the nodes of a graph, choose its device, and lower it.

    Args:
        name: the graph's, for messages.
        types: ``io_data_type``, ``intermediate_data_type`` and ``compute_data_type`` of the graph.

    Raises:
        InvalidGraphError: the graph is wrong.
        cudnnGraphNotSupportedError: it is right, but no plan runs what it holds.
    """
    primitive = [node for node in nodes if not isinstance(node, AttentionNode)]
    if nodes and len(primitive) == len(nodes):
        # What most graphs do without is imported when one needs it.
        from dlattn.graph.primitives.translate import translate_primitives

        return translate_primitives(name, primitive, types, place)
    if len(nodes) != 1:
        held = ", ".join(f"{node.operation} {node.name!r}" for node in nodes) or "nothing"
        raise cudnnGraphNotSupportedError(
            f"Graph {name!r} holds {held}; plans run graphs of exactly one sdpa or "
            "sdpa_backward, or of primitive operations alone. Make one graph for each."
        )
    (node,) = nodes
    assert isinstance(node, AttentionNode)
    infer.complete(node, types["io_data_type"])
    tensors = ((node.label(role), t) for role, t in node.tensors.items())
    target = choose_target(f"{node.operation} {node.name!r}", tensors, place)
    if node.score_mod is not None:
        from dlattn.graph.score_mod.meaning import meant

        node = meant(node, types)
    return lower.lower(node, target, types["compute_data_type"])
