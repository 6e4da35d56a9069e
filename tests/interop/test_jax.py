"""``dlattn.jax`` on the CPU: ``jax.nn`` is the computation to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")

import dlattn  # noqa: E402
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError  # noqa: E402
from dlattn.jax import attention, dot_product_attention  # noqa: E402
from tests.layers import check_layer  # noqa: E402

jnp = jax.numpy


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype(np.float32)


def assert_same(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """Up to fp32's rounding of sums."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape
        sizes = abs(np.asarray(other))
        largest = sizes[np.isfinite(sizes)].max(initial=0)
        np.testing.assert_allclose(one, other, atol=tolerance * (1 + largest))


def with_gradients(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    def loss(*given: Any) -> tuple[Any, Any]:
        out = function(*given)
        return jnp.sin(jax.tree.leaves(out)[0]).sum(), out

    everything = tuple(range(len(inputs)))
    return jax.jit(jax.grad(loss, argnums=everything, has_aux=True))(*inputs)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_is_jaxs(data: st.DataObject) -> None:
    """The output and all gradients are those of JAX's function, for its arguments."""
    draw = data.draw
    batch, columns = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows, keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads, divisor = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3)]))
    lead = () if (single := draw(st.booleans())) else (batch,)
    q = random(*lead, rows, heads, columns)
    k, v = (random(*lead, keys, heads // divisor, columns, seed=i) for i in (1, 2))
    options: dict[str, Any] = {"scale": draw(st.sampled_from([None, 0.3, 1.5]))}
    options["is_causal"] = draw(st.booleans()) and rows <= keys
    if rows <= keys and draw(st.booleans()):
        ahead = st.integers(0, 9)
        options["local_window_size"] = draw(ahead | st.tuples(ahead, ahead))
    if not single and "local_window_size" not in options:
        for name, most in (("query_seq_lengths", rows), ("key_value_seq_lengths", keys)):
            if draw(st.booleans()):
                lengths = draw(st.lists(st.integers(1, most), min_size=batch, max_size=batch))
                options[name] = np.array(lengths, np.int32)
    # It has no gradient in JAX; of rows past the lengths, JAX has numbers of its own.
    options["return_residual"] = "query_seq_lengths" not in options and draw(st.booleans())
    some = [draw(st.sampled_from([1, n])) for n in (*lead, heads, rows, keys)]
    inputs: tuple[Any, ...] = (q, k, v)
    if draw(st.booleans()):
        inputs += (random(*some, seed=3),)
    if "local_window_size" not in options and draw(st.booleans()):
        mask = random(*some, seed=4) > -0.5
        mask[..., 0] = True  # JAX averages v where nothing is attended
        options["mask"] = mask
    assert_same(
        with_gradients(lambda *x: dot_product_attention(*x, **options), inputs),
        with_gradients(lambda *x: jax.nn.dot_product_attention(*x, **options), inputs),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": (2, 1)},
    "top left": {"causal": True, "alignment": "top_left"},
    "a soft cap": {"softcap": 2.0, "scale": 1.5},
    "slopes": {"alibi_slopes": np.linspace(0.1, 0.7, 4, dtype=np.float32)},
    "lengths": {"lengths": (np.array([5, 2], np.int32), np.array([3, 7], np.int32))},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "a bias": {"bias": random(4, 1, 7)},
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, layout: str) -> None:
    """Results are those of the functions on NumPy arrays, whose own tests compare with float64."""
    axes = ["bshd".index(letter) for letter in layout]
    q, k, v, d_o = (
        random(2, rows, heads, 8, seed=rows).transpose(axes).copy()
        for rows, heads in ((5, 4), (7, 2), (7, 1), (5, 4))
    )
    options = {"layout": layout, **OPTIONS[name]}
    learned = [x for x in ("bias", "sinks") if x in options]

    def function(q: Any, k: Any, v: Any, *more: Any) -> Any:
        given = {**options, **dict(zip(learned, more, strict=True))}
        return attention(q, k, v, return_lse=True, **given)

    inputs = (q, k, v, *(options[x] for x in learned))
    (out, lse), pull = jax.vjp(jax.jit(function), *inputs)
    wanted = dlattn.attention(q, k, v, return_lse=True, **options)
    assert_same((out, lse), wanted)
    d_lse = np.where(np.isfinite(lse), 0.5, 0).astype(np.float32)
    gradients = dlattn.attention_backward(
        d_o, q, k, v, *wanted, dlse=d_lse, **options,
        bias_gradient="bias" in learned, sinks_gradient="sinks" in learned,
    )  # fmt: skip
    assert_same(pull((d_o, d_lse)), [x for x in gradients if x is not None])


def test_packed_sequences() -> None:
    """Packed, outputs and gradients are those of each sequence; rows of none are 0."""
    cu = np.array([0, 3, 3, 8], np.int32)
    q, k, v = (random(10, 2, 8, seed=i) for i in range(3))

    def alone(q: Any, k: Any, v: Any) -> Any:
        parts = [
            attention(*(x[None, a:b] for x in (q, k, v)), causal=True)[0]
            for a, b in ((0, 3), (3, 8))
        ]
        return jnp.concatenate([*parts, jnp.zeros((2, 2, 8))])

    def packed(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, layout="thd", cu_seqlens=cu, causal=True)

    assert_same(with_gradients(packed, (q, k, v)), with_gradients(alone, (q, k, v)))
    with pytest.raises(Exception, match="expected numbers that never fall"):
        jax.block_until_ready(attention(q, k, v, layout="thd", cu_seqlens=cu + 3))


def test_keys_in_pages() -> None:
    """Keys and values that a table finds are as good as those in one piece; of an array of
    lengths, too, there must be one for each."""
    q, pages = random(2, 3, 4, 8), random(9, 4, 2, 8)
    table, lengths = np.array([[3, 0, 8], [5, 2, 1]], np.int32), np.array([10, 5], np.int32)
    whole = pages[table].reshape(2, 12, 2, 8)

    @jax.jit
    def run(k: Any, table: Any) -> Any:
        options = {"lengths": (None, lengths), "block_table": table}
        return attention(q, k, k, causal=True, **options)

    wanted = dlattn.attention(q, whole, whole, lengths=(None, lengths), causal=True)
    assert_same(run(pages, table), wanted)
    with pytest.raises(InvalidArgumentError, match="lengths: one tensor is of q, k and v alike"):
        attention(q, whole, whole, lengths=lengths)


BATCHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "another layout": {"layout": "sbhd"},
    "a bias": {"bias": random(5, 5)},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "lengths": {"lengths": np.array([5, 2], np.int32)},
}


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, 4, 2)])
@pytest.mark.parametrize("name", BATCHED)
def test_batched(name: str, in_axes: tuple[int | None, ...]) -> None:
    """``vmap`` of a function, and of its gradient, is the function of each entry."""
    shape = (5, 2, 4, 8) if "layout" in BATCHED[name] else (2, 5, 4, 8)
    arrays = []
    for i, axis in enumerate(in_axes):
        x = random(3, *shape, seed=i)
        arrays.append(x[0] if axis is None else np.moveaxis(x, 0, axis))

    def value(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(attention(q, k, v, causal=True, **BATCHED[name])).sum()

    for function in (value, jax.grad(value, argnums=(0, 1, 2))):
        each = [
            function(
                *(
                    x if axis is None else np.take(x, i, axis)
                    for x, axis in zip(arrays, in_axes, strict=True)
                )
            )
            for i in range(3)
        ]
        found = jax.jit(jax.vmap(function, in_axes=in_axes))(*arrays)
        assert_same(found, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_what_entries_share_is_not_taken_apart() -> None:
    """A bias, slopes and sinks of all entries are of one batch; with gradients they are not."""
    q, bias = random(3, 2, 5, 4, 8), random(4, 5, 5)
    shared = {
        name: OPTIONS[of][name] for name, of in (("alibi_slopes", "slopes"), ("sinks", "sinks"))
    }

    def value(q: Any, bias: Any) -> Any:
        return jnp.sin(attention(q, q, q, bias=bias, **shared)).sum()

    for argnums, is_loop in ((0, False), ((0, 1), True)):
        gradient = jax.grad(value, argnums=argnums)
        many = jax.vmap(gradient, in_axes=(0, None))
        each = [gradient(x, bias) for x in q]
        assert_same(many(q, bias), jax.tree.map(lambda *x: jnp.stack(x), *each))
        assert ("scan[" in str(jax.make_jaxpr(many)(q, bias))) == is_loop


def test_inside_scan_and_checkpoint() -> None:
    """A loop of layers, its activations computed twice, has the gradient that JAX's has."""
    q, w = random(2, 5, 4, 8), random(8, 8) / 4

    def loss(w: Any, function: Callable[..., Any]) -> Any:
        def layer(x: Any, _: Any) -> tuple[Any, None]:
            return x + function(x @ w, x, x, is_causal=True), None

        return jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0].sum()

    found, wanted = (
        jax.jit(jax.grad(loss), static_argnums=1)(w, function)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_in_scan_and_vmap(dtype: str) -> None:
    """Gradients of a loop of layers, for each of some inputs, are those of JAX in fp32, up to a few
    roundings."""
    x = jnp.asarray(random(3, 2, 5, 4, 8))

    def gradient(function: Callable[..., Any], x: Any) -> Any:
        def layer(x: Any, _: Any) -> tuple[Any, None]:
            return x + function(x, x, x, is_causal=True), None

        def loss(x: Any) -> Any:
            return jax.lax.scan(layer, x, None, length=2)[0].astype(jnp.float32).sum()

        return jax.jit(jax.vmap(jax.grad(loss)))(x)

    half = x.astype(dtype)
    found = gradient(dot_product_attention, half)
    exact = gradient(jax.nn.dot_product_attention, half.astype(jnp.float32))
    assert found.dtype == dtype
    error = abs(found.astype(jnp.float32) - exact).max()
    assert error <= 4 * jnp.finfo(dtype).eps * abs(exact).max()


def test_a_traced_scale() -> None:
    """A scale that JAX traces, or learns, is as good as a number."""
    q = random(2, 5, 4, 8)

    def gradient(function: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda scale: jnp.sin(function(q, q, q, scale=scale)).sum()))(0.3)

    assert_same(gradient(dot_product_attention), gradient(jax.nn.dot_product_attention))


def test_numbers_as_jax_takes_them() -> None:
    """A scale is an array of NumPy's, too, and a window a list, as in ``jax.nn``."""
    q = random(2, 5, 4, 8)
    for options in ({"scale": np.array(0.3)}, {"local_window_size": [1, 2]}):
        found, wanted = (
            function(q, q, q, **options)
            for function in (dot_product_attention, jax.nn.dot_product_attention)
        )
        assert_same(found, wanted)
    with pytest.raises(InvalidArgumentError, match="scale: expected a number, or an array of no"):
        dot_product_attention(q, q, q, scale=np.ones(1))


@pytest.mark.parametrize("batched", [*itertools.product((False, True), repeat=3)])
def test_each_array_may_lack_the_batch(batched: tuple[bool, bool, bool]) -> None:
    """Of one entry, as in ``jax.nn``; the output has it if the query has."""
    rows = (random(5, 4, 8, seed=seed) for seed in range(3))
    given = tuple(x[None] if it else x for x, it in zip(rows, batched, strict=True))
    found, wanted = (
        with_gradients(lambda *x, f=function: f(*x, is_causal=True), given)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_a_bias_of_booleans_is_a_mask(dtype: str) -> None:
    """Beside a mask, both hold; of other integers there is no bias, with a mask or without."""
    q = random(2, 5, 4, 8)
    first, second = (random(*shape) > -0.5 for shape in ((2, 4, 5, 5), (5, 5)))
    first[..., 0] = second[:, 0] = True
    found = with_gradients(
        lambda *x: dot_product_attention(*x, first.astype(dtype), second), (q, q, q)
    )
    wanted = with_gradients(
        lambda *x: jax.nn.dot_product_attention(*x, mask=first & second[None, None]), (q, q, q)
    )
    assert_same(found, wanted)
    for mask in (None, second):
        with pytest.raises(InvalidArgumentError, match="bias: expected elements of .* cast it"):
            dot_product_attention(q, q, q, first.astype(np.int32), mask)


def test_no_second_derivative() -> None:
    """It is refused in a sentence."""
    q = random(1, 5, 2, 8)
    twice = jax.grad(lambda q: jax.grad(lambda q: attention(q, q, q).sum())(q).sum())
    for function in (twice, jax.jit(twice)):
        with pytest.raises(NotImplementedError, match="first derivatives alone"):
            function(q)


def test_slopes_that_are_learned_are_warned_of() -> None:
    """Their gradient is 0, which is said to who asks for it, and to nobody else."""
    x, slopes = random(1, 4, 2, 8), np.ones(2, np.float32)

    def loss(x: Any, slopes: Any) -> Any:
        return attention(x, x, x, alibi_slopes=slopes).sum()

    jax.jit(jax.grad(loss))(x, slopes)
    for differentiated in (jax.grad(loss, 1), jax.jit(jax.grad(loss, (0, 1)))):
        with pytest.warns(UserWarning, match="alibi_slopes: slopes count as constants"):
            found = differentiated(x, slopes)
        assert not jax.tree.leaves(found)[-1].any()


def test_dropout_is_the_same_in_both_passes() -> None:
    """The output is linear in v, so that its gradient tells the mask; another key, another mask."""
    q, k, v, d_o = (random(1, 30, 2, 8, seed=i) for i in range(4))

    def dropped(v: Any, key: Any) -> Any:
        return attention(q, k, v, dropout_rate=0.4, dropout_key=key)

    key = jax.random.key(1)
    out, pull = jax.vjp(lambda v: dropped(v, key), v)
    (dv,) = pull(d_o)
    np.testing.assert_allclose((dv * v).sum(), (d_o * out).sum(), rtol=1e-4)
    assert (dropped(v, key) == out).all()
    assert not (dropped(v, jax.random.key(2)) == out).all()
    with pytest.raises(InvalidArgumentError, match="dropout_key: expected a key"):
        attention(q, k, v, dropout_rate=0.4)


def test_nothing_to_attend_to() -> None:
    """Without keys, outputs are 0 and log-sum-exps -inf, or the sinks."""
    q, k = random(2, 5, 4, 8), random(2, 0, 4, 8)
    out, lse = attention(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == -jnp.inf).all()
    sinks = random(4)
    _, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    assert (lse == sinks[:, None]).all()
    assert (jax.grad(lambda q: attention(q, k, k).sum())(q) == 0).all()
    assert jax.vmap(attention)(*(random(0, 2, 5, 4, 8),) * 3).shape == (0, 2, 5, 4, 8)


def test_refusals() -> None:
    """What is wrong is said while JAX traces, in dlattn's words."""
    q, k = random(2, 5, 4, 8), random(2, 5, 3, 8)
    with pytest.raises(InvalidArgumentError, match="k: expected a number of heads that divides"):
        jax.jit(attention)(q, k, k)
    with pytest.raises(InvalidArgumentError, match="mask: expected booleans"):
        dot_product_attention(q, q, q, mask=random(5, 5))
    for bias in (random(4, 5, 5), random(4, 5, 5) > 0):
        with pytest.raises(InvalidArgumentError, match="bias, mask: expected shapes that broad"):
            dot_product_attention(q, q, q, bias, random(3, 5, 5) > 0)
    with pytest.raises(InvalidArgumentError, match="local_window_size: expected a number"):
        dot_product_attention(q, q, q, local_window_size=(1, 2, 3))
    for options in ({"causal": jnp.array(True)}, {"softcap": jnp.float32(3)}):
        with pytest.raises(InvalidArgumentError, match="known while JAX traces"):
            attention(q, q, q, **options)
    with pytest.raises(InvalidArgumentError, match="k: expected an array, got None"):
        attention(q, None, q)
    with pytest.raises(InvalidArgumentError, match="dropout_rate: expected at least 0 and at"):
        attention(q, q, q, dropout_rate=1.5, dropout_key=jax.random.key(0))
    assert_same(attention(q, q, q, window=[1, 2]), attention(q, q, q, window=(1, 2)))
    with pytest.raises((InvalidArgumentError, cudnnGraphNotSupportedError)):
        attention(*(x.astype(np.int32) for x in (q, q, q)))


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_layers(library: str) -> None:
    """The layers of docs/jax.md give the gradients that they give with JAX's attention."""
    pytest.importorskip(library)
    check_layer(library, 1e-5)
