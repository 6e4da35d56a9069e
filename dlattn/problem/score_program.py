"""A user's function of scores (``score_mod``), as a score edit.

Numbers that a graph knows are part of the code, so that what they make constant is computed once;
those passed by value, and tensors, are read when kernels run. What only writing, differentiating
or evaluating a program takes is imported then: every problem may hold one, and few do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dlattn.dtypes import data_type
from dlattn.problem.lines import Kind, Line, needed
from dlattn.problem.score import Alibi, Array, Edit, Values, Where, add_at, read_at
from dlattn.records import dataclass

if TYPE_CHECKING:
    from dlattn.problem.expressions import Builder

#: Roles of the tensors that a function of scores reads; as many as ``Params`` has room for.
SCORE_MOD_ROLES = tuple(f"score_mod_{number}" for number in range(8))
#: Roles of their gradients, in the same order.
SCORE_GRADIENT_ROLES = tuple(f"d_{role}" for role in SCORE_MOD_ROLES)

#: A score set to at most this by the last selection is masked: its weight is 0 beside any other.
MASKED = -1e4

_KINDS = {
    data_type.INT8: Kind.INT32,
    data_type.UINT8: Kind.INT32,
    data_type.INT32: Kind.INT32,
    data_type.INT64: Kind.INT64,
    data_type.BOOLEAN: Kind.BOOLEAN,
}


@dataclass(frozen=True)
class Read:
    """How a tensor is read: it broadcasts to (B, H, S_q, S_kv).

    Attributes:
        dtype: of its elements.
        by_query, by_key: whether it has one for each query, for each key.
        contiguous: neighbouring keys are neighbours in memory.
        by_value: a number that is passed by value.
    """

    dtype: data_type
    by_query: bool = False
    by_key: bool = False
    contiguous: bool = False
    by_value: bool = False

    @property
    def kind(self) -> Kind:
        """What its elements are computed in."""
        return _KINDS.get(self.dtype, Kind.FLOAT)


@dataclass(frozen=True)
class ScoreProgram(Edit):
    """``result(score)``: lines that end in the new score and, in a backward, its derivative.

    Attributes:
        lines: in order.
        result: the number of the line that is the new score.
        slope: that of its derivative; ``None`` in a forward.
        reads: the tensors that the lines read, of the roles :data:`SCORE_MOD_ROLES`.
        name: of the struct that ``dlattn/plans/score_source.py`` writes.
    """

    lines: tuple[Line, ...]
    result: int
    slope: int | None = None
    reads: tuple[Read, ...] = ()
    name: str = "ScoreProgram"

    @property
    def cpp(self) -> str:
        return self.name

    @property
    def constant_derivative(self) -> bool:
        if self.slope is None:
            return self.lines[masked_last(self)[0]].operation == "score"
        return self.lines[self.slope].holds(1.0)

    @property
    def steepest(self) -> float:
        """What the derivative's magnitude is at most, as far as the lines alone tell."""
        from dlattn.problem.ranges import largest_magnitude

        assert self.slope is not None
        return largest_magnitude(self.lines, self.slope)

    @property
    def of_forward(self) -> ScoreProgram:
        """What a forward has of it: the result's lines come before those of the derivative."""
        return replace(self, lines=self.lines[: self.result + 1], slope=None)

    @property
    def gathers(self) -> bool:
        """Whether it reads elements of queries or keys, of which there are many."""
        results = (self.result,) if self.slope is None else (self.result, self.slope)
        used = (self.lines[number] for number in needed(self.lines, *results))
        reads = [self.reads[int(x.number or 0)] for x in used if x.operation == "read"]
        return any(read.by_query or read.by_key for read in reads)

    @property
    def takes_score(self) -> bool:
        """Whether the result depends on the score."""
        return any(self.lines[n].operation == "score" for n in needed(self.lines, self.result))

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        return self._computed(self.result, score, where, values)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        assert self.slope is not None
        slope = self._computed(self.slope, score, where, values)
        # What is masked, or dropped out of range, has no part in any gradient.
        return np.where(grad == 0, grad, grad * slope)

    def _computed(self, result: int, score: Array, where: Where, values: Values) -> Array:
        places = (where.batch, where.head, where.query, where.key)

        def leaf(line: Line) -> Array:
            if line.operation == "score":
                return score
            assert line.number is not None
            if line.operation == "position":
                return places[int(line.number)]
            return read_at(values.score_tensors[int(line.number)], where)

        with np.errstate(all="ignore"):
            computed = evaluate(self.lines, result, leaf, score.dtype)
        return np.broadcast_to(computed, score.shape)


@dataclass(frozen=True)
class ScoreGradient:
    """The gradient of a tensor that a function of scores reads.

    Attributes:
        number: which of its reads; one more than there are of slopes that have become ALiBi's.
        dtype: element type of the gradient.
        partial: the derivative of the function's result by an element that is read, as a function
            of the same score.
    """

    number: int
    dtype: data_type
    partial: ScoreProgram

    @property
    def role(self) -> str:
        return SCORE_GRADIENT_ROLES[self.number]

    @property
    def is_plain(self) -> bool:
        """Whether what is read is only added to the score, as a bias is."""
        return self.partial.lines[self.partial.result].holds(1.0)

    def is_read_by(self, edit: Edit) -> bool:
        """Whether an edit reads what the gradient is of."""
        return isinstance(edit, ScoreProgram if self.number < len(self.partial.reads) else Alibi)

    def add(self, total: Array, grad: Array, score: Array, where: Where, values: Values) -> None:
        """Adds to the gradient, in its shape, that of some results of the edit that reads."""
        slope = self.partial.apply(score, where, values)
        # What is masked has no part in any gradient, whatever the derivative.
        add_at(total, np.where(grad == 0, grad, grad * slope), where)


def evaluate(lines: Sequence[Line], result: int, leaf: Any, floats: Any) -> Array:
    """What a line is, in NumPy.

    Args:
        leaf: line -> array, of those without operands, constants aside.
        floats: type of floats.
    """
    from dlattn.problem.pointwise import POINTWISE

    types = {
        Kind.FLOAT: np.dtype(floats), Kind.BOOLEAN: np.dtype(bool),
        Kind.INT32: np.dtype(np.int32), Kind.INT64: np.dtype(np.int64),
    }  # fmt: skip
    known: dict[int, Array] = {}
    for number in needed(lines, result):
        line, dtype = lines[number], types[lines[number].kind]
        operands = [known[x] for x in line.operands]
        if line.operation == "constant":
            made: Any = np.asarray(line.number)
        elif line.operation == "cast":
            (made,) = operands
        elif line.operation in POINTWISE:
            made = POINTWISE[line.operation].function(*operands)
        else:
            made = leaf(line)
        known[number] = np.asarray(made).astype(dtype)
    return known[result]


def score_program(
    builder: Builder,
    result: int,
    slope: int | None,
    reads: Sequence[Read],
    also: Sequence[int] = (),
) -> tuple[ScoreProgram, list[int]]:
    """The lines that results need, and which of the reads those are, in the program's order: that
    in which results need them, whatever else was written before; then those that it is to have
    also."""
    roots = (result,) if slope is None else (result, slope)
    lines = (builder.lines[old] for old in _in_order(builder.lines, roots))
    needed_reads = (int(x.number or 0) for x in lines if x.operation == "read")
    used = list(dict.fromkeys([*needed_reads, *also]))
    return _program(builder, result, slope, reads, used), used


def partial_program(
    builder: Builder, partial: int, reads: Sequence[Read], used: Sequence[int]
) -> ScoreProgram:
    """A derivative, as a program beside the one that has these reads in use."""
    return replace(_program(builder, partial, None, reads, used), name="ScorePartial")


def _program(
    builder: Builder, result: int, slope: int | None, reads: Sequence[Read], used: Sequence[int]
) -> ScoreProgram:
    kept = _in_order(builder.lines, (result,) if slope is None else (result, slope))
    new = {old: number for number, old in enumerate(kept)}
    lines = [
        replace(line, operands=tuple(new[x] for x in line.operands))
        for line in (builder.lines[old] for old in kept)
    ]
    return ScoreProgram(
        lines=tuple(
            replace(line, number=used.index(int(line.number or 0)))
            if line.operation == "read"
            else line
            for line in lines
        ),
        result=new[result],
        slope=None if slope is None else new[slope],
        reads=tuple(reads[number] for number in used),
    )


def _in_order(lines: Sequence[Line], roots: Sequence[int]) -> list[int]:
    """What roots depend on, each after its operands."""
    found: dict[int, None] = {}
    pending = [(root, False) for root in reversed(roots)]
    while pending:
        number, is_ready = pending.pop()
        if is_ready:
            found[number] = None
        elif number not in found:
            pending.append((number, True))
            pending.extend((x, False) for x in reversed(lines[number].operands))
    return list(found)


def masked_last(program: ScoreProgram) -> tuple[int, list[tuple[int, bool]]]:
    """What the last selections of a program select from, and where: in which all of these lines
    have these values; elsewhere the score is -inf."""
    lines, result, conditions = program.lines, program.result, []
    while lines[result].operation == "binary_select":
        x, y, mask = lines[result].operands
        if lines[y].number == -np.inf:
            result, wanted = x, True
        elif lines[x].number == -np.inf:
            result, wanted = y, False
        else:
            break
        conditions.extend(_conjuncts(lines, mask, wanted))
    return result, conditions


def _conjuncts(lines: Sequence[Line], number: int, wanted: bool) -> list[tuple[int, bool]]:
    """The lines that must all have these values for a line to have the one that is wanted."""
    line = lines[number]
    if line.operation == "logical_not":
        return _conjuncts(lines, line.operands[0], not wanted)
    if line.operation == ("logical_and" if wanted else "logical_or"):
        return [it for x in line.operands for it in _conjuncts(lines, x, wanted)]
    return [(number, wanted)]


def masked_by_infinity(builder: Builder, result: int) -> int:
    """The same scores, where what the last selections set to at most :data:`MASKED` is -inf: rows
    of nothing else attend to nothing, as where a mask is an argument."""
    line = builder.lines[result]
    selected = builder.lines[line.operands[0]] if line.operation == "cast" else line
    if selected.operation != "binary_select":
        return result
    *parts, mask = selected.operands
    x, y = (builder.cast(part, line.kind) for part in parts)
    low = builder.constant(-np.inf)
    if _is_masked(builder, y):
        return builder.pointwise("binary_select", masked_by_infinity(builder, x), low, mask)
    if _is_masked(builder, x):
        return builder.pointwise("binary_select", low, masked_by_infinity(builder, y), mask)
    return result


def slope_of(builder: Builder, result: int, read: int | None = None) -> int:
    """The derivative of the result by the score, or by what a read reads, a float."""
    from dlattn.problem.derivative import derivative

    by = builder.score() if read is None else builder.read(read, Kind.FLOAT)
    return derivative(builder, _unmasked(builder, result), by)


def _unmasked(builder: Builder, result: int) -> int:
    """What the last selections select from: where they mask, weights are 0, and any derivative will
    do."""
    line = builder.lines[result]
    if line.operation == "binary_select":
        x, y, _ = line.operands
        for kept, masked in ((x, y), (y, x)):
            if builder.value(masked) == -np.inf:
                return _unmasked(builder, kept)
    return result


def _is_masked(builder: Builder, line: int) -> bool:
    value = builder.value(line)
    return value is not None and value <= MASKED
