"""Derivatives of expressions, symbolically: for each line another one, its derivative.

At kinks: ``abs`` has the derivative 0 at 0; ``max`` and ``min`` of equal numbers that of their
first operand; activations that of their ``*_backward`` operation; powers of 0 have the derivative 0
by their exponent. What jumps, or is true or false, has the derivative 0 everywhere, as have casts
to whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dlattn.problem.activations import SLOPES, Writer
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import LEAVES, Kind, needed

#: The derivative of a line, if it is not 0 everywhere.
_Slope = int | None
_Rule = Callable[[Writer, int, tuple[int, ...], tuple[_Slope, ...]], _Slope]


def derivative(builder: Builder, line: int, by: int) -> int:
    """The derivative of a line by an earlier one, which is a leaf."""
    slopes: dict[int, _Slope] = {}
    w = Writer(builder)
    for number in needed(builder.lines, line):
        it = builder.lines[number]
        if number == by:
            slopes[number] = w(1.0)
        elif it.operation in LEAVES or it.kind is not Kind.FLOAT:
            slopes[number] = None
        else:
            given = tuple(slopes[x] for x in it.operands)
            rule = _RULES.get(it.operation)
            some = any(slope is not None for slope in given)
            slopes[number] = rule(w, number, it.operands, given) if rule and some else None
    slope = slopes[line]
    return w(0.0) if slope is None else slope


def _sum(w: Writer, *terms: _Slope) -> _Slope:
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else w.add(total, term)
    return total


def _times(w: Writer, slope: _Slope, factor: Callable[[], int]) -> _Slope:
    return None if slope is None else w.mul(slope, factor())


def _add(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    return _sum(w, *d)


def _sub(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    return _sum(w, d[0], None if d[1] is None else w.neg(d[1]))


def _mul(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    return _sum(w, _times(w, d[0], lambda: x[1]), _times(w, d[1], lambda: x[0]))


def _div(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    above = _sum(w, d[0], _times(w, d[1], lambda: w.neg(y)))
    return None if above is None else w.div(above, x[1])


def _mod(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    """``y = x0 - x1 * n``, of a whole number n that jumps."""
    return _sum(w, d[0], _times(w, d[1], lambda: w.div(w.sub(y, x[0]), x[1])))


def _pow(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    by_base = _times(w, d[0], lambda: w.mul(x[1], w.pow(x[0], w.sub(x[1], w(1.0)))))

    def logarithm() -> int:  # 0 times that of 0 would be no number
        return w.binary_select(w(0.0), w.log(x[0]), w.cmp_eq(x[0], w(0.0)))

    return _sum(w, by_base, _times(w, d[1], lambda: w.mul(y, logarithm())))


def _greater(comparison: str) -> _Rule:
    def rule(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
        first = getattr(w, comparison)(x[0], x[1])
        return w.binary_select(*(w(0.0) if slope is None else slope for slope in d), first)

    return rule


def _select(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    return w.binary_select(*(w(0.0) if slope is None else slope for slope in d[:2]), x[2])


def _abs(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
    below = w.binary_select(w(-1.0), w(0.0), w.cmp_lt(x[0], w(0.0)))
    sign = w.binary_select(w(1.0), below, w.cmp_gt(x[0], w(0.0)))
    return _times(w, d[0], lambda: sign)


def _of(slope: Callable[[Writer, int, int], int]) -> _Rule:
    """Of one operand: by the writer, the result and the operand."""

    def rule(w: Writer, y: int, x: tuple[int, ...], d: tuple[_Slope, ...]) -> _Slope:
        return _times(w, d[0], lambda: slope(w, y, x[0]))

    return rule


_RULES: dict[str, _Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "mod": _mod,
    "pow": _pow,
    "max": _greater("cmp_ge"),
    "min": _greater("cmp_le"),
    "binary_select": _select,
    "abs": _abs,
    "neg": lambda w, y, x, d: None if d[0] is None else w.neg(d[0]),
    "exp": _of(lambda w, y, x: y),
    "log": _of(lambda w, y, x: w.reciprocal(x)),
    "sqrt": _of(lambda w, y, x: w.div(w(0.5), y)),
    "rsqrt": _of(lambda w, y, x: w.mul(w(-0.5), w.mul(y, w.mul(y, y)))),
    "reciprocal": _of(lambda w, y, x: w.neg(w.mul(y, y))),
    "sin": _of(lambda w, y, x: w.cos(x)),
    "cos": _of(lambda w, y, x: w.neg(w.sin(x))),
    "tan": _of(lambda w, y, x: w.add(w(1.0), w.mul(y, y))),
    "erf": _of(lambda w, y, x: w.mul(w(2 / math.sqrt(math.pi)), w.exp(w.neg(w.mul(x, x))))),
    **{
        name: _of(lambda w, y, x, slope=SLOPES[name]: slope(w, x))  # type: ignore[misc]
        for name in ("tanh", "sigmoid", "elu", "softplus")
    },
}
