"""Interval arithmetic: what expressions may be where only the least and the greatest of what they
read are known. ``cuda_src/attn/ranges.cuh`` computes the same.

A range holds every value that an element can have, rounding included; it may hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlattn.problem.lines import Kind, Line, needed
from dlattn.problem.score import Array


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``; where ``any`` is true, any number, or none (NaN)."""

    low: Array
    high: Array
    any: Array


class Truth(NamedTuple):
    """Whether something may be true somewhere, and surely is everywhere."""

    maybe: Array
    surely: Array


Known = Range | Truth

#: Of functions of any number. Kernels do not know of these.
_BOUNDS = {
    **dict.fromkeys(("tanh", "erf", "sin", "cos"), (-1.0, 1.0)),
    "sigmoid": (0.0, 1.0),
}

#: Whole numbers are known below this: sums of two fit 64 bits.
_MOST_WHOLE = 2**62


def known_lines(lines: Sequence[Line], is_known: Callable[[Line], bool]) -> set[int]:
    """The numbers of the lines of which something may be known.

    Args:
        is_known: whether that is so of a line without operands, constants aside.
    """
    known: set[int] = set()
    for number, line in enumerate(lines):
        operands = [x in known for x in line.operands]
        if line.operation == "constant" or (not line.operands and is_known(line)):
            known.add(number)
        elif line.operation in ("logical_and", "logical_or") and any(operands):
            known.add(number)
        elif line.operation in RANGES and operands and all(operands):
            known.add(number)
    return known


def ranges(
    lines: Sequence[Line],
    result: int,
    leaf: Callable[[Line], Known],
    floats: Any,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Known:
    """What a line may be.

    Args:
        leaf: line -> what it may be, of those without operands, constants aside.
        floats: type of floats.
        bounds: operation -> between what its results are, whatever they are of.
    """
    bounds = bounds or {}
    known: dict[int, Known] = {}
    for number in needed(lines, result):
        line = lines[number]
        operands = [known[x] for x in line.operands]
        with np.errstate(all="ignore"):
            if line.operation == "constant":
                made = _constant(line, floats)
            elif not line.operands:
                made = leaf(line)
            elif line.operation == "cast":
                made = _cast(operands[0], line.kind, floats)
            elif line.operation in bounds:
                low, high = map(np.asarray, bounds[line.operation])
                made = number_range(low, high, line.kind, floats)
            elif line.operation in RANGES:
                made = _fit(RANGES[line.operation](*operands), line.kind)
            else:
                made = unknown(line.kind, floats)
        known[number] = made
    return known[result]


def largest_magnitude(lines: Sequence[Line], result: int) -> float:
    """What a float's magnitude is at most, whatever the score and all that is read; infinite if
    nothing bounds it."""
    made = ranges(lines, result, lambda line: unknown(line.kind, np.float32), np.float32, _BOUNDS)
    assert isinstance(made, Range)
    return np.inf if made.any else float(max(abs(made.low), abs(made.high)))


def unknown(kind: Kind, floats: Any) -> Known:
    if kind is Kind.BOOLEAN:
        return Truth(np.asarray(True), np.asarray(False))
    zero = np.zeros((), np.int64 if kind.is_whole else floats)
    return Range(zero, zero, np.asarray(True))


def number_range(low: Array, high: Array, kind: Kind, floats: Any) -> Known:
    """What elements may be of which the least and greatest are these; NaN if any is."""
    if kind is Kind.BOOLEAN:
        return Truth(high != 0, low != 0)
    if kind.is_whole:
        low, high = (np.asarray(x).astype(np.int64) for x in (low, high))
        return _fit(Range(low, high, np.zeros(low.shape, bool)), kind)
    low, high = (np.asarray(x).astype(floats) for x in (low, high))
    return _range(low, high, np.isnan(low) | np.isnan(high))


def _constant(line: Line, floats: Any) -> Known:
    value = np.asarray(line.number)
    if line.kind is Kind.INT32:
        value = value.astype(np.int32)  # as elements have it
    return number_range(value, value, line.kind, floats)


def _range(low: Array, high: Array, any_: Array) -> Range:
    """What is not known is 0, so that nothing overflows."""
    zero = low.dtype.type(0)
    return Range(np.where(any_, zero, low), np.where(any_, zero, high), any_)


def _finite(low: Array, high: Array, any_: Array) -> Range:
    return _range(low, high, any_ | ~(np.isfinite(low) & np.isfinite(high)))


def _fit(made: Known, kind: Kind) -> Known:
    """Whole numbers of a type that holds them all, or any."""
    if isinstance(made, Truth) or not kind.is_whole:
        return made
    least, most = (
        (-(2**31), 2**31 - 1) if kind is Kind.INT32 else (1 - _MOST_WHOLE, _MOST_WHOLE - 1)
    )
    return _range(made.low, made.high, made.any | (made.low < least) | (made.high > most))


def _is_whole(x: Range) -> bool:
    return x.low.dtype == np.int64


def _cast(x: Known, kind: Kind, floats: Any) -> Known:
    if isinstance(x, Truth):
        return number_range(x.surely, x.maybe, kind, floats)
    if kind is Kind.BOOLEAN:
        nothing = (x.low == 0) & (x.high == 0) & ~x.any
        return Truth(~nothing, ~x.any & ((x.low > 0) | (x.high < 0)))
    if not kind.is_whole:
        return _range(x.low.astype(floats), x.high.astype(floats), x.any)
    if _is_whole(x):
        return _fit(x, kind)
    most = 2.0**31 if kind is Kind.INT32 else 2.0**62
    any_ = x.any | ~((abs(x.low) < most) & (abs(x.high) < most))
    safe = _range(x.low, x.high, any_)
    return Range(safe.low.astype(np.int64), safe.high.astype(np.int64), any_)


# Operations -----------------------------------------------------------------------------------


def _add(a: Range, b: Range) -> Range:
    return _finite(a.low + b.low, a.high + b.high, a.any | b.any)


def _sub(a: Range, b: Range) -> Range:
    return _finite(a.low - b.high, a.high - b.low, a.any | b.any)


def _corners(a: Range, b: Range) -> list[tuple[Array, Array]]:
    return [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]


def _mul(a: Range, b: Range) -> Range:
    """Of floats, exact products, too: what is added to one may be added before it is rounded."""
    any_ = a.any | b.any
    if _is_whole(a):
        far = [abs(x.astype(float) * y.astype(float)) >= _MOST_WHOLE for x, y in _corners(a, b)]
        for one in far:
            any_ = any_ | one
        a, b = (_range(*np.broadcast_arrays(x.low, x.high, any_)) for x in (a, b))
        products = [x * y for x, y in _corners(a, b)]
        return Range(np.minimum.reduce(products), np.maximum.reduce(products), any_)
    lows, highs = [], []
    for x, y in _corners(a, b):
        product, exact = x * y, _is_exact(x, y)
        lows.append(np.where(exact, product, np.nextafter(product, -np.inf, dtype=product.dtype)))
        highs.append(np.where(exact, product, np.nextafter(product, np.inf, dtype=product.dtype)))
    return _finite(np.minimum.reduce(lows), np.maximum.reduce(highs), any_)


def _is_exact(x: Array, y: Array) -> Array:
    """Whether the product of two float32 numbers is one."""
    wide = x.astype(np.float64) * y.astype(np.float64)
    exact: Array = (
        (np.float32(x) == x) & (np.float32(y) == y) & ((x * y).astype(np.float64) == wide)
    )
    return exact


def _div(a: Range, b: Range) -> Range:
    any_ = a.any | b.any | ((b.low <= 0) & (b.high >= 0)) | ~np.isfinite(b.low + b.high)
    quotients = [x / y for x, y in _corners(a, b)]
    return _finite(np.minimum.reduce(quotients), np.maximum.reduce(quotients), any_)


def _mod(a: Range, b: Range) -> Range:
    """Of finite numbers by one positive number: a period, or what there is in one."""
    one = a.low.dtype.type(1)
    any_ = a.any | b.any | (b.low != b.high) | ~(b.low > 0)
    any_ = any_ | ~(np.isfinite(a.low) & np.isfinite(a.high))
    by = np.where(any_, one, b.low)
    most = by - one if _is_whole(a) else by
    low, high = np.fmod(a.low, by), np.fmod(a.high, by)
    # Both ends in one period, on one side of 0.
    same = (a.high - a.low < by) & (low <= high) & ((a.low >= 0) | (a.high <= 0))
    zero = a.low.dtype.type(0)
    least, greatest = np.where(a.low >= 0, zero, -most), np.where(a.high <= 0, zero, most)
    return _finite(np.where(same, low, least), np.where(same, high, greatest), any_)


def _max(a: Range, b: Range) -> Range:
    return _range(np.maximum(a.low, b.low), np.maximum(a.high, b.high), a.any | b.any)


def _min(a: Range, b: Range) -> Range:
    return _range(np.minimum(a.low, b.low), np.minimum(a.high, b.high), a.any | b.any)


def _neg(x: Range) -> Range:
    return Range(-x.high, -x.low, x.any)


def _abs(x: Range) -> Range:
    inside = (x.low <= 0) & (x.high >= 0)
    low, high = abs(x.low), abs(x.high)
    return Range(np.where(inside, 0, np.minimum(low, high)), np.maximum(low, high), x.any)


def _lt(a: Range, b: Range) -> Truth:
    any_ = a.any | b.any
    return Truth(any_ | (a.low < b.high), ~any_ & (a.high < b.low))


def _le(a: Range, b: Range) -> Truth:
    any_ = a.any | b.any
    return Truth(any_ | (a.low <= b.high), ~any_ & (a.high <= b.low))


def _eq(a: Range, b: Range) -> Truth:
    any_ = a.any | b.any
    single = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Truth(any_ | ((a.low <= b.high) & (b.low <= a.high)), ~any_ & single)


def _not(x: Truth) -> Truth:
    return Truth(~x.surely, ~x.maybe)


def _select(x: Known, y: Known, mask: Truth) -> Known:
    if isinstance(x, Truth):
        assert isinstance(y, Truth)
        return Truth(
            (mask.maybe & x.maybe) | (~mask.surely & y.maybe),
            (~mask.maybe | x.surely) & (mask.surely | y.surely),
        )
    assert isinstance(y, Range)
    first, second = mask.surely, ~mask.maybe
    low = np.where(first, x.low, np.where(second, y.low, np.minimum(x.low, y.low)))
    high = np.where(first, x.high, np.where(second, y.high, np.maximum(x.high, y.high)))
    return _range(low, high, (mask.maybe & x.any) | (~mask.surely & y.any))


#: Operation -> what is known of its result. Of others, nothing is.
RANGES: dict[str, Callable[..., Known]] = {
    "cast": _cast,
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "mod": _mod,
    "max": _max,
    "min": _min,
    "neg": _neg,
    "abs": _abs,
    "floor": lambda x: Range(np.floor(x.low), np.floor(x.high), x.any),
    "ceil": lambda x: Range(np.ceil(x.low), np.ceil(x.high), x.any),
    "cmp_lt": _lt,
    "cmp_le": _le,
    "cmp_gt": lambda a, b: _lt(b, a),
    "cmp_ge": lambda a, b: _le(b, a),
    "cmp_eq": _eq,
    "cmp_neq": lambda a, b: _not(_eq(a, b)),
    "logical_and": lambda a, b: Truth(a.maybe & b.maybe, a.surely & b.surely),
    "logical_or": lambda a, b: Truth(a.maybe | b.maybe, a.surely | b.surely),
    "logical_not": _not,
    "binary_select": _select,
}
