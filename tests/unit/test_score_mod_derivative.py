"""Symbolic derivatives against finite differences, and what a builder makes of expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.problem import POINTWISE, Read
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import Kind, needed
from dlattn.problem.ranges import largest_magnitude
from dlattn.problem.score_program import (
    evaluate,
    masked_by_infinity,
    partial_program,
    score_program,
    slope_of,
)

Tree = Any

#: Operations of numbers that have a derivative everywhere, but at kinks.
_UNARY = (
    *("neg", "abs", "identity", "exp", "sin", "cos", "erf", "tanh", "sigmoid", "elu", "gelu"),
    *("gelu_approx_tanh", "softplus", "swish", "relu", "ceil", "floor"),
)
#: Those that only some numbers have: taken of 1.5 + sin(x).
_POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")
_BINARY = ("add", "sub", "mul", "max", "min", "add_square", "bias", "scale")
_BACKWARD = tuple(name for name in POINTWISE if name.endswith("_backward"))
_COMPARED = ("cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "cmp_eq", "cmp_neq")


def _grown(x: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    compared = st.tuples(st.sampled_from(_COMPARED), x, x)
    return (
        st.tuples(st.sampled_from(_UNARY), x)
        | st.tuples(st.sampled_from(_POSITIVE), x.map(lambda y: ("add", 1.5, ("sin", y))))
        | st.tuples(st.sampled_from((*_BINARY, *_BACKWARD)), x, x)
        | st.tuples(st.sampled_from(("div", "mod")), x, x.map(lambda y: ("add", 2.5, ("cos", y))))
        | st.tuples(st.just("pow"), x.map(lambda y: ("add", 1.5, ("sin", y))), x)
        | st.tuples(st.just("tan"), x.map(lambda y: ("sin", y)))
        | st.tuples(st.just("binary_select"), x, x, compared)
    )


_NUMBERS = st.sampled_from((-1.5, 0.25, 2.0))
TREES = st.recursive(st.just("s") | _NUMBERS | st.just("row"), _grown, max_leaves=6)
#: Of a tensor that is read, too.
READING = st.recursive(st.sampled_from(("s", "t", "t")) | _NUMBERS, _grown, max_leaves=6)


def line(builder: Builder, tree: Tree) -> int:
    """A tree as lines."""
    if tree == "s":
        return builder.score()
    if tree == "row":
        return builder.position(2)
    if tree == "t":
        return builder.read(0, Kind.FLOAT)
    if isinstance(tree, float):
        return builder.constant(tree)
    operation, *operands = tree
    numbers = {"negative_slope": 0.25} if operation.startswith("leaky") else {}
    return builder.pointwise(operation, *(line(builder, x) for x in operands), **numbers)


def exact(tree: Tree, score: Any, kinks: list[Any], read: Any = None) -> Any:
    """The tree by the operations' NumPy twins; what is near 0 at kinks and jumps is appended."""
    if tree == "s":
        return score
    if tree == "t":
        return read
    if tree == "row":
        return 3.0 + 0 * score
    if isinstance(tree, float):
        return tree + 0 * score
    operation, *operands = tree
    given = [exact(x, score, kinks, read) for x in operands]
    if operation in ("max", "min") or operation.startswith("cmp"):
        kinks.append(abs(given[0] - given[1]))
    if operation in ("abs", "relu", "elu") or operation.startswith(("relu_", "leaky_", "elu_")):
        kinks.append(abs(given[-1]))
    if operation in ("ceil", "floor"):
        kinks.append(abs(given[0] - np.round(given[0])))
    if operation == "mod":
        kinks.append(abs(given[0] / given[1] - np.round(given[0] / given[1])))
    numbers = {"negative_slope": 0.25} if operation.startswith("leaky") else {}
    made: Any = POINTWISE[operation].function(*given, **numbers)
    return made


def computed(builder: Builder, result: int, score: Any) -> Any:
    """A line in float64."""

    def leaf(it: Any) -> Any:
        return score if it.operation == "score" else np.asarray(3)

    with np.errstate(all="ignore"):
        return evaluate(builder.lines, result, leaf, np.float64) + 0 * score


@settings(max_examples=600, deadline=None)
@given(TREES, st.integers(0, 2**16))
def test_derivative(tree: Tree, seed: int) -> None:
    """Lines are what the operations' twins say, and the derivative is that of central differences,
    away from kinks."""
    builder = Builder()
    result = line(builder, tree)
    slope = slope_of(builder, result)
    score = np.random.default_rng(seed).normal(size=8)
    away, want, difference = differences(lambda x, kinks: exact(tree, x, kinks), score)
    assume(away.any())
    got, slopes = (computed(builder, x, score) for x in (result, slope))
    np.testing.assert_allclose(got[away], want[away], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(slopes[away], difference[away], rtol=1e-5, atol=1e-5)


@settings(max_examples=600, deadline=None)
@given(TREES, st.integers(0, 2**16))
def test_steepest(tree: Tree, seed: int) -> None:
    """No derivative is larger than what lines tell of it."""
    builder = Builder()
    result = line(builder, tree)
    steepest = largest_magnitude(builder.lines, slope_of(builder, result))
    score = 100 * np.random.default_rng(seed).normal(size=64)
    slopes = computed(builder, slope_of(builder, result), score)
    assert not (abs(slopes) > steepest * (1 + 1e-6)).any()


@pytest.mark.parametrize(
    "tree, steepest",
    [
        ("s", 1.0),
        (("mul", ("tanh", ("mul", "s", 0.25)), 4.0), 2.0),
        (("max", ("mul", "s", 2.0), ("neg", "s")), 2.0),
        (("mul", "s", ("sigmoid", "row")), 1.0),
        (("mul", "s", "s"), math.inf),
        (("mul", "s", "t"), math.inf),
        (("exp", "s"), math.inf),
    ],
)
def test_what_tells_of_the_steepest(tree: Tree, steepest: float) -> None:
    """Constants and functions that are bounded do; numbers that are read do not."""
    builder = Builder()
    result = line(builder, tree)
    assert largest_magnitude(builder.lines, slope_of(builder, result)) == steepest


@settings(max_examples=600, deadline=None)
@given(READING, st.integers(0, 2**16))
def test_derivative_by_what_is_read(tree: Tree, seed: int) -> None:
    """The derivative by an element that is read is that of central differences, away from kinks."""
    builder = Builder()
    result = line(builder, tree)
    slope = slope_of(builder, result, read=0)
    partial = partial_program(builder, slope, [Read(data_type.FLOAT)], [0])
    score, read = np.random.default_rng(seed).normal(size=(2, 8))
    away, _, difference = differences(lambda x, kinks: exact(tree, score, kinks, x), read)
    assume(away.any())

    def leaf(it: Any) -> Any:
        return score if it.operation == "score" else read

    with np.errstate(all="ignore"):
        got = evaluate(partial.lines, partial.result, leaf, np.float64) + 0 * score
    np.testing.assert_allclose(got[away], difference[away], rtol=1e-5, atol=1e-5)


def differences(function: Callable[[Any, list[Any]], Any], at: Any) -> tuple[Any, Any, Any]:
    """Where central differences tell the derivative, what a function is there, and they."""
    step = 1e-5
    with np.errstate(all="ignore"):
        kinks: list[Any] = []
        want = function(at, kinks) + 0 * at
        nearby = [function(at + k * step, []) + 0 * at for k in (-2, -1, 1, 2)]
    away = np.isfinite(want)
    for distance in kinks:
        away &= ~(distance < 1e-2)
    for value in nearby:
        away &= np.isfinite(value)
    difference = (nearby[0] - 8 * nearby[1] + 8 * nearby[2] - nearby[3]) / (12 * step)
    away &= (abs(want) < 1e3) & (abs(difference) < 1e3)
    # Where it bends within a few steps, differences tell little.
    coarse = (nearby[3] - nearby[0]) / (4 * step)
    away &= abs(coarse - difference) < 1e-6 * (1 + abs(difference))
    return away, want, difference


def test_powers_of_nothing() -> None:
    """As in PyTorch and JAX, a power of 0 has the derivative 0 by its exponent, and no NaN."""
    builder = Builder()
    slope = slope_of(builder, line(builder, ("pow", ("relu", "s"), "t")), read=0)

    def leaf(it: Any) -> Any:
        return np.asarray([-1.0, 0.0, 2.0]) if it.operation == "score" else np.asarray(1.5)

    with np.errstate(all="ignore"):
        got = evaluate(builder.lines, slope, leaf, np.float64)
    np.testing.assert_allclose(got, [0, 0, 2**1.5 * math.log(2)])


@pytest.mark.parametrize("operation", sorted(POINTWISE))
def test_every_operation_has_lines(operation: str) -> None:
    """A builder writes each pointwise operation, with the value of its NumPy twin."""
    builder = Builder()
    first = builder.pointwise("add", builder.score(), builder.constant(1.75))
    count = len(POINTWISE[operation].operands)
    operands = [first, builder.constant(0.5), builder.constant(1.0)][:count]
    numbers = {"negative_slope": 0.25} if operation.startswith("leaky") else {}
    result = builder.pointwise(operation, *operands, **numbers)
    score = np.asarray([-0.5, 0.25])
    given = [score + 1.75, np.asarray(0.5), np.asarray(1.0)][:count]
    want = np.asarray(POINTWISE[operation].function(*given, **numbers), np.float64)
    np.testing.assert_allclose(computed(builder, result, score), want, rtol=1e-12)


def test_ties_and_kinks() -> None:
    """abs has the derivative 0 at 0, max and min that of their first operand, relu 0."""
    score = np.zeros(1)
    for tree, want in (
        (("abs", "s"), 0.0),
        (("max", ("mul", "s", 2.0), "s"), 2.0),
        (("min", "s", ("mul", "s", 2.0)), 1.0),
        (("relu", "s"), 0.0),
    ):
        builder = Builder()
        slope = slope_of(builder, line(builder, tree))
        assert computed(builder, slope, score) == want


def _same(a: Callable[[Builder], int], b: Callable[[Builder], int]) -> bool:
    builder = Builder()
    return a(builder) == b(builder)


@pytest.mark.parametrize(
    "tree, simple",
    [
        (("add", "s", 0.0), "s"),
        (("mul", 1.0, "s"), "s"),
        (("sub", "s", ("mul", 0.0, "row")), "s"),
        (("neg", ("neg", "s")), "s"),
        (("mul", ("mul", "s", 4.0), 0.25), "s"),
        (("div", "s", 4.0), ("mul", "s", 0.25)),
        (("add", "s", ("exp", 0.0)), ("add", 1.0, "s")),
        (("mul", "s", "row"), ("mul", "row", "s")),
        (("binary_select", "s", "row", ("cmp_gt", 2.0, 1.0)), "s"),
        (("pow", "s", 2.0), ("mul", "s", "s")),
    ],
)
def test_simplified(tree: Tree, simple: Tree) -> None:
    """What is constant or does nothing is not written, and nothing is written twice."""
    assert _same(lambda b: line(b, tree), lambda b: line(b, simple))


def test_only_what_is_needed_is_kept() -> None:
    """A program has neither lines nor reads that its results do not depend on."""
    builder = Builder()
    added, other = builder.read(0, Kind.FLOAT), builder.read(1, Kind.INT32)
    builder.pointwise("exp", other)
    result = builder.pointwise("add", builder.score(), added)
    reads = (Read(data_type.FLOAT), Read(data_type.INT32))
    program, used = score_program(builder, result, slope_of(builder, result), reads)
    assert used == [0] and program.reads == reads[:1]
    assert program.slope is not None and program.constant_derivative
    roots = program.result, program.slope
    assert len(needed(program.lines, *roots)) == len(program.lines)


def test_masked_scores_have_no_derivative_to_compute() -> None:
    """A last selection of -inf, or of any number at most -10000, is -inf, and leaves the derivative
    of what it selects from."""
    for fill in (-math.inf, -1e20, -1e4):
        builder = Builder()
        result = line(builder, ("binary_select", "s", fill, ("cmp_gt", "row", 1.0)))
        result = masked_by_infinity(builder, result)
        assert builder.value(builder.lines[result].operands[1]) == -math.inf
        assert builder.value(slope_of(builder, result)) == 1.0
    builder = Builder()
    result = line(builder, ("binary_select", "s", -9999.0, ("cmp_gt", "row", 1.0)))
    assert masked_by_infinity(builder, result) == result


def test_selected_whole_numbers() -> None:
    """Selections of whole numbers are whole, and wide if one of them is; a last one masks like
    those of floats."""
    builder = Builder()
    narrow, wide = builder.position(2), builder.read(0, Kind.INT64)
    keep = builder.pointwise("cmp_gt", narrow, builder.constant(1, Kind.INT64))
    for other, kind in (
        (wide, Kind.INT64),
        (builder.constant(-1, Kind.INT64), Kind.INT32),
        (builder.constant(2**40, Kind.INT64), Kind.INT64),
        (builder.constant(True, Kind.BOOLEAN), Kind.INT32),
        (builder.constant(0.5), Kind.FLOAT),
    ):
        for x, y in ((narrow, other), (other, narrow)):
            made = builder.pointwise("binary_select", x, y, keep)
            assert builder.lines[made].kind is kind
    low = builder.constant(-20000, Kind.INT64)
    result = builder.cast(builder.pointwise("binary_select", narrow, low, keep), Kind.FLOAT)
    masked = builder.lines[masked_by_infinity(builder, result)]
    assert builder.value(masked.operands[1]) == -math.inf
    assert masked.operands[0] == builder.cast(narrow, Kind.FLOAT)


def test_a_tensor_is_no_constant() -> None:
    """A derivative that is the second tensor, or the head, is not the number 1 (found when
    gradients of what is read were built)."""
    builder = Builder()
    first, second = builder.read(0, Kind.FLOAT), builder.read(1, Kind.FLOAT)
    product = builder.pointwise("mul", builder.score(), second)
    result = builder.pointwise("add", first, product)
    reads = (Read(data_type.FLOAT), Read(data_type.FLOAT))
    program, used = score_program(builder, result, slope_of(builder, result), reads)
    assert used == [0, 1] and not program.constant_derivative
