"""Recognising attention among primitive operations.

Each node is read in turn: what its result means follows from what its operands mean. A node that
gives a meaning to nothing is the first that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlattn.dtypes import data_type
from dlattn.graph.primitives.gradients import Signs
from dlattn.graph.primitives.meanings import (
    Drawn,
    Given,
    Meaning,
    Misfit,
    OfScores,
    Scores,
    Weights,
)
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import Affine, Predicate
from dlattn.graph.primitives.readers import FLOATS, INTEGERS, meaning
from dlattn.graph.tensor import tensor

_POSITIONS = (*INTEGERS, data_type.FLOAT, data_type.DOUBLE)


def read(
    nodes: Sequence[PrimitiveNode], meaning: Callable[..., Any] = meaning
) -> dict[tensor, tuple[PrimitiveNode, Any]]:
    """What every tensor that some output depends on means, and which node makes it.

    Args:
        meaning: what the first result of a node means, by what its operands mean.

    Raises:
        Misfit: a node does not fit.
    """
    known: dict[tensor, tuple[PrimitiveNode, Any]] = {}
    for node in needed(nodes):
        operands = [known[t][1] if t in known else Given(t) for t in node.inputs.values()]
        means = meaning(node, *operands)
        _check_types(node, means)
        if isinstance(means, (Scores, Weights)):
            _check_dim(node, means if isinstance(means, Scores) else means.scores)
        for operand, t in node.outputs.items():
            if operand == "Stats" and isinstance(means, Weights):
                known[t] = node, OfScores("stats", means.scores)
            else:
                known[t] = node, means
    return known


def needed(nodes: Sequence[PrimitiveNode]) -> list[PrimitiveNode]:
    """The nodes that some output depends on."""
    wanted: set[tensor] = set()
    kept = []
    for node in reversed(nodes):
        outputs = node.outputs.values()
        if any(not t.get_is_virtual() or t in wanted for t in outputs):
            wanted |= set(node.inputs.values())
            kept.append(node)
    return kept[::-1]


def _check_types(node: PrimitiveNode, means: Meaning) -> None:
    """Floats stay floats, positions stay exact, and what is true or false is so in any type."""
    if isinstance(means, (Predicate, Drawn, Signs)):
        return
    kept: tuple[data_type, ...] = FLOATS
    if isinstance(means, Affine):
        kept = _POSITIONS
    elif isinstance(means, Given) and means.tensor.get_data_type() not in FLOATS:
        kept = (means.tensor.get_data_type(),)
    for t in node.outputs.values():
        if t.get_data_type() not in kept:
            names = ", ".join(dtype.name for dtype in kept)
            raise Misfit(node, f"rounds to {t.get_data_type()}; fused kernels know {names} here.")


def _check_dim(node: PrimitiveNode, scores: Scores) -> None:
    """Scores broadcast to nothing larger."""
    dim = node.result.attributes.dim
    if dim != scores.dim:
        raise Misfit(node, f"makes {dim} of scores of {scores.dim}; give operands of those sizes.")
