"""What an operation's result means inside the backward of an attention.

Beside the readers of a forward, in the order of cuDNN's flash backward, or of its Mha-bprop: the
probabilities, dV, their gradient, sums of rows, the gradient of scores, dBias, dQ and dK.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dlattn.graph.primitives import readers
from dlattn.graph.primitives.fuse import is_opaque
from dlattn.graph.primitives.gradients import (
    Centered,
    Delta,
    LessStats,
    Meaning,
    OfBias,
    OfProbabilities,
    OfScores,
    Probabilities,
    Products,
    Result,
    Signs,
    Stored,
)
from dlattn.graph.primitives.meanings import Drawn, Factor, Given, Misfit, Scores
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import COL, ROW, Predicate
from dlattn.graph.primitives.readers import (
    FLOATS,
    is_keep_mask,
    is_one,
    predicate,
    swaps,
    with_scale_last,
)
from dlattn.graph.tensor import Tensor, packed_strides

#: What numbers may multiply.
_SCALED = (Probabilities, OfProbabilities, Delta, Centered, OfScores, Result)

#: Which lengths the actual sizes are, of the product that makes a gradient.
_SIDES = {
    "dQ": {"m_override": "q", "k_override": "kv"},
    "dK": {"m_override": "kv", "k_override": "q"},
    "dV": {"m_override": "kv", "k_override": "q"},
}


def meaning(node: PrimitiveNode, *operands: Any) -> Meaning:
    """What the first result of a node means.

    Raises:
        Misfit: nothing.
    """
    reader = _READERS.get(node.operation)
    found = reader(node, *operands) if reader else None
    if found is None:
        return readers.meaning(node, *operands)
    _check_dim(node, found)
    return found


def _check_dim(node: PrimitiveNode, means: Any) -> None:
    """Nothing broadcasts to anything larger."""
    wanted = getattr(means, "dim", None)
    dim = node.result.attributes.dim
    if wanted is not None and not isinstance(means, Result) and dim != wanted:
        raise Misfit(node, f"makes {dim} of {wanted}; give operands of those sizes.")


def _stored(x: Any) -> Any:
    """Probabilities, of a tensor that is S."""
    if isinstance(x, Given) and is_opaque(x.tensor):
        return Probabilities(Stored(x.tensor), None, x.scales, x.transposed, signed=True)
    return x


def _gradient(x: Any) -> Any:
    """The product of dO and v, which the readers of a forward take for one of q and k."""
    if isinstance(x, Scores) and x.bias is None and x.keep == Predicate():
        return OfProbabilities(x.q, x.k, None, x.scales, lengths=x.lengths)
    return x


def _matmul(node: PrimitiveNode, a: Any, b: Any, *overrides: Any) -> Result | None:
    a = _stored(a)
    if not isinstance(a, (Probabilities, OfScores)):
        return None
    is_dv = isinstance(a, Probabilities)
    if not isinstance(b, Given) or a.transposed < is_dv:
        wanted = "transposed probabilities by dO" if is_dv else "gradients of scores by k or q"
        raise Misfit(node, f"multiplies something else than {wanted}.")
    role = "dV" if is_dv else "dK" if a.transposed else "dQ"
    dims = (node.inputs["A"], node.inputs["B"], node.result)
    first, second, product = (t.attributes.dim for t in dims)
    if len(product) != 4 or first[:2] != product[:2] or second[0] != product[0]:
        raise Misfit(node, f"multiplies {first} by {second}; the second may have fewer heads only.")
    lengths = []
    for operand, t in list(node.inputs.items())[2:]:
        side = _SIDES[role].get(operand)
        if side is None:
            raise Misfit(node, f"is given {operand}; the head dimension has one size.")
        lengths.append((side, t))
    if "m_override" in node.inputs and node.numbers["padding"] != 0:
        raise Misfit(node, f"pads {role} with something else than 0.")
    return Result(role, a, b, (), tuple(lengths))


def _mul(node: PrimitiveNode, a: Any, b: Any) -> Meaning | None:
    a, b = with_scale_last(_stored(a), _stored(b))
    if is_one(b) and isinstance(a, _SCALED):
        return _scaled(a, Factor(b.tensor))
    if is_one(b):
        return None
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Drawn) or (isinstance(y, Given) and is_keep_mask(node, y)):
            x = _gradient(x)
            if isinstance(x, (Probabilities, OfProbabilities)):
                return _dropped(node, x, y)
        if isinstance(x, Probabilities) and isinstance(_gradient(y), OfProbabilities):
            return _checked(node, x, Products((x, _gradient(y))))
        if isinstance(x, Probabilities) and isinstance(y, Centered):
            return _checked(node, x, OfScores(x, y))
    if isinstance(a, Given) and isinstance(b, Given) and a.is_plain and b.is_plain:
        if len(a.tensor.attributes.dim) == 4 and a.tensor.attributes.dim == b.tensor.attributes.dim:
            return Products((a.tensor, b.tensor))
    return None


def _checked(node: PrimitiveNode, x: Probabilities, means: Any) -> Any:
    if x.dim != node.result.attributes.dim or x.transposed:
        raise Misfit(node, f"multiplies probabilities of {x.dim} by something else than as many.")
    return means


def _dropped(node: PrimitiveNode, x: Any, mask: Any) -> Any:
    if x.mask is not None or (isinstance(x, Probabilities) and x.transposed):
        raise Misfit(node, "multiplies by a mask what is transposed, or dropped already.")
    return replace(x, mask=mask)


def _scaled(x: Any, factor: Factor) -> Any:
    return replace(x, scales=(*x.scales, factor))


def _div(node: PrimitiveNode, a: Any, b: Any) -> Meaning | None:
    a = _stored(a)
    if is_one(b) and isinstance(a, _SCALED) and b.tensor.attributes.value is not None:
        return _scaled(a, Factor(b.tensor, inverse=True))
    return None


def _sub(node: PrimitiveNode, a: Any, b: Any) -> Meaning | None:
    if isinstance(b, Delta) and isinstance(_gradient(a), OfProbabilities):
        return Centered(_gradient(a), b)
    if not isinstance(a, Scores) or not isinstance(b, Given) or not b.is_plain:
        return None
    it = b.tensor.attributes
    if it.dim != (*a.dim[:3], 1) or it.value is not None or it.dtype not in FLOATS:
        return None
    return LessStats(a, b.tensor)


def _exp(node: PrimitiveNode, x: Any) -> Probabilities | None:
    return Probabilities(x) if isinstance(x, LessStats) else None


def _reduction(node: PrimitiveNode, x: Any) -> Meaning | None:
    if not isinstance(x, (Products, OfScores, Result)):
        return None
    before, after = node.inputs["input"].attributes.dim, node.result.attributes.dim
    if node.numbers["mode"] != "ADD":
        raise Misfit(node, "reduces by something else than a sum, as gradients are.")
    if isinstance(x, Products):
        if after != (*before[:-1], 1):
            raise Misfit(node, f"sums {before} to {after}; a softmax's backward sums rows.")
        return Delta(x)
    if isinstance(x, Result):
        if not _sums_neighbours(before, after):
            raise Misfit(
                node,
                f"sums {before} to {after}; gradients are summed over heads that lie side by side.",
            )
        return x
    if x.transposed:
        raise Misfit(node, "sums what is transposed; sum the gradient of scores as it is.")
    return OfBias(x)


def _sums_neighbours(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether heads, on any number of axes, are summed to those that share a k or v."""
    heads = list(zip(before[1:-2], after[1:-2], strict=True))
    whole = next((i for i, (n, m) in enumerate(heads) if n != m), len(heads))
    rest = (before[0], *before[-2:]) == (after[0], *after[-2:])
    return rest and all(m == 1 for _, m in heads[whole + 1 :])


def _divides_heads(node: PrimitiveNode) -> bool:
    """Whether a reshape divides, or joins, the axes of heads and leaves the others."""
    before, after = node.inputs["input"].attributes, node.result.attributes
    kept = all(
        it.stride == packed_strides(it.dim) or node.numbers["mode"] == "LOGICAL"
        for it in (before, after)
    )
    same = (before.dim[0], *before.dim[-2:]) == (after.dim[0], *after.dim[-2:])
    return kept and same and min(len(before.dim), len(after.dim)) >= 4


def _reshape(node: PrimitiveNode, x: Any) -> Meaning | None:
    if isinstance(x, Result):
        if not _divides_heads(node):
            raise Misfit(node, "moves more than the heads of a gradient.")
        return x
    return _transpose(node, x)


def _transpose(node: PrimitiveNode, x: Any) -> Meaning | None:
    if isinstance(x, (Probabilities, OfScores)):
        if not swaps(node):
            raise Misfit(node, "moves something else than the last two axes.")
        return replace(x, transposed=not x.transposed)
    return None


def _abs(node: PrimitiveNode, x: Any) -> Probabilities | None:
    """Of S, without the signs that are a mask; in dV, the probabilities that are kept."""
    x = _stored(x)
    is_s = isinstance(x, Probabilities) and isinstance(x.of, Stored)
    return replace(x, signed=False) if is_s else None


def _relu(node: PrimitiveNode, x: Any) -> Probabilities | None:
    x = _stored(x)
    if not isinstance(x, Probabilities) or not isinstance(x.of, Stored) or node.numbers:
        return None
    return replace(x, mask=Signs(x.of.s), signed=False)


def _cmp_gt(node: PrimitiveNode, x: Any, y: Any) -> Signs | None:
    is_s = isinstance(x, Given) and is_opaque(x.tensor) and x.is_plain
    return Signs(x.tensor, _zeros(y)) if is_s and _is_zero(y) else None


def _is_zero(x: Any) -> bool:
    """A number that is 0, or that packs hold."""
    value = x.tensor.attributes.value if is_one(x) else None
    return bool(value == 0 if value is not None else is_one(x) and _zeros(x))


def _zeros(x: Given) -> tuple[Tensor, ...]:
    in_pack = x.tensor.get_is_pass_by_value() and x.tensor.attributes.value is None
    return (x.tensor,) if in_pack else ()


def _select(node: PrimitiveNode, x: Any, y: Any, mask: Any) -> Meaning | None:
    """What is dropped, or masked once more, is 0."""
    is_negated = _is_zero(x)
    if is_negated:
        x, y = y, x
    # Scores, too, may be masked by a number that packs hold.
    is_known = not isinstance(x, Scores) or isinstance(mask, Signs) or not _zeros(y)
    x = _gradient(_stored(x))
    if not isinstance(x, (Probabilities, OfProbabilities, OfScores)):
        return None
    if not _is_zero(y) or not is_known:
        return None
    if isinstance(mask, Signs) and not is_negated and not isinstance(x, OfScores):
        return replace(_dropped(node, x, mask), zeros=(*x.zeros, *mask.zeros, *_zeros(y)))
    keep = predicate(mask)
    keep = keep.negated() if keep and is_negated else keep
    is_plain = not getattr(x, "transposed", False)
    if keep is None or not (keep.every or keep.is_single) or not is_plain:
        raise Misfit(node, "selects by what is no mask that fused kernels know.")
    together = x.keep.joined(replace(keep, every=True), every=True)
    assert together is not None
    return replace(x, keep=together, zeros=(*x.zeros, *_zeros(y)))


def _gen_index(node: PrimitiveNode, x: Any) -> Meaning | None:
    """Positions are those of scores, whatever they are taken of."""
    x, axis = _stored(x), node.numbers["axis"]
    if not isinstance(x, (Probabilities, OfProbabilities, OfScores)) or axis not in (2, 3):
        return None
    return ROW if (axis == 2) != getattr(x, "transposed", False) else COL


_READERS: dict[str, Callable[..., Meaning | None]] = {
    "matmul": _matmul,
    "mul": _mul,
    "scale": _mul,
    "div": _div,
    "sub": _sub,
    "exp": _exp,
    "reduction": _reduction,
    "transpose": _transpose,
    "reshape": _reshape,
    "abs": _abs,
    "relu": _relu,
    "cmp_gt": _cmp_gt,
    "binary_select": _select,
    "gen_index": _gen_index,
}
