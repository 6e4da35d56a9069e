"""Writing the lines of pointwise expressions, each once.

A :class:`Builder` computes what is constant, leaves out what does nothing, and never writes the
same line twice. Activations and
``*_backward`` operations are written as what they are made of, so that few operations remain to be
differentiated and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dlattn.problem.activations import MADE_OF, Writer
from dlattn.problem.lines import Kind, Line, Number, needed
from dlattn.problem.pointwise import POINTWISE, Arithmetic


class Builder:
    """Writes lines.

    Attributes:
        lines: those written so far.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._known: dict[Line, int] = {}

    # Leaves -----------------------------------------------------------------------------------

    def score(self) -> int:
        return self._write(Line("score", Kind.FLOAT))

    def gradient(self) -> int:
        """The gradient of the result."""
        return self._write(Line("gradient", Kind.FLOAT))

    def position(self, axis: int) -> int:
        """Along an axis of (B, H, S_q, S_kv)."""
        return self._write(Line("position", Kind.INT32, (), axis))

    def read(self, tensor: int, kind: Kind) -> int:
        """An element of a tensor that broadcasts to (B, H, S_q, S_kv)."""
        return self._write(Line("read", kind, (), tensor))

    def constant(self, value: Number, kind: Kind = Kind.FLOAT) -> int:
        return self._write(Line("constant", kind, (), _of_kind(value, kind)))

    def value(self, line: int) -> Number | None:
        """What a constant holds; ``None`` of other lines."""
        it = self.lines[line]
        return it.number if it.operation == "constant" else None

    # Operations -------------------------------------------------------------------------------

    def cast(self, line: int, kind: Kind) -> int:
        """The same number in another type; true is 1, and what is not 0 is true."""
        it = self.lines[line]
        if it.kind is kind:
            return line
        if it.operation == "constant":
            assert it.number is not None
            return self.constant(it.number, kind)
        return self._write(Line("cast", kind, (line,)))

    def pointwise(
        self, operation: str, *operands: int, kind: Kind = Kind.FLOAT, **numbers: float
    ) -> int:
        """One of :data:`dlattn.problem.POINTWISE`.

        Args:
            kind: what sums, differences and the like are computed in.
            numbers: of activations.
        """
        if operation in MADE_OF:
            floats = [self.cast(x, Kind.FLOAT) for x in operands]
            return MADE_OF[operation](Writer(self), *floats, **numbers)
        operation = _OTHER_NAMES.get(operation, operation)
        arithmetic = POINTWISE[operation].arithmetic
        if arithmetic is Arithmetic.MOVES:
            return self._select(*operands)
        result = kind
        if arithmetic is Arithmetic.BOOLEANS:
            kind = result = Kind.BOOLEAN
        elif arithmetic is Arithmetic.COMPARES:
            kind, result = self._common_kind(operands), Kind.BOOLEAN
        elif arithmetic is Arithmetic.FLOATS:
            kind = result = Kind.FLOAT
        cast = tuple(self.cast(x, kind) for x in operands)
        return self._simplified(operation, cast, result)

    def substituted(self, line: int, others: Mapping[int, int]) -> int:
        """A line with other lines in the place of some."""
        known = dict(others)
        for number in needed(self.lines, line):
            it = self.lines[number]
            if number in known or not it.operands:
                known.setdefault(number, number)
                continue
            operands = [known[x] for x in it.operands]
            if it.operation == "cast":
                known[number] = self.cast(operands[0], it.kind)
            else:
                known[number] = self.pointwise(it.operation, *operands, kind=it.kind)
        return known[line]

    def _common_kind(self, operands: Iterable[int]) -> Kind:
        """What is compared, or selected from: whole numbers exactly."""
        lines = [self.lines[x] for x in operands]
        if not all(x.kind.is_whole for x in lines):
            return Kind.FLOAT
        wide = [x for x in lines if x.kind is Kind.INT64 and not _fits_32_bits(x)]
        return Kind.INT64 if wide else Kind.INT32

    def _select(self, x: int, y: int, mask: int) -> int:
        if self.lines[x].kind is not self.lines[y].kind:
            kind = self._common_kind((x, y))
            x, y = (self.cast(line, kind) for line in (x, y))
        mask = self.cast(mask, Kind.BOOLEAN)
        known = self.value(mask)
        if known is not None or x == y:
            return x if known or x == y else y
        return self._write(Line("binary_select", self.lines[x].kind, (x, y, mask)))

    def _simplified(self, operation: str, operands: tuple[int, ...], result: Kind) -> int:
        values = [self.value(x) for x in operands]
        if all(value is not None for value in values):
            with np.errstate(all="ignore"):
                computed = POINTWISE[operation].function(*map(np.asarray, values))
            return self.constant(np.asarray(computed).item(), result)
        if operation in _COMMUTATIVE:
            # Constants last, so that each has one place to be looked for.
            order = sorted(range(2), key=lambda i: (values[i] is not None, operands[i]))
            operands = tuple(operands[i] for i in order)
            values = [values[i] for i in order]
        simpler = _SIMPLER.get(operation)
        found = None if simpler is None else simpler(Writer(self), operands, values)
        return self._write(Line(operation, result, operands)) if found is None else found

    def _write(self, line: Line) -> int:
        if line not in self._known:
            self._known[line] = len(self.lines)
            self.lines.append(line)
        return self._known[line]


def _of_kind(value: Number, kind: Kind) -> Number:
    if kind is Kind.FLOAT:
        return float(value)
    if kind is Kind.BOOLEAN:
        return bool(value)
    return int(value) if math.isfinite(value) else 0


def _fits_32_bits(line: Line) -> bool:
    value = line.number if line.operation == "constant" else None
    return value is not None and -(2**31) <= value < 2**31


# What does nothing ----------------------------------------------------------------------------

_COMMUTATIVE = ("add", "mul", "cmp_eq", "cmp_neq", "logical_and", "logical_or")

_Values = Sequence[Number | None]
_Rule = Callable[[Writer, tuple[int, ...], _Values], int | None]


def _is(value: Number | None, number: float) -> bool:
    return value is not None and not isinstance(value, bool) and value == number


def _add(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    return x[0] if _is(values[1], 0) else None


def _sub(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    if _is(values[1], 0):
        return x[0]
    kind = w.builder.lines[x[0]].kind
    return w.builder.pointwise("neg", x[1], kind=kind) if _is(values[0], 0) else None


def _mul(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    if _is(values[1], 1):
        return x[0]
    if _is(values[1], 0):
        return x[1]
    it = w.builder.lines[x[0]]
    if _is(values[1], -1):
        return w.builder.pointwise("neg", x[0], kind=it.kind)
    if values[1] is not None and it.operation == "mul" and it.kind is Kind.FLOAT:
        factor = w.builder.value(it.operands[1])
        if factor is not None:
            return w.mul(it.operands[0], w(factor * values[1]))
    return None


def _div(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    """A product with the inverse, which float32 has within half a unit."""
    divisor = values[1]
    if divisor is not None and 1e-30 < abs(divisor) < 1e30:
        return w.mul(x[0], w(1 / divisor))
    return x[0] if _is(values[0], 0) else None


def _neg(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    it = w.builder.lines[x[0]]
    return it.operands[0] if it.operation == "neg" else None


def _pow(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    if _is(values[1], 0):
        return w(1.0)
    if _is(values[1], 2):
        return w.mul(x[0], x[0])
    return x[0] if _is(values[1], 1) else None


def _not(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    it = w.builder.lines[x[0]]
    return it.operands[0] if it.operation == "logical_not" else None


def _and(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    if values[1] is not None:
        return x[0] if values[1] else x[1]
    return x[0] if x[0] == x[1] else None


def _or(w: Writer, x: tuple[int, ...], values: _Values) -> int | None:
    if values[1] is not None:
        return x[1] if values[1] else x[0]
    return x[0] if x[0] == x[1] else None


_SIMPLER: dict[str, _Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "logical_not": _not,
    "logical_and": _and,
    "logical_or": _or,
}


#: Operations -> those that they are other names of.
_OTHER_NAMES = {"bias": "add", "scale": "mul"}
