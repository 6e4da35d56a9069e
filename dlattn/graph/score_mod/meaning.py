"""From the operations of a ``score_mod`` to a score edit, or to arguments that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dlattn.dtypes import data_type
from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.pages import max_seq_kv
from dlattn.graph.primitives import infer as primitive_infer
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.score_mod.callback import ScoreMod
from dlattn.graph.score_mod.recognise import Found, recognised
from dlattn.graph.tensor import packed_strides, tensor
from dlattn.problem import SCORE_GRADIENT_ROLES, SCORE_MOD_ROLES, Direction, Read
from dlattn.problem.derivative import derivative
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import Kind, needed
from dlattn.problem.score_program import (
    masked_by_infinity,
    partial_program,
    score_program,
    slope_of,
)

_WHOLE = {
    data_type.INT8: Kind.INT32,
    data_type.UINT8: Kind.INT32,
    data_type.INT32: Kind.INT32,
    data_type.INT64: Kind.INT64,
    data_type.BOOLEAN: Kind.BOOLEAN,
}


def meant(node: AttentionNode, types: Mapping[str, data_type]) -> AttentionNode:
    """The same attention with what its ``score_mod`` means: a program, masks, a soft cap, slopes.

    Args:
        node: completed (see :func:`dlattn.graph.infer.complete`).
        types: ``io_data_type``, ``intermediate_data_type`` and ``compute_data_type`` of the graph.

    Raises:
        InvalidGraphError: shapes or types in it do not fit.
        cudnnGraphNotSupportedError: a ``score_mod_bprop`` that is not linear in the gradient, or a
            result that is to be written.
    """
    mod = node.score_mod
    assert mod is not None
    dim = (*node.inputs["q"].attributes.dim[:3], max_seq_kv(node))
    _complete(node, mod, dim, types)
    reads = {role: t for role, t in node.inputs.items() if role in SCORE_MOD_ROLES}
    builder = Builder()
    lines = _lines(builder, mod, list(reads.values()), types["compute_data_type"], dim)
    result = builder.cast(lines[mod.result], Kind.FLOAT)
    result = masked_by_infinity(builder, result)
    given = mod.d_score is not None
    wanted = _wanted(node)
    found = recognised(
        _without_idle_lengths(node),
        builder,
        result,
        list(reads.values()),
        masks_alone=given,
        wanted=[*wanted.values()],
    )
    slope = None
    if node.direction is Direction.BACKWARD:
        if mod.d_score is None:
            slope = slope_of(builder, found.result)
        else:
            slope = _linear_factor(node, builder, builder.cast(lines[mod.d_score], Kind.FLOAT))
    return _node_of(found, builder, slope, reads, wanted)


def _without_idle_lengths(node: AttentionNode) -> AttentionNode:
    """A node whose lengths mask: without ``use_padding_mask``, they are there for functions to
    read."""
    if node.padding:
        return node
    inputs = {role: t for role, t in node.inputs.items() if not role.startswith("seq_len_")}
    return replace(node, inputs=inputs)


def _complete(
    node: AttentionNode, mod: ScoreMod, dim: tuple[int, ...], types: Mapping[str, data_type]
) -> None:
    for t in mod.given:
        t.attributes.forget_inferred()
        t.attributes.infer("dim", dim)
        t.attributes.infer("stride", packed_strides(dim))
    known = frozenset([*mod.given, *node.tensors.values()])
    primitive_infer.complete(mod.nodes, types, known)
    for operation in mod.nodes:
        for t in operation.outputs.values():
            if not t.get_is_virtual():
                raise cudnnGraphNotSupportedError(
                    f"{operation} of score_mod writes {t.get_name()} to memory, which fused "
                    "kernels keep on the chip; call set_output(False) on it."
                )
    for t in mod.results:
        if t.attributes.dim != dim:
            raise InvalidGraphError(
                f"score_mod returned {t.get_name()!r} of dim {t.attributes.dim}; expected {dim}, "
                "as scores have."
            )


def _lines(
    builder: Builder,
    mod: ScoreMod,
    reads: list[tensor],
    compute: data_type,
    dim: tuple[int, ...],
) -> dict[tensor, int]:
    """The line of every tensor."""
    known = {mod.score: builder.score()}
    if mod.gradient is not None:
        known[mod.gradient] = builder.gradient()
    for number, t in enumerate(reads):
        known[t] = builder.read(number, read_of(t).kind)
    for operation in mod.nodes:
        if not all(t in known or t.attributes.value is not None for t in operation.inputs.values()):
            if operation.operation != "gen_index":
                continue  # no result depends on it
        for t in operation.inputs.values():
            if t not in known and t.attributes.value is not None:
                whole = isinstance(t.attributes.value, int)
                known[t] = builder.constant(t.attributes.value, Kind.INT64 if whole else Kind.FLOAT)
        known[operation.result] = _line(builder, operation, known, compute, dim)
    return known


def _line(
    builder: Builder,
    node: PrimitiveNode,
    known: Mapping[tensor, int],
    compute: data_type,
    dim: tuple[int, ...],
) -> int:
    """Of the type that the operation computes in; whole where its result is to be."""
    wanted = _WHOLE.get(node.result.get_data_type())
    if node.operation == "gen_index":
        _check_index(node)
        axis = node.numbers["axis"]
        single = node.result.attributes.dim[axis] < dim[axis]
        made = builder.constant(0, Kind.INT32) if single else builder.position(axis)
    else:
        kind = _WHOLE.get(primitive_infer.compute_type(node, compute), Kind.FLOAT)
        operands = [known[t] for t in node.inputs.values()]
        made = builder.pointwise(node.operation, *operands, kind=kind, **node.numbers)
    if wanted is None:
        return made
    return made if builder.lines[made].kind is Kind.BOOLEAN else builder.cast(made, wanted)


def _check_index(node: PrimitiveNode) -> None:
    rank = len(node.inputs["input"].attributes.dim)
    if rank != 4:
        raise InvalidGraphError(
            f"{node} of score_mod indexes a tensor of {rank} axes; give one of (B, H, Sq, Skv), as "
            "scores have."
        )


def read_of(t: tensor) -> Read:
    """How a tensor of the graph is read."""
    it = t.attributes
    return Read(
        dtype=it.dtype,
        by_query=it.dim[2] > 1,
        by_key=it.dim[3] > 1,
        contiguous=it.dim[3] > 1 and it.stride[3] == 1,
        by_value=it.is_pass_by_value,
    )


def _linear_factor(node: AttentionNode, builder: Builder, d_score: int) -> int:
    """What ``score_mod_bprop`` multiplies the gradient by."""
    gradient = builder.gradient()
    factor = derivative(builder, d_score, gradient)
    rest = builder.substituted(d_score, {gradient: builder.constant(0.0)})
    if gradient in needed(builder.lines, factor) or builder.value(rest) != 0:
        raise cudnnGraphNotSupportedError(
            f"score_mod_bprop of {node.name!r} is not linear in the gradient that it is given; "
            "multiply that by what depends on scores and positions alone."
        )
    return factor


def _wanted(node: AttentionNode) -> dict[str, tensor]:
    """What gradients are wanted of, by their roles.

    Raises:
        cudnnGraphNotSupportedError: one is not of floats.
    """
    wanted = {
        gradient: node.inputs[role]
        for role, gradient in zip(SCORE_MOD_ROLES, SCORE_GRADIENT_ROLES, strict=True)
        if gradient in node.outputs
    }
    for t in wanted.values():
        if read_of(t).kind is not Kind.FLOAT:
            raise cudnnGraphNotSupportedError(
                f"{t.get_name()!r} in score_mod_gradients is {t.get_data_type()}, of which there "
                "is no gradient; leave it out, or give numbers of a float type."
            )
    return wanted


def _node_of(
    found: Found,
    builder: Builder,
    slope: int | None,
    given: Mapping[str, tensor],
    wanted: Mapping[str, tensor],
) -> AttentionNode:
    """The node with the rest of the program, if there is any, and the tensors that it reads.

    Args:
        given: role -> tensor, of all that the whole function reads.
        wanted: role of a gradient -> what it is of.
    """
    node, tensors = found.node, list(given.values())
    reads = [read_of(t) for t in tensors]
    others = {role: t for role, t in node.inputs.items() if role not in SCORE_MOD_ROLES}
    by = {role: tensors.index(t) for role, t in wanted.items() if t is not found.slopes}
    program, used = None, list[int]()
    if by or found.result != builder.score() or slope not in (None, builder.constant(1.0)):
        program, used = score_program(builder, found.result, slope, reads, [*by.values()])
    used_reads = dict(zip(SCORE_MOD_ROLES, (tensors[number] for number in used), strict=False))
    outputs = {role: t for role, t in node.outputs.items() if role not in SCORE_GRADIENT_ROLES}
    partials = {}
    for old in wanted:
        if old in by:
            number, partial = used.index(by[old]), slope_of(builder, found.result, by[old])
        else:
            # What slopes are multiplied by; a number that no read has.
            number = len(used)
            partial = builder.pointwise("sub", builder.position(3), builder.position(2))
        role = SCORE_GRADIENT_ROLES[number]
        partials[role] = partial_program(builder, partial, reads, used)
        outputs[role] = node.outputs[old]
    return replace(
        node,
        inputs={**others, **used_reads},
        outputs=outputs,
        score_mod=None,
        program=program,
        partials=dict(sorted(partials.items())),
    )
