"""What ``dlattn.jax`` refuses, and when: the words are those of ``dlattn.attention``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")

import dlattn  # noqa: E402
from dlattn.errors import DlattnError, InvalidArgumentError, InvalidVariantPackError  # noqa: E402
from dlattn.flash import flash_attn_with_kvcache  # noqa: E402
from dlattn.jax import attention, dot_product_attention  # noqa: E402

jnp = jax.numpy

X = np.zeros((8, 2, 4), np.float32)
PAGES = np.zeros((4, 4, 2, 4), np.float32)


def answer(function: Any, *given: Any, **options: Any) -> tuple[type, str] | None:
    """How a call is refused, if it is."""
    try:
        jax.block_until_ready(function(*given, **options))
    except DlattnError as error:
        return type(error), str(error)
    return None


def numbers(most: int, count: int) -> Any:
    return st.lists(st.integers(-1, most), min_size=count, max_size=count).map(
        lambda drawn: np.array(drawn, np.int32)
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_numbers_are_refused_as_they_are_elsewhere(data: st.DataObject) -> None:
    """Cumulative lengths, lengths and tables of arrays in host memory are taken where
    ``dlattn.attention`` takes them as arrays of NumPy, and else refused with its error."""
    draw = data.draw
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        ends = draw(st.sampled_from([st.just(8), st.integers(0, 10)]).flatmap(lambda x: x))
        options = {
            "layout": "thd",
            "cu_seqlens": np.array([0, *draw(numbers(8, 1)), ends], np.int32),
        }
        if draw(st.booleans()):
            options["lengths"] = draw(numbers(8, 2))
        if draw(st.booleans()):
            options["max_seqlens"] = draw(st.integers(5, 8))
        arrays = (X, X, X)
    else:
        options["block_table"] = draw(numbers(5, 4)).reshape(2, 2)
        if draw(st.booleans()):
            options["lengths"] = (None, draw(numbers(9, 2)))
        arrays = (X.reshape(2, 4, 2, 4), PAGES, PAGES)
    wanted = answer(dlattn.attention, *arrays, **options)
    on_jax = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, options)
    assert answer(attention, *arrays, **on_jax) == wanted
    q, k, v = map(jnp.asarray, arrays)
    graded = jax.grad(lambda q: attention(q, k, v, **options).sum())
    if "block_table" not in options or wanted is not None:  # which has no backward
        assert answer(graded, q) == wanted


def test_numbers_that_are_traced_are_refused_when_the_program_runs() -> None:
    """By JAX's error, at whose end is dlattn's; constants are refused while JAX traces."""
    table = jnp.full((2, 2), 9, jnp.int32)
    q = X.reshape(2, 4, 2, 4)
    said = r"block_table: the pages of sequence 0, of 8 rows, are \[9, 9\]; expected .* 0 to 3\."

    def run(table: Any) -> Any:
        return attention(q, PAGES, PAGES, block_table=table)

    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.block_until_ready(jax.jit(run)(table))
    with pytest.raises(InvalidVariantPackError, match=said):
        jax.jit(lambda: run(table))()


@pytest.mark.parametrize("argument", ["query", "key", "value", "bias", "mask", "scale"])
def test_random_keys_are_no_numbers(argument: str) -> None:
    """Said in a sentence, and so of ``attention``."""
    given = dict(zip(("query", "key", "value"), (PAGES,) * 3, strict=True))
    with pytest.raises(InvalidArgumentError, match=f"{argument}: expected .* random keys, key<"):
        dot_product_attention(**{**given, argument: jax.random.key(0)})
    with pytest.raises(InvalidArgumentError, match=r"sinks: .* random keys, key<fry>\[2\]"):
        attention(PAGES, PAGES, PAGES, sinks=jax.random.split(jax.random.key(0)))


def test_tensors_of_pytorch() -> None:
    """They are refused, whatever they are: no gradient would come back to them."""
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 5, 4, 8)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    for it in (x, x.clone().requires_grad_(), torch.nn.Parameter(x), nested, torch._neg_view(x)):
        kind = re.escape(type(it).__qualname__)
        for at, (argument, role) in enumerate(zip(("query", "key", "value"), "qkv", strict=True)):
            arrays = [np.asarray(x)] * 3
            arrays[at] = it
            with pytest.raises(InvalidArgumentError, match=f"^{argument}: .*got a torch.*{kind};"):
                dot_product_attention(*arrays)
            with pytest.raises(InvalidArgumentError, match=f"^{role}: .*got a torch.*{kind};"):
                attention(*arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("causal", True), ("softcap", 3.0), ("scale", 0.5), ("max_seqlens", 4)),
        *(("dropout_rate", 0.5), ("deterministic", True), ("return_lse", True)),
        *(("is_causal", True), ("local_window_size", 2), ("return_residual", True)),
    ],
)
def test_an_option_that_is_traced_is_named(name: str, value: Any) -> None:
    """And so is its type; JAX arrays that are not traced yet would be once the caller is."""
    function = attention
    if name in ("is_causal", "local_window_size", "return_residual"):
        function = dot_product_attention
    traced = jax.jit(lambda x: function(PAGES, PAGES, PAGES, **{name: x}))
    kind = rf"{jnp.asarray(value).dtype}\[\]"
    said = f"^{name}: expected a value that is known while JAX traces, got a "
    with pytest.raises(InvalidArgumentError, match=f"{said}traced {kind};"):
        traced(value)
    with pytest.raises(InvalidArgumentError, match=f"{said}jax.Array {kind};"):
        function(PAGES, PAGES, PAGES, **{name: jnp.asarray(value)})


def test_a_bound_of_a_window_that_is_traced_is_named() -> None:
    """Wherever it is in the pair; a number of NumPy's is one."""
    for at in (0, 1):
        for kind in (tuple, list):
            window = [2, 0]

            def run(x: Any, at: int = at, kind: Any = kind, window: Any = window) -> Any:
                window[at] = x
                return attention(PAGES, PAGES, PAGES, window=kind(window))

            with pytest.raises(InvalidArgumentError, match=r"^window: .* got a traced int32\[\];"):
                jax.jit(run)(2)
    found = attention(PAGES, PAGES, PAGES, window=(np.array(2), np.int64(0)))
    assert (found == attention(PAGES, PAGES, PAGES, window=(2, 0))).all()


@pytest.mark.parametrize("name", ["layout", "causal", "window", "alignment", "scale", "softcap"])
def test_an_option_that_cannot_be_hashed_is_named(name: str) -> None:
    """A writable memoryview raises another error than a list, where a cache looks it up."""
    for wrong in (memoryview(bytearray(4)), {}):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: expected "):
            attention(PAGES, PAGES, PAGES, **{name: wrong})


def test_a_cache_of_jaxs_is_written_by_jax() -> None:
    """To append to it is refused, as nothing can write to such an array; a call after JAX has
    written is what appending to arrays of NumPy's is."""
    q, new, *caches = np.random.default_rng(0).normal(size=(4, 1, 6, 2, 8)).astype(np.float32)
    q, new = q[:, :2], new[:, :2]
    on_jax = [jnp.asarray(x) for x in caches]
    with pytest.raises(
        InvalidArgumentError, match="^k_cache: it is written to, .* as JAX's arrays"
    ):
        flash_attn_with_kvcache(jnp.asarray(q), *on_jax, new, new, cache_seqlens=3)
    wanted = flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=3, causal=True)
    written = [x.at[:, 3:5].set(new) for x in on_jax]
    found = flash_attn_with_kvcache(jnp.asarray(q), *written, cache_seqlens=5, causal=True)
    np.testing.assert_array_equal(found, wanted)
