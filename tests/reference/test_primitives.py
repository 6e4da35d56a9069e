"""Primitive operations on the CPU, each against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.problem import POINTWISE
from tests.primitive_strategies import singles
from tests.primitives import EVERY, Single, check_single

FLOAT, DOUBLE = cudnn.data_type.FLOAT, cudnn.data_type.DOUBLE
Mode = cudnn.reduction_mode


def graph(**types: Any) -> Any:
    return cudnn.pygraph(handle=cudnn.create_handle(device="cpu"), **types)


def run(made: Any, out: Any, pack: dict[Any, Any], dtype: Any = np.float64) -> Any:
    """The output, of a graph that is yet to be built."""
    out.set_output(True).set_data_type(dtype)
    made.build()
    result = np.empty(out.get_dim(), dtype)
    made.execute({**pack, out: result})
    return result


def one(x: Any, operation: str, *more: Any, change: Any = None, **numbers: Any) -> Any:
    """An operation's result on an array, in the array's type; ``change`` is called with it."""
    made = graph()
    t = made.tensor_like(x, name="x")
    out = getattr(made, operation)(t, *more, **numbers)
    if change is not None:
        change(out)
    return run(made, out, {t: x}, x.dtype)


def test_every_operation_has_a_definition() -> None:
    """The tests know as many pointwise operations as there are."""
    assert EVERY.keys() == POINTWISE.keys()


@settings(max_examples=600)
@given(singles())
def test_pointwise(case: Single) -> None:
    """Shapes broadcast, in any strides and types, and every element is its definition's."""
    check_single(case)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    st.sampled_from([mode for mode in Mode if mode is not Mode.NOT_SET]),
    st.data(),
)
def test_reduction(dim: tuple[int, ...], mode: Any, data: st.DataObject) -> None:
    """The axes of which the result's shape says 1 are reduced."""
    kept = data.draw(st.tuples(*len(dim) * [st.booleans()]))
    x = np.random.default_rng(0).integers(-3, 4, dim) / 2
    wanted = tuple(size if keep else 1 for size, keep in zip(dim, kept, strict=True))
    found = one(x, "reduction", mode, change=lambda y: y.set_dim(wanted))
    axes = tuple(axis for axis, keep in enumerate(kept) if not keep)
    moved = np.moveaxis(x, axes, range(-len(axes), 0)).reshape(*np.array(dim)[list(kept)], -1)
    definitions = {
        Mode.ADD: lambda row: sum(row),
        Mode.MUL: lambda row: np.multiply.reduce(row),
        Mode.MIN: min,
        Mode.MAX: max,
        Mode.AMAX: lambda row: max(map(abs, row)),
        Mode.AVG: lambda row: sum(row) / len(row),
        Mode.NORM1: lambda row: sum(map(abs, row)),
        Mode.NORM2: lambda row: np.linalg.norm(row),
        Mode.MUL_NO_ZEROS: lambda row: np.multiply.reduce([v for v in row if v]),
    }
    expected = np.apply_along_axis(definitions[mode], -1, moved).reshape(wanted)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@given(st.tuples(*4 * [st.integers(1, 3)]), st.sampled_from((Mode.ADD, Mode.MAX, Mode.AVG)))
def test_reduction_of_neighbours(sizes: tuple[int, ...], mode: Any) -> None:
    """Result i of m, of n entries, is of those that a product with m matrices gives matrix i."""
    rows, row_groups, columns, column_groups = sizes
    x = np.random.default_rng(0).standard_normal((rows * row_groups, columns * column_groups))
    found = one(x, "reduction", mode, change=lambda y: y.set_dim((rows, columns)))
    function = {Mode.ADD: np.sum, Mode.MAX: np.max, Mode.AVG: np.mean}[mode]
    for i in range(rows):
        for j in range(columns):
            mine = x[np.arange(len(x)) * rows // len(x) == i]
            mine = mine[:, np.arange(x.shape[1]) * columns // x.shape[1] == j]
            np.testing.assert_allclose(found[i, j], function(mine), rtol=1e-12)


def test_reduction_without_a_shape() -> None:
    """Nothing is reduced, as in cuDNN."""
    x = np.array([[-1.0, 2.0]])
    np.testing.assert_array_equal(one(x, "reduction", Mode.ADD), x)


@given(st.tuples(*6 * [st.integers(1, 3)]), st.booleans(), st.sampled_from((1, 3, None)))
def test_matmul(sizes: tuple[int, ...], grouped: bool, batch_b: int | None) -> None:
    """Products of matrices of any strides; heads of the second are shared by groups."""
    b, h, m, k, n, groups = sizes
    rng = np.random.default_rng(0)
    x = rng.standard_normal((b, h * groups, m, k))
    y = rng.standard_normal((1 if batch_b == 1 else b, h if grouped else h * groups, n, k))
    y = y.swapaxes(2, 3)
    made = graph()
    tx, ty = made.tensor_like(x), made.tensor_like(y)
    found = run(made, made.matmul(tx, ty), {tx: x, ty: y})
    full = np.repeat(y, groups, axis=1) if grouped else y
    np.testing.assert_allclose(found, np.einsum("bhmk,bhkn->bhmn", x, full + 0 * x[:, :, :1, :1]))


def test_matmul_of_lengths() -> None:
    """Beyond M and N there is padding, beyond K nothing is read."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 3, 4)), rng.standard_normal((2, 1, 4, 5))
    lengths = {"m_override": (2, 3), "n_override": (5, 1), "k_override": (3, 0)}
    sizes = {name: np.array(n, np.int32).reshape(2, 1, 1, 1) for name, n in lengths.items()}
    expected = np.full((2, 1, 3, 5), 7.0)
    expected[0, 0, :2] = x[0, 0, :2, :3] @ y[0, 0, :3]
    expected[1, 0, :, :1] = 0
    x[0, :, :, 3:] = y[1] = np.nan
    made = graph()
    tensors = {name: made.tensor_like(n) for name, n in sizes.items()}
    tx, ty = made.tensor_like(x), made.tensor_like(y)
    pack = {tx: x, ty: y} | {t: sizes[name] for name, t in tensors.items()}
    found = run(made, made.matmul(tx, ty, padding=7.0, **tensors), pack)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@given(st.permutations(range(4)))
def test_transpose(permutation: list[int]) -> None:
    """Axis i of the result is axis permutation[i]."""
    x = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(one(x, "transpose", permutation), x.transpose(permutation))


def test_reshape() -> None:
    """LOGICAL keeps the order of elements; VIEW_ONLY keeps their places in memory."""
    x = np.arange(24.0).reshape(2, 3, 4).transpose(0, 2, 1)
    mode = cudnn.reshape_mode
    found = one(x, "reshape", reshape_mode=mode.LOGICAL, change=lambda y: y.set_dim((6, 4)))
    np.testing.assert_array_equal(found, x.reshape(6, 4))
    found = one(x, "reshape", change=lambda y: y.set_dim((6, 4)))
    np.testing.assert_array_equal(found, np.arange(24.0).reshape(6, 4))


def test_reshape_transposes() -> None:
    """A view with swapped dims and strides is the transpose, as cuDNN's own graphs use it."""
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    made = graph()
    t = made.tensor_like(x)
    view = made.reshape(t).set_dim((1, 2, 4, 3)).set_stride((24, 12, 1, 4))
    np.testing.assert_array_equal(run(made, made.identity(view), {t: x}), x.swapaxes(2, 3))


@pytest.mark.parametrize("axis", range(4))
def test_gen_index(axis: int) -> None:
    """Each element's position along the axis."""
    x = np.zeros((2, 3, 4, 5))
    np.testing.assert_array_equal(one(x, "gen_index", axis), np.indices(x.shape)[axis])


def test_softmax() -> None:
    """Along the last axis, with the log-sum-exp; rows of -inf are 0."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5)) * 30
    x[0, 1] = -np.inf
    made = graph()
    t = made.tensor_like(x)
    s, stats = made.softmax(t, generate_stats=True)
    for out in (s, stats):
        out.set_output(True).set_data_type(DOUBLE)
    made.build()
    found, sums = np.empty(x.shape), np.empty((2, 3, 1))
    made.execute({t: x, s: found, stats: sums})
    expected = np.exp(x - np.logaddexp.reduce(x, -1, keepdims=True).clip(-1e300))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(sums, np.logaddexp.reduce(x, -1, keepdims=True), rtol=1e-12)
    assert made.softmax(t)[1] is None if not made._is_built else True


@given(st.sampled_from((0.1, 0.5, 0.9, 1.0)), st.integers(-(2**63), 2**63 - 1))
def test_rng(keep: float, seed: int) -> None:
    """The mask of sdpa's dropout."""
    made, dim = graph(), (2, 3, 17, 19)
    seeds = [np.full((1, 1, 1, 1), number, np.int64) for number in (seed, 7)]
    pack = {made.tensor_like(x): x for x in seeds}
    out = made.rng(*pack, bernoulli_probability=keep).set_dim(dim)
    expected = cudnn.philox_dropout_mask(1 - keep, seed, 7, dim)
    np.testing.assert_array_equal(run(made, out, pack), expected)


def test_types() -> None:
    """Virtual tensors are rounded to the intermediate type, arithmetic is in the compute type."""
    x = np.array([1.0, 2049.0, 1 / 3], np.float32)
    for intermediate, rounded in ((cudnn.data_type.HALF, np.float16), (FLOAT, np.float32)):
        made = graph(io_data_type=FLOAT, intermediate_data_type=intermediate)
        t = made.tensor_like(x)
        found = run(made, made.identity(made.identity(t)), {t: x}, np.float32)
        np.testing.assert_array_equal(found, x.astype(rounded))
    made = graph(compute_data_type=DOUBLE)
    t = made.tensor_like(x)
    tiny = made.tensor_scalar(1e-12)
    found = run(made, made.add(t, tiny), {t: x})
    np.testing.assert_array_equal(found, x.astype(float) + float(np.float32(1e-12)))


def test_integers() -> None:
    """Integers are computed with exactly where that is asked for, compared and selected exactly
    always."""
    x = np.array([2**30 + 1, 5], np.int32)
    made = graph(io_data_type=cudnn.data_type.INT32)
    t = made.tensor_like(x)
    out = made.sub(t, made.tensor_scalar(2**30), compute_data_type=cudnn.data_type.INT32)
    np.testing.assert_array_equal(run(made, out, {t: x}, np.int32), [1, 5 - 2**30])
    made = graph()
    t = made.tensor_like(x)
    out = made.cmp_gt(t, made.tensor_scalar(2**30))
    np.testing.assert_array_equal(run(made, out, {t: x}, bool), [True, False])
    kept = np.array([True, False])
    for asked in (cudnn.data_type.NOT_SET, cudnn.data_type.INT64):
        made = graph()
        t, mask = made.tensor_like(x), made.tensor_like(kept)
        out = made.binary_select(t, made.tensor_scalar(-1), mask, compute_data_type=asked)
        found = run(made, out, {t: x, mask: kept}, np.int64)
        np.testing.assert_array_equal(found, [2**30 + 1, -1])


def test_integers_beside_floats() -> None:
    """What is compared with floats, or selected beside them, is as exact as the compute type."""
    x, y = np.array([2**24 + 1, 5], np.int32), np.array([2**24, 6], np.float32)
    kept = np.array([True, False])
    made = graph()
    t, other = made.tensor_like(x), made.tensor_like(y)
    out = made.cmp_eq(t, other, compute_data_type=DOUBLE)
    np.testing.assert_array_equal(run(made, out, {t: x, other: y}, bool), [False, False])
    made = graph(compute_data_type=DOUBLE)
    t, other, mask = (made.tensor_like(array) for array in (x, y, kept))
    found = run(made, made.binary_select(t, other, mask), {t: x, other: y, mask: kept})
    np.testing.assert_array_equal(found, [2**24 + 1, 6])


def test_outputs_may_share_memory_with_inputs() -> None:
    """What has memory is stored at the end."""
    x = np.arange(4.0)
    made = graph()
    t = made.tensor_like(x)
    first, second = made.neg(t).set_output(True), made.exp(t).set_output(True)
    made.build()
    other = np.empty(4)
    made.execute({t: x, first: x, second: other})
    np.testing.assert_array_equal(x, -np.arange(4.0))
    np.testing.assert_allclose(other, np.exp(np.arange(4.0)))


def test_wrapper() -> None:
    """``Graph`` takes arrays as operands, and allocates outputs like the first of them."""
    x, y = np.arange(6.0).reshape(2, 3), np.ones((1, 3))
    with cudnn.Graph(inputs=["sum::a", "sum::b"], outputs=["exp::OUT_0"]) as made:
        made.exp(made.add(x, y, name="sum"), name="exp").set_output(True)
    np.testing.assert_allclose(made(x, y), np.exp(x + y))


def test_wrapper_finds_attention() -> None:
    """In ``Graph``, too, what is attention runs as that."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 5, 8))
    fill = np.full((1, 1, 1, 1), -1e20, np.float32)
    inputs = ["bmm1::A", "bmm1::B", "bmm2::B", "select::input1"]
    with cudnn.Graph(inputs=inputs, outputs=["bmm2::C"]) as made:
        p = made.matmul(q, k.swapaxes(2, 3), name="bmm1")
        keep = made.cmp_ge(made.gen_index(p, 2), made.gen_index(p, 3))
        s, _ = made.softmax(made.binary_select(p, fill, keep, name="select"))
        made.matmul(s, v, name="bmm2").set_output(True)
    with cudnn.Graph(inputs=[q, k, v], outputs=["sdpa::O"]) as wanted:
        o, _ = wanted.sdpa(q, k, v, is_inference=True, use_causal_mask=True, name="sdpa")
        o.set_output(True)
    np.testing.assert_array_equal(made(q, k, v, fill), wanted(q, k, v))
    np.testing.assert_array_equal(made(q, k.swapaxes(2, 3), v, fill), wanted(q, k, v))


def test_backward_of_attention() -> None:
    """cuDNN's Mha-bprop, from S of the forward, gives the gradients of ``sdpa_backward``."""
    rng = np.random.default_rng(0)
    dim, square = (2, 3, 16, 8), (2, 3, 16, 16)
    q, k, v, d_o = rng.standard_normal((4, *dim))
    with cudnn.Graph(inputs=[q, k, v], outputs=["sdpa::O", "sdpa::Stats"]) as forward:
        for out in forward.sdpa(q, k, v, attn_scale=0.5, generate_stats=True, name="sdpa"):
            out.set_output(True).set_data_type(DOUBLE)
    o, stats = forward(q, k, v)
    made = graph(io_data_type=DOUBLE, intermediate_data_type=DOUBLE)
    p = q @ k.swapaxes(2, 3) / 2
    arrays = {"q": q, "k": k, "v": v, "dO": d_o, "s": np.exp(p - stats)}
    t = {name: made.tensor_like(x, name) for name, x in arrays.items()}
    strides = (3 * 16 * 16, 16 * 16, 1, 16)
    turned = [made.reshape(t["s"]).set_dim(square).set_stride(strides)]  # g5
    d_v = made.matmul(turned[0], t["dO"])
    d_s = made.matmul(t["dO"], made.transpose(t["v"], (0, 1, 3, 2)))
    product = made.mul(d_s, t["s"])  # g6
    total = made.reduction(product, Mode.ADD).set_dim((2, 3, 16, 1))
    d_p = made.scale(made.mul(made.sub(d_s, total), t["s"]), made.tensor_scalar(0.5))
    d_q = made.matmul(d_p, t["k"])
    d_k = made.matmul(made.reshape(d_p).set_dim(square).set_stride(strides), t["q"])  # g7
    outputs = [x.set_output(True) for x in (d_q, d_k, d_v)]
    made.build()
    found = {out: np.empty(dim) for out in outputs}
    made.execute({t[name]: x for name, x in arrays.items()} | found)
    inputs = [q, k, v, o, d_o, stats]
    with cudnn.Graph(inputs=inputs, outputs=["b::dQ", "b::dK", "b::dV"]) as backward:
        for out in backward.sdpa_backward(*inputs, attn_scale=0.5, name="b"):
            out.set_output(True)
    for got, wanted in zip(found.values(), backward(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
