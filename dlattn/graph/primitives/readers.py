"""What an operation's result means inside an attention, by what its operands mean.

The order is that of cuDNN's Mha-fprop: scale, bias, masks, softmax, dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from dlattn.dtypes import BOOLEANS, data_type
from dlattn.graph.primitives.meanings import (
    Drawn,
    Factor,
    Given,
    Meaning,
    Misfit,
    OfScores,
    Output,
    Scores,
    Weights,
)
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import COL, ROW, Affine, Predicate, comparison
from dlattn.problem.layout import canonical_stride

FLOATS = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)
INTEGERS = (data_type.INT32, data_type.INT64)

#: Scores at most this are masked: their weights are 0 beside any other.
MASKED = -1e4

#: Steps of a softmax: (operation, its operand) -> its result.
_SOFTMAX = {
    ("exp", "shifted"): "exp",
    ("reciprocal", "sum"): "inverse",
    ("log", "sum"): "log",
}


def meaning(node: PrimitiveNode, *operands: Meaning) -> Meaning:
    """What the first result of a node means.

    Raises:
        Misfit: nothing.
    """
    return _READERS.get(node.operation, _unknown)(node, *operands)


def _refuse(node: PrimitiveNode, why: str) -> NoReturn:
    raise Misfit(node, why)


def _unknown(node: PrimitiveNode, *operands: Meaning) -> NoReturn:
    _refuse(
        node,
        "is no part of attention as fused kernels know it: matmul, scale, bias, masks, softmax, "
        "dropout, matmul.",
    )


def is_one(x: Any) -> bool:
    """A number of the user's."""
    return isinstance(x, Given) and x.is_plain and x.tensor.attributes.elements == 1


def with_scale_last(a: Any, b: Any) -> tuple[Any, Any]:
    """Two factors, the scale behind the other. Of two tensors of one element, as a q may be, it is
    the second, unless the first is a number that the graph knows: no pack would hold that as q."""
    both = is_one(a) and is_one(b)
    swapped = is_one(a) and (not both or a.tensor.attributes.value is not None)
    return (b, a) if swapped else (a, b)


#: Which lengths of scores the actual sizes are, of the product with k and of that with v.
_SIDES = (
    {"m_override": "q", "n_override": "kv"},
    {"m_override": "q", "k_override": "kv"},
)


def _matmul(node: PrimitiveNode, a: Meaning, b: Meaning, *overrides: Meaning) -> Meaning:
    if not isinstance(b, Given) or not isinstance(a, (Given, Weights)):
        _refuse(node, "multiplies neither q by k nor a softmax by v.")
    first, second, product = (
        t.attributes.dim for t in (node.inputs["A"], node.inputs["B"], node.result)
    )
    if len(product) != 4 or first[:2] != product[:2] or second[0] != product[0]:
        _refuse(
            node,
            f"multiplies {first} by {second}; fused kernels take (B, H, ., .), where the second "
            "may have fewer heads only.",
        )
    lengths = []
    for operand, t in list(node.inputs.items())[2:]:
        side = _SIDES[isinstance(a, Weights)].get(operand)
        if side is None:
            _refuse(node, f"is given {operand}; the head dimension has one size.")
        lengths.append((side, t))
    if isinstance(a, Weights):
        if not b.is_plain:
            _refuse(node, "takes a v that is transposed or scaled; give v as it is.")
        if a.scales and a.mask is None:
            _refuse(node, "takes weights that are scaled without dropout.")
        if "m_override" in node.inputs and node.numbers["padding"] != 0:
            _refuse(node, "pads o with something else than 0.")
        return Output(a, b, tuple(lengths))
    if a.transposed:
        _refuse(node, "takes a q that is transposed; give q as (B, H, Sq, D).")
    for given in (a, b):
        if given.tensor.get_data_type() not in FLOATS:
            _refuse(node, f"multiplies {given.tensor.get_data_type()}; q and k must be floats.")
    scales = a.scales + b.scales
    q, k = replace(a, scales=()), replace(b, scales=())
    return Scores(q, k, scales, lengths=tuple(lengths))


def _mul(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    if isinstance(b, (Weights, OfScores)):
        a, b = b, a
    a, b = with_scale_last(a, b)
    if is_one(b):
        assert isinstance(b, Given)
        return _scaled(node, a, Factor(b.tensor))
    if isinstance(a, Weights) and isinstance(b, (Drawn, Given)):
        if a.mask is None and (isinstance(b, Drawn) or is_keep_mask(node, b)):
            return replace(a, mask=b)
        _refuse(
            node,
            "multiplies weights by something else than a mask of booleans, or of floats with one "
            "for each key.",
        )
    pair = [x.what for x in (a, b) if isinstance(x, OfScores)]
    if sorted(pair) == ["exp", "inverse"]:
        return _softmax_of(node, a, b)
    _refuse(
        node,
        "multiplies by a tensor; before a softmax fused kernels multiply by one number only, and "
        "mask by binary_select.",
    )


def is_keep_mask(node: PrimitiveNode, x: Given) -> bool:
    """Whether it may be what a node multiplies probabilities by, to drop some. Floats that are one
    for all keys are a factor of rows or heads."""
    it = x.tensor.attributes
    if not x.is_plain or len(it.dim) != 4:
        return False
    return it.dtype in BOOLEANS or (
        it.dtype in FLOATS and it.dim[3] == node.result.attributes.dim[3]
    )


def _div(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    if is_one(b):
        assert isinstance(b, Given)
        if b.tensor.attributes.value is None:
            _refuse(node, "divides by a number that is not known yet; use tensor_scalar, or mul.")
        return _scaled(node, a, Factor(b.tensor, inverse=True))
    pair = [x.what for x in (a, b) if isinstance(x, OfScores)]
    if pair == ["exp", "sum"]:
        return _softmax_of(node, a, b)
    _refuse(node, "divides neither by a number nor exponentials by their sum.")


def _scaled(node: PrimitiveNode, x: Meaning, factor: Factor) -> Meaning:
    if isinstance(x, Scores) and (x.bias is not None or x.keep != Predicate()):
        _refuse(node, "scales scores after a bias or a mask; scale before them.")
    if not isinstance(x, (Given, Scores, Weights)):
        _refuse(node, "scales neither q, k, scores nor weights.")
    return replace(x, scales=(*x.scales, factor))


def _softmax_of(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    assert isinstance(a, OfScores) and isinstance(b, OfScores)
    if a.scores is not b.scores:
        _refuse(node, "divides exponentials by the sum of others.")
    return Weights(a.scores)


def _add(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    if isinstance(a, OfScores) and isinstance(b, OfScores) and a.scores is b.scores:
        if {a.what, b.what} == {"max", "log"}:
            return OfScores("stats", a.scores)
    expressions = _position(a, node), _position(b, node)
    if expressions[0] is not None and expressions[1] is not None:
        return expressions[0].plus(expressions[1])
    if isinstance(b, Scores):
        a, b = b, a
    if not isinstance(a, Scores) or not isinstance(b, Given):
        _refuse(node, "adds neither a bias to scores nor positions.")
    it = b.tensor.attributes
    if a.keep != Predicate() or a.bias is not None:
        _refuse(node, "adds to scores after a mask or another bias; add one bias before masks.")
    if not b.is_plain or len(it.dim) != 4 or it.value is not None or it.dtype not in FLOATS:
        _refuse(
            node,
            f"adds {b.tensor.get_name() or 'a tensor'} of dim {it.dim}; a bias is a tensor of "
            "floats that broadcasts to (B, H, Sq, Skv).",
        )
    return replace(a, bias=b.tensor)


def _sub(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    if isinstance(a, Scores) and isinstance(b, OfScores) and b.what == "max" and b.scores is a:
        return OfScores("shifted", b.scores)
    expressions = _position(a, node), _position(b, node)
    if expressions[0] is not None and expressions[1] is not None:
        return expressions[0].plus(expressions[1], -1)
    _refuse(node, "subtracts neither the maximum of a row from its scores nor positions.")


def _position(x: Meaning, node: PrimitiveNode) -> Affine | None:
    """A position, a whole number that the graph knows, or lengths (B, 1, 1, 1)."""
    if isinstance(x, Affine) or not isinstance(x, Given) or not x.is_plain:
        return x if isinstance(x, Affine) else None
    it = x.tensor.attributes
    if it.value is not None:
        return Affine(const=int(it.value)) if float(it.value).is_integer() else None
    is_length = it.dim[1:] == (1, 1, 1) and it.dtype in INTEGERS
    return Affine(lengths={x.tensor: 1}) if is_length else None


def _compare(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    x, y = _position(a, node), _position(b, node)
    if x is None or y is None:
        _refuse(node, "compares something else than positions, lengths and whole numbers.")
    found = comparison(node.operation, x, y)
    if found is None:
        _refuse(node, "tests for equality; masks of fused kernels are ranges of positions.")
    return found


def _logical(node: PrimitiveNode, a: Meaning, b: Meaning) -> Meaning:
    x, y = predicate(a), predicate(b)
    joined = x and y and x.joined(y, every=node.operation == "logical_and")
    if joined is None:
        _refuse(node, "joins what is no mask that fused kernels know.")
    return joined


def _logical_not(node: PrimitiveNode, x: Meaning) -> Meaning:
    keep = predicate(x)
    negated = None if keep is None else keep.negated()
    if negated is None:
        _refuse(node, "negates what is no comparison of positions; give the mask negated.")
    return negated


def predicate(x: Meaning) -> Predicate | None:
    """A mask, of positions or of the user's."""
    if isinstance(x, Given) and x.is_plain and x.tensor.get_data_type() in BOOLEANS:
        return Predicate(masks=(x.tensor,)) if len(x.tensor.attributes.dim) == 4 else None
    return x if isinstance(x, Predicate) else None


def _select(node: PrimitiveNode, x: Meaning, y: Meaning, mask: Meaning) -> Meaning:
    keep = predicate(mask)
    if isinstance(y, Scores):
        x, y = y, x
        keep = None if keep is None else keep.negated()
    if not isinstance(x, Scores) or not isinstance(y, Given):
        _refuse(node, "selects something else than scores and a number.")
    if keep is None or not (keep.every or keep.is_single):
        _refuse(node, "selects by what is no mask that fused kernels know.")
    it = y.tensor.attributes
    if not is_one(y) or not (it.value is not None or it.is_pass_by_value):
        _refuse(node, "masks with a tensor; give a tensor_scalar, or a number passed by value.")
    if it.value is not None and not it.value <= MASKED:
        _refuse(node, f"masks with {it.value}; masked scores must be at most {MASKED:g}.")
    together = x.keep.joined(replace(keep, every=True), every=True)
    assert together is not None
    fills = x.fills if it.value is not None else (*x.fills, y.tensor)
    return replace(x, keep=together, fills=fills)


def _reduction(node: PrimitiveNode, x: Meaning) -> Meaning:
    dim = node.inputs["input"].attributes.dim
    if node.result.attributes.dim == (*dim[:-1], 1):
        if isinstance(x, Scores) and node.numbers["mode"] == "MAX":
            return OfScores("max", x)
        if isinstance(x, OfScores) and x.what == "exp" and node.numbers["mode"] == "ADD":
            return OfScores("sum", x.scores)
    _refuse(node, "reduces neither scores to the maximum of a row nor exponentials to their sum.")


def _softmax(node: PrimitiveNode, x: Meaning) -> Meaning:
    if not isinstance(x, Scores):
        _refuse(node, "is no softmax of scores.")
    return Weights(x)


def _unary(node: PrimitiveNode, x: Meaning) -> Meaning:
    if not isinstance(x, OfScores) or (node.operation, x.what) not in _SOFTMAX:
        _unknown(node)
    return OfScores(_SOFTMAX[node.operation, x.what], x.scores)


def _identity(node: PrimitiveNode, x: Meaning) -> Meaning:
    return x


def _gen_index(node: PrimitiveNode, x: Meaning) -> Meaning:
    axis = node.numbers["axis"]
    if not isinstance(x, Scores) or axis not in (2, 3):
        _refuse(node, "makes positions of something else than queries (axis 2) or keys (axis 3).")
    return ROW if axis == 2 else COL


def _transpose(node: PrimitiveNode, x: Meaning) -> Meaning:
    if not isinstance(x, Given) or not swaps(node):
        _refuse(node, "moves something else than the last two axes of k.")
    return replace(x, transposed=not x.transposed)


def swaps(node: PrimitiveNode) -> bool:
    """Whether the last two of four axes are swapped."""
    order = (0, 1, 3, 2)
    if node.operation == "transpose":
        return bool(node.numbers["permutation"] == order)
    before, after = node.inputs["input"].attributes, node.result.attributes
    return (
        node.numbers["mode"] == "VIEW_ONLY"
        and len(before.dim) == 4
        and after.dim == tuple(before.dim[axis] for axis in order)
        and canonical_stride(after.dim, after.stride)
        == canonical_stride(after.dim, tuple(before.stride[axis] for axis in order))
    )


def _rng(node: PrimitiveNode, *seeds: Meaning) -> Meaning:
    return Drawn(node)


_READERS: dict[str, Callable[..., Meaning]] = {
    "matmul": _matmul,
    "mul": _mul,
    "scale": _mul,
    "div": _div,
    "add": _add,
    "bias": _add,
    "sub": _sub,
    **dict.fromkeys(("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"), _compare),
    "logical_and": _logical,
    "logical_or": _logical,
    "logical_not": _logical_not,
    "binary_select": _select,
    "reduction": _reduction,
    "softmax": _softmax,
    **dict.fromkeys((name for name, _ in _SOFTMAX), _unary),
    "identity": _identity,
    "gen_index": _gen_index,
    "transpose": _transpose,
    "reshape": _transpose,
    "rng": _rng,
}
