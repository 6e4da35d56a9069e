"""Functions of scores as trees, run on a graph, and from their definition on arrays.

A tree is a number, a name, or an operation of the graph with trees for operands. Names are the
score ``"s"``, the positions ``"row"`` and ``"col"``, and those of :data:`TENSORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Tree = Any

#: Tensor that a tree reads -> its axes, of ``"bhqk"``, and its type; without axes it is a number
#: passed by value.
TENSORS = {
    "slopes": ("h", "float32"),
    "table": ("bhqk", "bfloat16"),
    "marks": ("hqk", "bool"),
    "rows": ("bq", "float16"),
    "columns": ("hk", "float32"),
    "factor": ("", "float32"),
    "documents_q": ("bq", "int32"),
    "documents_k": ("bk", "int64"),
    "limit_q": ("b", "int32"),
    "limit_k": ("b", "int32"),
}


def names_in(tree: Tree) -> set[str]:
    """The tensors that a tree reads."""
    if isinstance(tree, tuple):
        return set().union(*map(names_in, tree[1:]))
    return {tree} & set(TENSORS) if isinstance(tree, str) else set()


def mod_data(case: Any, library: Any, name: str, seed: int, tail: float) -> Any:
    """Numbers of a tensor that a case's tree reads; what nothing may read of floats is ``tail``."""
    dim, axes = case.mod_dims()[name], TENSORS[name][0]
    if name.startswith("documents"):
        size = math.prod(dim)
        numbers = [float(n * 3 // max(dim) + case.seed % 2) for n in range(size)]
        return library.values(numbers, "float32").reshape(dim)
    if name.startswith("limit"):
        longest = case.seq_q if name == "limit_q" else case.seq_kv
        parts = range(1 + case.seed % 2, 2 * dim[0] + 1, 2)
        limits = [longest * part // (2 * dim[0]) for part in parts]
        return library.values([float(n) for n in limits], "float32").reshape(dim)
    if name == "marks":
        return library.cast(library.normal(dim, seed) > -0.8, "float32")
    data = 0.5 * library.normal(dim, seed)
    if dim[0] == case.batch and "b" in axes:
        for entry, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
            if "q" in axes:
                data[entry, :, m:] = tail
            if "k" in axes:
                data[entry, :, :, n:] = tail
    return data


def reads_score(tree: Tree) -> bool:
    """Whether the score itself is in a tree."""
    return any(map(reads_score, tree[1:])) if isinstance(tree, tuple) else tree == "s"


def on_graph(graph: Any, score: Any, tree: Tree, tensors: Mapping[str, Any]) -> Any:
    """The tree as operations of a graph."""
    if isinstance(tree, tuple):
        operation, *operands = tree
        return getattr(graph, operation)(
            *(on_graph(graph, score, operand, tensors) for operand in operands)
        )
    if isinstance(tree, (int, float)):
        return graph.tensor_scalar(tree)
    if tree in ("row", "col"):
        return graph.gen_index(score, 2 if tree == "row" else 3)
    return score if tree == "s" else tensors[tree]


def callback(score_mod: tuple[Tree, Tree], tensors: Mapping[str, Any]) -> Callable[..., Any]:
    """``score_mod``: the first tree, where the second is true; else -inf."""

    def function(graph: Any, score: Any) -> Any:
        edited, mask = score_mod
        made = on_graph(graph, score, edited, tensors)
        if mask is None:
            return made
        low = graph.tensor_scalar(float("-inf"))
        return graph.binary_select(made, low, on_graph(graph, score, mask, tensors))

    return function


#: How many units of roundoff two numbers may be apart for each that they are off, and roundings
#: still decide which is the larger.
_NEAR = 8.0


class Dual:
    """A number, its derivative, and what roundings make of both.

    Attributes:
        slope: the derivative by the score, or by what else is asked for.
        error: about how many units of roundoff the number is off.
        jump: how far the derivative may be from ``slope`` where a number is so near to a kink that
            roundings decide on which side of it it lies.
        unit: of roundoff; with 0, no number is near a kink.
    """

    def __init__(
        self,
        xp: Any,
        value: Any,
        slope: Any = 0.0,
        error: Any = 0.0,
        jump: Any = 0.0,
        unit: float = 0.0,
    ) -> None:
        self.xp, self.unit = xp, unit
        self.value, self.slope, self.error, self.jump = value, slope, error, jump

    def of(self, value: Any, slope: Any = 0.0, error: Any = 0.0, jump: Any = 0.0) -> Dual:
        """Another number of the same kind."""
        return Dual(self.xp, value, slope, error, jump, self.unit)

    def through(self, value: Any, slope: Any) -> Dual:
        """What a function makes of it, by its value and derivative here."""
        error = abs(slope) * self.error + abs(value)
        return self.of(value, slope * self.slope, error, abs(slope) * self.jump)

    def where(self, condition: Any, other: Dual) -> Dual:
        parts = zip(
            (self.value, self.slope, self.error, self.jump),
            (other.value, other.slope, other.error, other.jump),
            strict=True,
        )
        like = 0.0 * condition
        return self.of(*(self.xp.where(condition, x + like, y + like) for x, y in parts))

    def instead_of(self, other: Dual, condition: Any) -> Dual:
        """This where the condition holds, else the other; their numbers meet where it changes."""
        chosen = self.where(condition, other)
        near = abs(self.value - other.value) < _NEAR * self.unit * (self.error + other.error)
        apart = abs(self.slope - other.slope) + self.jump + other.jump + 0.0 * chosen.jump
        chosen.jump = self.xp.where(near, apart, chosen.jump)
        return chosen


def _add(a: Dual, b: Dual) -> Dual:
    value = a.value + b.value
    return a.of(value, a.slope + b.slope, a.error + b.error + abs(value), a.jump + b.jump)


def _neg(x: Dual) -> Dual:
    return x.of(-x.value, -x.slope, x.error, x.jump)


def _mul(a: Dual, b: Dual) -> Dual:
    value = a.value * b.value
    error, jump = (
        x * abs(b.value) + y * abs(a.value) for x, y in ((a.error, b.error), (a.jump, b.jump))
    )
    return a.of(value, a.slope * b.value + b.slope * a.value, error + abs(value), jump)


def _abs(x: Dual) -> Dual:
    return x.instead_of(_neg(x).where(x.value < 0, _zero(x)), x.value > 0)


def _tanh(x: Dual) -> Dual:
    tanh = x.xp.tanh(x.value)
    return x.through(tanh, 1 - tanh**2)


def _sigmoid(x: Dual) -> Dual:
    gate = 0.5 + 0.5 * x.xp.tanh(x.value / 2)
    return x.through(gate, gate * (1 - gate))


def _softplus(x: Dual) -> Dual:
    positive = x.xp.where(x.value > 0, x.value, 0.0 * x.value)
    gate = 0.5 + 0.5 * x.xp.tanh(x.value / 2)
    return x.through(positive + x.xp.log1p(x.xp.exp(-abs(x.value))), gate)


def _zero(x: Dual) -> Dual:
    return x.of(0.0 * x.value)


_ARITHMETIC: dict[str, Callable[..., Dual]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "mul": _mul,
    "neg": _neg,
    "div": lambda a, b: _mul(a, b.of(1 / b.value, 0.0, abs(1 / b.value))),
    "abs": _abs,
    "max": lambda a, b: a.instead_of(b, a.value >= b.value),
    "min": lambda a, b: a.instead_of(b, a.value <= b.value),
    "relu": lambda x: x.instead_of(_zero(x), x.value > 0),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "sin": lambda x: x.through(x.xp.sin(x.value), x.xp.cos(x.value)),
    "cos": lambda x: x.through(x.xp.cos(x.value), -x.xp.sin(x.value)),
}

_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "cmp_ge": lambda a, b: a >= b,
    "cmp_gt": lambda a, b: a > b,
    "cmp_le": lambda a, b: a <= b,
    "cmp_lt": lambda a, b: a < b,
    "cmp_eq": lambda a, b: a == b,
    "cmp_neq": lambda a, b: a != b,
}


def on_arrays(
    tree: Tree, leaf: Callable[[str], Dual], like: Any, xp: Any, unit: float = 0.0
) -> Dual:
    """The tree from its definition.

    Args:
        leaf: what a name is.
        like: an array of the shape and type of scores.
        unit: that of all numbers.
    """
    if isinstance(tree, tuple):
        operation, *operands = tree
        if operation == "binary_select":
            x, y = (on_arrays(operand, leaf, like, xp, unit) for operand in operands[:2])
            return x.where(holds(operands[2], leaf, like, xp), y)
        return _ARITHMETIC[operation](*(on_arrays(x, leaf, like, xp, unit) for x in operands))
    if isinstance(tree, (int, float)):
        return Dual(xp, 0.0 * like + tree, unit=unit)
    return leaf(tree)


def holds(tree: Tree, leaf: Callable[[str], Dual], like: Any, xp: Any) -> Any:
    """Where a mask is true."""
    if isinstance(tree, str):
        return leaf(tree).value != 0
    operation, *operands = tree
    if operation == "logical_not":
        return ~holds(operands[0], leaf, like, xp)
    if operation.startswith("logical"):
        a, b = (holds(x, leaf, like, xp) for x in operands)
        return a & b if operation == "logical_and" else a | b
    a, b = (on_arrays(x, leaf, like, xp).value for x in operands)
    return _COMPARED[operation](a, b)
