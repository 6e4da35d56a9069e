"""What is added to scores and what masks them, of tensors: one is the bias of an attention; several
are a function of scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dlattn.graph.nodes import AttentionNode
from dlattn.graph.primitives.meanings import Misfit, Scores
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.score_mod.meaning import read_of
from dlattn.graph.tensor import Tensor
from dlattn.problem import SCORE_GRADIENT_ROLES, SCORE_MOD_ROLES, Direction
from dlattn.problem.expressions import Builder
from dlattn.problem.score_program import partial_program, score_program, slope_of


def bias(node: PrimitiveNode, scores: Scores) -> Tensor | None:
    """What the argument of an ``sdpa`` can say, which is one tensor."""
    tensors = _tensors(scores)
    if len(tensors) > len(SCORE_MOD_ROLES):
        raise Misfit(
            node,
            f"ends an attention with {len(tensors)} tensors that are added or that mask; kernels "
            f"take {len(SCORE_MOD_ROLES)} at most, so join masks before.",
        )
    return tensors[0] if len(tensors) == 1 else None


def with_function(
    node: AttentionNode, scores: Scores, d_bias: Tensor | None = None
) -> AttentionNode:
    """The node; where one tensor does not say it, with a function of scores that does.

    Scores are masked last, so that nothing shows of what is added there, a NaN neither.

    Args:
        d_bias: what the gradient of the bias is written to, if that is in the function.
    """
    tensors = _tensors(scores)
    if len(tensors) < 2:
        return node
    builder, reads = Builder(), [read_of(t) for t in tensors]
    result = builder.score()
    read = masks = [builder.read(number, it.kind) for number, it in enumerate(reads)]
    if scores.bias is not None:
        result, masks = builder.pointwise("add", result, read[0]), read[1:]
    keep = masks[0]
    for mask in masks[1:]:
        keep = builder.pointwise("logical_and", keep, mask)
    result = builder.pointwise("binary_select", result, builder.constant(-float("inf")), keep)
    slope = slope_of(builder, result) if node.direction is Direction.BACKWARD else None
    program, used = score_program(builder, result, slope, reads)
    inputs = {role: tensors[number] for role, number in zip(SCORE_MOD_ROLES, used, strict=False)}
    outputs: Mapping[str, Tensor] = {}
    partials = {}
    if d_bias is not None:
        role = SCORE_GRADIENT_ROLES[used.index(0)]
        outputs = {role: d_bias}
        partial = slope_of(builder, result, 0)
        partials = {role: partial_program(builder, partial, reads, used)}
    return replace(
        node,
        inputs={**node.inputs, **inputs},
        outputs={**node.outputs, **outputs},
        program=program,
        partials=partials,
    )


def _tensors(scores: Scores) -> list[Tensor]:
    """The bias, then each mask once."""
    added = [] if scores.bias is None else [scores.bias]
    return list(dict.fromkeys([*added, *scores.keep.masks]))
