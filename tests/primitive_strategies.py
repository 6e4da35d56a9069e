"""Random graphs of primitive operations; :mod:`tests.strategies` has those of whole attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dlattn.problem import POINTWISE
from tests.mha import Mha
from tests.mha_backward import MhaBackward
from tests.primitives import EVERY, Single
from tests.score_mods import Tree, reads_score

#: Element types and longest sequences.
_PROFILES = {
    "cpu": (("float16", "bfloat16", "float32", "float64"), 20),
    "gpu": (("float16", "bfloat16"), 300),
}
_BOUNDS = st.none() | st.integers(0, 12)


@st.composite
def mhas(draw: st.DrawFn, profile: str = "cpu", **fixed: Any) -> Mha:
    """Any attention of primitive operations; ``fixed`` pins fields."""
    dtypes, longest = _PROFILES[profile]
    heads_k, heads_v, groups = (draw(st.sampled_from((1, 2))) for _ in range(3))
    drawn: dict[str, Any] = {
        "dtype": draw(st.sampled_from(dtypes)),
        "batch": draw(st.integers(1, 3)),
        "heads_q": heads_k * heads_v * groups,
        "heads_k": heads_k,
        "heads_v": heads_v,
        "seq_q": draw(st.integers(1, longest)),
        "seq_kv": draw(st.integers(1, longest)),
        "head_dim_qk": draw(st.sampled_from((8, 16, 64))),
        "head_dim_v": draw(st.sampled_from((8, 24, 64))),
        "k": draw(st.sampled_from(("declared", "transpose", "reshape"))),
        "scale": draw(st.sampled_from((None, "q", "k", "scores"))),
        "scale_by": draw(st.sampled_from(("constant", "value", "div"))),
        "bias": draw(st.none() | st.tuples(*4 * [st.booleans()])),
        "padding": draw(st.sampled_from(("", "", "q", "k", "qk"))),
        "overrides": draw(st.booleans()),
        "causal": draw(_BOUNDS),
        "window": draw(st.none() | st.integers(1, 12)),
        "bottom_right": draw(st.booleans()),
        "mask": draw(st.booleans()),
        "mask_keys": draw(st.sampled_from((False, False, True))),
        "joined": draw(st.booleans()),
        "softmax": draw(st.sampled_from(("primitives", "node"))),
        "dropout": draw(st.sampled_from((None, "rng", "mask"))),
        "fill": draw(st.sampled_from(("-1e20", "-inf", "value"))),
        "stats": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    case = Mha(**{**drawn, **fixed})
    # A mask of one element is a scale, too.
    alone = case.dropout == "mask" and case.scores_dim == (1, 1, 1, 1)
    return replace(case, seq_kv=2) if alone else case


@st.composite
def backwards(draw: st.DrawFn, profile: str = "cpu", **fixed: Any) -> MhaBackward:
    """Any backward of primitive operations; ``fixed`` pins fields of the attention."""
    ways = st.sampled_from(("declared", "transpose", "reshape"))
    return MhaBackward(
        of=draw(mhas(profile, **fixed)),
        v=draw(ways),
        late=draw(st.booleans()),
        by=draw(st.sampled_from(("transpose", "reshape"))),
        d_bias=draw(st.booleans()),
        again=draw(st.booleans()),
        delta=draw(st.sampled_from(("o", "p"))),
    )


@st.composite
def singles(draw: st.DrawFn) -> Single:
    """Any pointwise operation, on tensors that broadcast."""
    operation = draw(st.sampled_from(sorted(EVERY)))
    count = len(POINTWISE[operation].operands)
    dim = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    ones = st.tuples(*len(dim) * [st.booleans()])
    dims = [
        tuple(1 if one else size for one, size in zip(draw(ones), dim, strict=True))
        for _ in range(count)
    ]
    floats = st.sampled_from(("float16", "bfloat16", "float32", "float64"))
    types = [draw(floats) for _ in range(count + 1)]
    if operation.startswith("logical"):
        types = ["bool"] * (count + 1)
    elif operation.startswith("cmp"):
        types[-1] = draw(st.sampled_from(("bool", "float32")))
        if draw(st.booleans()):
            types[:2] = ["int32", "int32"]
    elif operation == "binary_select":
        types[2] = "bool"
    numbers = {}
    for name, least, most in _NUMBERS.get(operation.removesuffix("_backward"), ()):
        if name == "negative_slope" and "leaky" in operation or draw(st.booleans()):
            numbers[name] = draw(st.sampled_from((least, most)))
    return Single(
        operation,
        tuple(dims),
        tuple(types),
        scalar=count == 2 and types[1] in ("float32", "float64") and draw(st.booleans()),
        order=tuple(draw(st.permutations(range(4)))),
        gap=draw(st.integers(0, 2)),
        numbers=tuple(numbers.items()),
        seed=draw(st.integers(0, 2**16)),
    )


#: Operation -> its numbers, and values to draw: none at which a gradient jumps.
_NUMBERS = {
    "relu": (("negative_slope", 0.25, 0.5), ("lower_clip", -0.5, 0.25), ("upper_clip", 0.5, 1.5)),
    "leaky_relu": (("negative_slope", 0.25, 0.5),),
    "swish": (("swish_beta", 0.5, 2.0),),
}


#: An expression of positions: a leaf, or two of them added or subtracted.
_LEAVES = st.sampled_from(("row", "col", "len_q", "len_k")) | st.integers(-3, 3)
_EXPRESSIONS = st.recursive(
    _LEAVES, lambda x: st.tuples(st.sampled_from(("add", "sub")), x, x), max_leaves=4
)
_COMPARISONS = st.tuples(
    st.sampled_from(("cmp_ge", "cmp_gt", "cmp_le", "cmp_lt")), _EXPRESSIONS, _EXPRESSIONS
)
_USUAL = st.sampled_from(
    [
        ("cmp_lt", "col", "len_k"),
        ("cmp_gt", "len_q", "row"),
        ("cmp_ge", "row", "col"),
        ("cmp_ge", ("add", "row", ("sub", "len_k", "len_q")), "col"),
        ("cmp_lt", ("sub", "row", 3), "col"),
    ]
)

#: A mask: comparisons joined.
MASKS = st.recursive(
    _USUAL | _COMPARISONS,
    lambda x: (
        st.tuples(st.just("logical_not"), x)
        | st.tuples(st.sampled_from(("logical_and", "logical_or")), x, x)
    ),
    max_leaves=3,
)

#: What happens to scores, in order.
EDITS = st.lists(
    st.tuples(st.just("scale"), st.sampled_from((0.5, 2.0, -1.0)))
    | st.tuples(st.just("div"), st.sampled_from((0.5, 4.0)))
    | st.tuples(st.just("bias"), st.tuples(*4 * [st.booleans()]))
    | st.tuples(st.sampled_from(("keep", "drop")), st.sampled_from((-1e20, -math.inf)), MASKS),
    max_size=4,
)


#: Functions of scores (see :mod:`tests.score_mods`): smooth enough that roundings stay small.
_NAMES = st.sampled_from(("s", "s", "slopes", "table", "rows", "columns", "factor"))
_DISTANCE = ("sub", "col", "row")
_WHERE = st.sampled_from(
    [
        ("cmp_ge", "row", "col"),
        ("cmp_lt", ("abs", _DISTANCE), 9),
        ("cmp_gt", ("add", "col", 5), "row"),
        ("cmp_eq", "documents_q", "documents_k"),
        ("cmp_neq", ("add", "documents_q", 1), "documents_k"),
        ("cmp_ge", "row", 3),
        ("cmp_lt", "row", "limit_q"),
        ("cmp_gt", "limit_k", "col"),
    ]
)
_PLACES = st.recursive(
    _WHERE | st.just("marks"),
    lambda x: (
        st.tuples(st.just("logical_not"), x)
        | st.tuples(st.sampled_from(("logical_and", "logical_or")), x, x)
    ),
    max_leaves=3,
)
_TREES = st.recursive(
    _NAMES,
    lambda x: (
        st.tuples(st.sampled_from(("add", "sub", "max", "min")), x, x)
        | st.tuples(st.sampled_from(("tanh", "sigmoid", "sin", "abs", "relu", "softplus")), x)
        | st.tuples(st.just("mul"), x, st.sampled_from((0.5, -0.75, 2.0)))
        | st.tuples(st.just("mul"), x, st.tuples(st.just("tanh"), x))
        | st.tuples(st.just("binary_select"), x, x, _PLACES)
    ),
    max_leaves=4,
)
_CAPPED = ("mul", ("tanh", ("div", "s", 4.0)), 4.0)


def _of_scores(tree: Tree) -> Tree:
    """With a part of the score, if it has none."""
    return tree if reads_score(tree) else ("add", "s", tree)


SCORE_MODS = st.tuples(
    _TREES.map(_of_scores)
    | st.sampled_from(
        ["s", _CAPPED, ("add", _CAPPED, ("mul", "slopes", _DISTANCE)), ("add", "s", "table")]
    ),
    st.none() | _PLACES,
)
