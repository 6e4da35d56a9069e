"""From nodes to a problem: the only translator between the user's words and what plans know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dlattn import dtypes
from dlattn.dtypes import BOOLEANS, data_type
from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.dropout import dropout_numbers
from dlattn.graph.nodes import AttentionNode
from dlattn.graph.pages import is_paged, max_seq_kv
from dlattn.graph.ragged import has_ragged
from dlattn.graph.tensor import Attributes, Tensor, tensor
from dlattn.problem import (
    PAGE_TABLES,
    SCORE_GRADIENT_ROLES,
    SCORE_MOD_ROLES,
    Alibi,
    Band,
    BlockMask,
    Direction,
    Dropout,
    Edit,
    Geometry,
    GivenMask,
    Mask,
    Padding,
    Problem,
    Scale,
    ScoreGradient,
    SoftCap,
    TensorSpec,
    skipped_blocks,
)
from dlattn.problem.layout import (
    FARTHEST,
    IO_ROLES,
    WIDEST_ACCESS,
    bias_edit,
    canonical_stride,
    is_wide,
)
from dlattn.problem.problem import SCALAR_ROLES
from dlattn.records import dataclass
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.problem import Program

#: Roles whose element type is fp32, whatever the problem's is.
_FP32_ROLES = (
    *("attn_scale", "alibi_slopes", "score_max", "score_sum_exp", "sink_token", "dSink_token"),
    *("dropout_scale", "dropout_scale_inv", "rng_dump"),
)

#: Of those, results: the reference engine stores them as fp64, too, as it does stats.
_FP64_ROLES = ("score_max", "score_sum_exp", "rng_dump")

_SINK_ROLE = {Direction.FORWARD: "sink_token", Direction.BACKWARD: "dSink_token"}
_FLOATS = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE)
_INTEGERS = (data_type.INT32, data_type.INT64)
_FLOATS_AND_BOOLEANS = (*_FLOATS, *BOOLEANS)
_TYPES = {
    "stats": _FLOATS,
    "bias": _FLOATS_AND_BOOLEANS,
    "dropout_mask": _FLOATS_AND_BOOLEANS,
    **dict.fromkeys(("dBias", *SCORE_GRADIENT_ROLES), _FLOATS),
    **dict.fromkeys(SCORE_MOD_ROLES, (*_FLOATS_AND_BOOLEANS, *_INTEGERS, data_type.INT8)),
    "block_mask": (data_type.UINT8,),
    **dict.fromkeys(PAGE_TABLES.values(), (data_type.INT32,)),
}


@dataclass(frozen=True)
class HostNumber:
    """A number passed by value that plans do not read, because they know what it has to be.

    Attributes:
        wanted: what it has to be, in words.
        accepts: whether a number is that.
    """

    tensor: Tensor
    spec: TensorSpec
    wanted: str
    accepts: Callable[[float], bool]


@dataclass(frozen=True)
class Lowered:
    """A graph as plans see it.

    Attributes:
        problem: what is to be computed; of primitive operations that are no attention, a program.
        tensors: role -> graph tensor; the roles of ``geometry.tensors``.
        outputs: the roles that are written.
        transposed: the roles whose graph tensors have their last two axes swapped.
        numbers: what the graph takes for granted of numbers that packs hold.
    """

    problem: Problem | Program
    geometry: Geometry
    tensors: Mapping[str, tensor]
    outputs: frozenset[str]
    target: Target
    transposed: frozenset[str] = frozenset()
    numbers: tuple[HostNumber, ...] = ()

    @property
    def held(self) -> list[tensor]:
        """What packs hold, each once, whatever its roles."""
        numbers = (number.tensor for number in self.numbers)
        return [*dict.fromkeys((*self.tensors.values(), *numbers))]

    @property
    def model(self) -> tensor | None:
        """The input that outputs are allocated like: q, or the first that is in memory."""
        inputs = (t for role, t in self.tensors.items() if role not in self.outputs)
        return self.tensors.get("q") or next(
            (t for t in inputs if not t.get_is_pass_by_value()), None
        )


def lower(node: AttentionNode, target: Target, graph_compute_type: data_type) -> Lowered:
    """Translate one completed node (see :func:`dlattn.graph.infer.complete`).

    Raises:
        InvalidGraphError: a tensor has a type that its role cannot have, or is a host scalar.
        cudnnGraphNotSupportedError: mixed element types, or an accumulator that no plan has.
    """
    tensors = {role: t for role, t in node.tensors.items() if not t.get_is_virtual()}
    _check_types(node, tensors, target)
    _check_memory(node, tensors, target)
    if _drops_nothing(node):
        tensors = {role: t for role, t in tensors.items() if not role.startswith("dropout_")}
    q, v = tensors["q"].attributes, tensors["v"].attributes
    stats = tensors.get("stats")
    problem = Problem(
        direction=node.direction,
        dtype=q.dtype,
        head_dim_qk=q.dim[3],
        head_dim_v=v.dim[3],
        edits=_edits(node, tensors),
        masks=_masks(node, tensors, _compute_type(node, graph_compute_type)),
        stats=None if stats is None else stats.get_data_type(),
        score_max="score_max" in tensors,
        score_sum_exp="score_sum_exp" in tensors,
        sink=_SINK_ROLE[node.direction] in tensors,
        dropout=_dropout(node, tensors),
        paged_k=PAGE_TABLES["k"] in tensors,
        paged_v=PAGE_TABLES["v"] in tensors,
        d_bias=tensors["dBias"].get_data_type() if "dBias" in tensors else None,
        score_gradients=tuple(
            ScoreGradient(SCORE_GRADIENT_ROLES.index(role), tensors[role].get_data_type(), partial)
            for role, partial in node.partials.items()
        ),
        access_bytes=_access_bytes(tensors),
        compute=_compute_type(node, graph_compute_type),
        deterministic=node.deterministic,
        ragged=has_ragged(node),
    )
    diagonal = node.diagonal
    geometry = Geometry(
        tensors={
            role: spec_of(
                node.label(role),
                t.attributes,
                is_output=role in node.outputs,
                ragged=node.is_ragged(role),
            )
            for role, t in tensors.items()
        },
        attn_scale=node.attn_scale,
        band_left=_near(diagonal.left),
        band_right=_near(diagonal.right),
        bottom_right=diagonal.bottom_right,
        softcap=node.softcap,
        max_seq_kv=max_seq_kv(node) if is_paged(node) else None,
        most_tokens_q=node.max_total.get("max_total_seq_len_q"),
        most_tokens_kv=node.max_total.get("max_total_seq_len_kv"),
        **dropout_numbers(node.dropout),
    )
    outputs = frozenset(role for role in node.outputs if role in tensors)
    return Lowered(problem, geometry, tensors, outputs, target)


def spec_of(
    label: str, it: Attributes, is_output: bool = False, ragged: bool = False
) -> TensorSpec:
    """What plans know of a tensor with memory, under the user's name for it."""
    # A number cannot be written to, whatever a CPU tensor of one element was taken for.
    by_value = it.is_pass_by_value and not is_output
    stride, packed = canonical_stride(it.dim, it.stride), it.ragged_offset is not None
    if ragged:
        stride = (0, *stride[1:])
    return TensorSpec(label, it.dim, stride, it.dtype, by_value, ragged, packed and not ragged)


def _edits(node: AttentionNode, tensors: Mapping[str, tensor]) -> tuple[Edit, ...]:
    """In cuDNN's order: the scale, what bounds it, the user's function, what is added."""
    in_pack = "attn_scale" in tensors
    edits: list[Edit] = [Scale(positive=False) if in_pack else Scale.by(node.attn_scale)]
    if node.softcap is not None:
        edits.append(SoftCap())
    if node.program is not None:
        edits.append(node.program)
    if "bias" in tensors:
        it, seq_q = tensors["bias"].attributes, tensors["q"].attributes.dim[2]
        bias = bias_edit(it.dim, it.stride, it.dtype, it.alignment, seq_q)
        # Beside a program it is read element by element.
        edits.append(bias if node.program is None else replace(bias, aligned=False))
    if node.alibi or "alibi_slopes" in tensors:
        edits.append(Alibi(symmetric=not node.alibi))
    return tuple(edits)


def _masks(
    node: AttentionNode, tensors: Mapping[str, tensor], compute: data_type
) -> tuple[Mask, ...]:
    masks: list[Mask] = [Padding()]
    left, right = node.diagonal.left is not None, node.diagonal.right is not None
    if left or right:
        masks.append(Band(left, right, node.diagonal.corner_as_given))
    if "block_mask" in tensors:
        masks.append(BlockMask())
    if node.program is not None:
        double = data_type.DOUBLE in (compute, tensors["q"].get_data_type())
        blocks = skipped_blocks(node.program, double)
        masks.extend([] if blocks is None else [blocks])
    return tuple(masks)


def _drops_nothing(node: AttentionNode) -> bool:
    """Whether there is no dropout to compute; the keep mask may be wanted of a p of 0, too."""
    return node.dropout is None or (node.dropout.p == 0 and "rng_dump" not in node.outputs)


def _dropout(node: AttentionNode, tensors: Mapping[str, tensor]) -> Dropout | None:
    if node.dropout is None or _drops_nothing(node):
        return None
    if node.dropout.form is not None:
        return node.dropout.form
    mask = tensors["dropout_mask"].attributes
    return GivenMask(mask.dtype, contiguous=_is_contiguous(mask))


def _is_contiguous(it: Attributes) -> bool:
    """Along keys."""
    return it.dim[3] > 1 and it.stride[3] == 1


def _near(bound: int | None) -> int | None:
    return None if bound is None else max(-FARTHEST, min(bound, FARTHEST))


def _access_bytes(tensors: Mapping[str, tensor]) -> int:
    io = [tensors[role].attributes for role in IO_ROLES if role in tensors]
    return WIDEST_ACCESS if all(map(_is_wide, io)) else dtypes.itemsize(io[0].dtype)


def _is_wide(it: Attributes) -> bool:
    return is_wide(it.dim, it.stride, it.dtype, it.alignment, it.ragged_offset is not None)


def _check_types(node: AttentionNode, tensors: Mapping[str, tensor], target: Target) -> None:
    io_type = tensors["q"].get_data_type()
    for role, t in tensors.items():
        dtype = t.get_data_type()
        if role in IO_ROLES or role == "debug_softmax":
            if dtype is not io_type:
                raise cudnnGraphNotSupportedError(
                    f"{node.label(role)} is {dtype} and {node.label('q')} is {io_type}; plans take "
                    f"{', '.join(r for r in IO_ROLES if r in tensors)} of one type. Cast one, or "
                    "set_data_type() on the output."
                )
        elif role in _FP32_ROLES:
            # A number of the host's is read there, whatever its type.
            is_number = role in SCALAR_ROLES and t.get_is_pass_by_value() and dtype in _FLOATS
            may_be_double = role in _FP64_ROLES
            is_double = may_be_double and dtype is data_type.DOUBLE and target.kind == "cpu"
            if dtype is not data_type.FLOAT and not is_number and not is_double:
                more = f", or on the CPU as {data_type.DOUBLE}" if may_be_double else " only"
                raise cudnnGraphNotSupportedError(
                    f"{node.label(role)} is {dtype}; plans take {role} as {data_type.FLOAT}{more}."
                )
        elif dtype not in _TYPES.get(role, _INTEGERS):
            wanted = " or ".join(wanted.name for wanted in _TYPES.get(role, _INTEGERS))
            raise InvalidGraphError(f"{node.label(role)} is {dtype}; expected {wanted}.")
    if "dBias" in tensors and tensors["bias"].get_data_type() in BOOLEANS:
        raise cudnnGraphNotSupportedError(
            f"{node.label('bias')} is {tensors['bias'].get_data_type()}, a mask, which has no "
            f"gradient; leave out {node.label('dBias')}, or give a bias of numbers."
        )


def _check_memory(node: AttentionNode, tensors: Mapping[str, tensor], target: Target) -> None:
    if target.kind == "cpu":
        return
    for role, t in tensors.items():
        if t.get_is_pass_by_value() and role not in (*SCALAR_ROLES, *SCORE_MOD_ROLES):
            raise InvalidGraphError(
                f"{node.label(role)} is passed by value from the host, but {target} wants it in "
                "device memory; move it there."
            )


def _compute_type(node: AttentionNode, graph_type: data_type) -> data_type:
    asked = graph_type if node.compute_data_type is data_type.NOT_SET else node.compute_data_type
    if asked is data_type.NOT_SET:
        return data_type.FLOAT
    if asked in (data_type.FLOAT, data_type.DOUBLE):
        return asked
    raise cudnnGraphNotSupportedError(
        f"{node.operation} {node.name!r} has compute_data_type {asked}; plans accumulate in "
        f"{data_type.FLOAT}, or on the CPU in {data_type.DOUBLE}. Set one, or leave it unset."
    )
