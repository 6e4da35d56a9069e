"""Completing primitive nodes: shapes and types that the user left unset, and a check of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

from dlattn.dtypes import data_type, itemsize
from dlattn.errors import InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.tensor import check_number, packed_strides, tensor
from dlattn.graph.vocabulary import tensor_reordering
from dlattn.problem import POINTWISE, Arithmetic
from dlattn.problem.layout import in_order, overlaps

Dim = tuple[int, ...]

_FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
_INTEGERS = (data_type.INT8, data_type.UINT8, data_type.INT32, data_type.INT64, data_type.BOOLEAN)
_COMPUTES = (data_type.FLOAT, data_type.DOUBLE, data_type.INT32, data_type.INT64)

#: Operations that have results of integers, beside pointwise ones.
_MOVES = ("gen_index", "transpose", "reshape", "rng")


def complete(
    nodes: Iterable[PrimitiveNode],
    types: Mapping[str, data_type],
    known: frozenset[tensor] = frozenset(),
) -> None:
    """Set what was left out, node by node, and check the rest.

    Args:
        types: ``io_data_type``, ``intermediate_data_type`` and ``compute_data_type`` of the graph.
        known: what is complete, made by no node, and left as it is.

    Raises:
        InvalidGraphError: a shape is missing, or does not fit the others, or a type is missing.
        cudnnGraphNotSupportedError: a type that no engine computes in, or reordered storage.
    """
    nodes = list(nodes)
    for node in nodes:
        for t in set(node.tensors.values()) - known:
            t.attributes.forget_inferred()
    made = set(known)
    for node in nodes:
        for operand, t in node.inputs.items():
            if t not in made:
                _check_input(node, operand, types)
        for operand, dim in _results(node).items():
            _settle(node, operand, dim, types)
        made |= set(node.outputs.values())


def compute_type(node: PrimitiveNode, graph_type: data_type) -> data_type:
    """The type of a node's arithmetic.

    Raises:
        cudnnGraphNotSupportedError: no engine computes in the type that was asked for.
        InvalidGraphError: integers were asked for, of an operation or of operands without them.
    """
    asked = graph_type if node.compute_data_type is data_type.NOT_SET else node.compute_data_type
    operands = [t.get_data_type() for operand, t in node.inputs.items() if operand != "mask"]
    default = data_type.DOUBLE if data_type.DOUBLE in operands else data_type.FLOAT
    kind = _arithmetic(node)
    if node.operation in _MOVES or kind is Arithmetic.BOOLEANS:
        return default
    exact = kind in (Arithmetic.COMPARES, Arithmetic.MOVES)
    if exact and all(dtype in _INTEGERS for dtype in operands):
        return data_type.INT64
    # What is of one type is moved as it is.
    if asked is data_type.NOT_SET or (kind is Arithmetic.MOVES and len({*operands}) == 1):
        return default
    if asked not in _COMPUTES:
        raise cudnnGraphNotSupportedError(
            f"{node} has compute_data_type {asked}; engines compute in "
            f"{', '.join(dtype.name for dtype in _COMPUTES)}. Set one, or leave it unset."
        )
    if asked in _FLOATS:
        return data_type.DOUBLE if default is data_type.DOUBLE else asked
    wrong = [dtype.name for dtype in operands if dtype not in _INTEGERS]
    if wrong or kind is Arithmetic.FLOATS:
        reason = f"its operands are {', '.join(wrong)}" if wrong else "integers have no such result"
        raise InvalidGraphError(
            f"{node} has compute_data_type {asked}, but {reason}; compute in FLOAT."
        )
    return asked


def _arithmetic(node: PrimitiveNode) -> Arithmetic:
    if node.operation in POINTWISE:
        return POINTWISE[node.operation].arithmetic
    return Arithmetic.MOVES if node.operation in _MOVES else Arithmetic.FLOATS


def _check_input(node: PrimitiveNode, operand: str, types: Mapping[str, data_type]) -> None:
    it, label = node.inputs[operand].attributes, node.label(operand)
    if it.is_virtual:
        raise InvalidGraphError(
            f"{label} is virtual, but no node of the graph computes it; declare it with "
            "is_virtual=False and put its memory into the variant pack."
        )
    if not it.dim or len(it.dim) != len(it.stride) or min(it.dim) < 1:
        raise InvalidGraphError(
            f"{label} needs a dim of sizes of at least 1 and a stride of the same length; got dim "
            f"{it.dim} and stride {it.stride}."
        )
    check_number(label, it)
    if it.dtype is data_type.NOT_SET:
        if types["io_data_type"] is data_type.NOT_SET:
            _refuse_untyped(label)
        it.infer("dtype", types["io_data_type"])
    _check_storage(node, operand)


def _check_storage(node: PrimitiveNode, operand: str) -> None:
    it, label = node.tensors[operand].attributes, node.label(operand)
    itemsize(it.dtype)  # a type without storage is refused there
    opaque = (tensor_reordering.NONE, tensor_reordering.F16x16)
    if it.reordering_type not in opaque or it.vector_count != 1:
        raise cudnnGraphNotSupportedError(
            f"{label} has reordering {it.reordering_type} and vector count {it.vector_count}; "
            "engines read plain strided tensors only."
        )
    if it.ragged_offset is not None:
        raise cudnnGraphNotSupportedError(
            f"{label} has a ragged offset, which {node.operation} does not read; leave it out, or "
            "use sdpa."
        )
    used = [step for size, step in zip(it.dim, it.stride, strict=True) if size > 1]
    if used and min(used) < 0:
        raise InvalidGraphError(
            f"{label} has the negative stride {min(used)}; engines read forwards only, so flip the "
            "tensor into new memory."
        )


def _settle(
    node: PrimitiveNode, operand: str, dim: Dim | None, types: Mapping[str, data_type]
) -> None:
    """One output's shape, strides and type; of ``dim`` None, the shape is the user's to say."""
    it, label = node.outputs[operand].attributes, node.label(operand)
    if dim is None and not it.dim:
        raise InvalidGraphError(f"{label} has no shape, which {node} needs; call set_dim() on it.")
    if not it.dim:
        it.infer("dim", dim)
    if dim is not None and it.dim != dim:
        inputs = " and ".join(
            f"{node.label(name)} {t.attributes.dim}" for name, t in node.inputs.items()
        )
        raise InvalidGraphError(f"{label} has dim {it.dim}; expected {dim}, from {inputs}.")
    if not it.stride:
        it.infer("stride", packed_strides(it.dim))
    if len(it.stride) != len(it.dim) or min(it.dim) < 1:
        raise InvalidGraphError(
            f"{label} has stride {it.stride} for dim {it.dim}; expected one stride for each "
            "dimension, of sizes of at least 1."
        )
    compute = compute_type(node, types["compute_data_type"])
    if it.dtype is data_type.NOT_SET:
        it.infer("dtype", _result_type(node, it.is_virtual, compute, types))
    _check_storage(node, operand)
    _check_shape_given(node, operand)
    if not it.is_virtual and overlaps(it.dim, it.stride):
        raise InvalidGraphError(
            f"{label} is an output with dim {it.dim} and stride {it.stride}, in which elements may "
            "share an address; give it strides without overlap."
        )


def _result_type(
    node: PrimitiveNode, is_virtual: bool, compute: data_type, types: Mapping[str, data_type]
) -> data_type:
    asked = types["intermediate_data_type" if is_virtual else "io_data_type"]
    kind = _arithmetic(node)
    if node.operation in ("transpose", "reshape"):
        return node.inputs["input"].get_data_type()
    if is_virtual or asked is data_type.NOT_SET:
        if kind in (Arithmetic.COMPARES, Arithmetic.BOOLEANS):
            return data_type.BOOLEAN
        if node.operation == "gen_index":
            return data_type.INT32
    if asked is not data_type.NOT_SET:
        return asked
    if is_virtual or node.operation == "rng":
        return compute
    return next(iter(node.inputs.values())).get_data_type()


def _results(node: PrimitiveNode) -> dict[str, Dim | None]:
    """Output -> its shape, or None if the user must say it."""
    dims = {operand: t.attributes.dim for operand, t in node.inputs.items()}
    if node.operation in POINTWISE:
        return {"OUT_0": _broadcast(node, dims)}
    if node.operation == "matmul":
        return {"C": _product(node, dims["A"], dims["B"])}
    if node.operation == "gen_index":
        axis = node.numbers["axis"]
        if not 0 <= axis < len(dims["input"]):
            raise InvalidGraphError(
                f"{node} has axis {axis}; {node.label('input')} has dim {dims['input']}, so it "
                f"must be from 0 to {len(dims['input']) - 1}."
            )
        return {"OUT_0": dims["input"]}
    if node.operation == "transpose":
        permutation = node.numbers["permutation"]
        if len(permutation) != len(dims["input"]):
            raise InvalidGraphError(
                f"{node} has permutation {list(permutation)}; {node.label('input')} has dim "
                f"{dims['input']}, so it must have {len(dims['input'])} axes."
            )
        return {"Y": tuple(dims["input"][axis] for axis in permutation)}
    if node.operation == "softmax":
        return (
            {"S": dims["input"], "Stats": (*dims["input"][:-1], 1)}
            if "Stats" in (node.outputs)
            else {"S": dims["input"]}
        )
    if node.operation == "reduction":
        return {"Y": node.result.attributes.dim or dims["input"]}
    return {"Y": None}


def _broadcast(node: PrimitiveNode, dims: Mapping[str, Dim]) -> Dim:
    """Tensors of one element fit every rank; the others have one rank, and sizes of 1 fit all."""
    ranked = [dim for dim in dims.values() if math.prod(dim) > 1]
    if not ranked:
        inputs = [t.attributes for t in node.inputs.values()]
        return max((it.dim for it in inputs if it.value is None), key=len, default=inputs[0].dim)
    sizes = list(zip(*ranked, strict=True)) if len({*map(len, ranked)}) == 1 else []
    together = tuple(max(size) for size in sizes)
    if not sizes or any({*size} - {1, most} for size, most in zip(sizes, together, strict=True)):
        said = " and ".join(f"{node.label(operand)} {dim}" for operand, dim in dims.items())
        raise InvalidGraphError(
            f"{node} has operands that do not broadcast: {said}. Give sizes that are equal or 1."
        )
    return together


def _product(node: PrimitiveNode, a: Dim, b: Dim) -> Dim:
    fits = len(a) == len(b) >= 2 and a[-1] == b[-2]
    batches = list(zip(a[:-2], b[:-2], strict=False))
    if not fits or any(max(pair) % min(pair) for pair in batches):
        raise InvalidGraphError(
            f"{node} multiplies {node.label('A')} {a} by {node.label('B')} {b}; expected (..., M, "
            "K) and (..., K, N), with batch sizes that divide each other. Transpose one, or set "
            "other strides."
        )
    product = (*(max(pair) for pair in batches), a[-2], b[-1])
    for operand in set(node.inputs) - {"A", "B"}:
        it = node.inputs[operand].attributes
        ones = (1,) * (len(product) - 1)
        if it.dim not in ((1, *ones), (product[0], *ones)) or it.dtype not in _INTEGERS:
            raise InvalidGraphError(
                f"{node.label(operand)} has dim {it.dim} and is {it.dtype}; {operand} must be "
                f"integers of {(product[0], *ones)}."
            )
    return product


def _check_shape_given(node: PrimitiveNode, operand: str) -> None:
    """What only the result's shape says: which axes are reduced, what is reshaped or drawn."""
    it, label = node.outputs[operand].attributes, node.label(operand)
    if node.operation == "reduction":
        given = node.inputs["input"].attributes.dim
        if len(it.dim) != len(given) or any(
            whole % size for size, whole in zip(it.dim, given, strict=True)
        ):
            raise InvalidGraphError(
                f"{label} has dim {it.dim}; expected {given}, with 1 for each axis to reduce, or a "
                "divisor for an axis of which neighbours are reduced."
            )
    if node.operation == "reshape":
        given = node.inputs["input"].attributes.dim
        if math.prod(it.dim) != math.prod(given):
            raise InvalidGraphError(
                f"{label} has dim {it.dim}, which is not as many elements as "
                f"{node.label('input')} has, of dim {given}."
            )
        if node.numbers["mode"] == "VIEW_ONLY":
            _check_view(node, operand)
    if node.operation == "rng":
        if len(it.dim) != 4:
            raise InvalidGraphError(f"{label} has dim {it.dim}; expected (B, H, Sq, Skv).")
        for name, t in node.inputs.items():
            whole = (data_type.INT32, data_type.INT64)
            if t.attributes.elements != 1 or t.get_data_type() not in whole:
                raise InvalidGraphError(
                    f"{node.label(name)} has dim {t.attributes.dim} and is {t.get_data_type()}; "
                    "expected one INT32 or INT64."
                )


def _check_view(node: PrimitiveNode, operand: str) -> None:
    """A view reaches no further than its input does, and reads nothing between its elements: of a
    virtual input, there is nothing."""
    of, view = node.inputs["input"].attributes, node.outputs[operand].attributes
    runs = in_order(of.dim, of.stride)
    has_gaps = len(runs) > 1 or any(step > 1 for _, step in runs)
    if has_gaps and in_order(view.dim, view.stride) != runs:
        raise InvalidGraphError(
            f"{node.label(operand)} has dim {view.dim} and stride {view.stride}, which is no order "
            f"of the elements of {node.label('input')}, of dim {of.dim} and stride {of.stride}, "
            "between which are others; set strides that leave each where it is, or "
            "reshape_mode=LOGICAL."
        )
    last = [
        sum((size - 1) * step for size, step in zip(it.dim, it.stride, strict=True))
        for it in (of, view)
    ]
    if last[1] > last[0]:
        raise InvalidGraphError(
            f"{node.label(operand)} has dim {view.dim} and stride {view.stride}, which leaves the "
            f"memory of {node.label('input')}; set other strides, or reshape_mode=LOGICAL."
        )


def _refuse_untyped(label: str) -> NoReturn:
    raise InvalidGraphError(
        f"{label} has no data type; set it on the tensor, or set the graph's io_data_type."
    )
