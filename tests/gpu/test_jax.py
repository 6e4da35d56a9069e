"""``dlattn.jax`` on a GPU, beside JAX's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from dlattn.jax import attention, dot_product_attention  # noqa: E402
from tests.layers import check_layer  # noqa: E402

jnp = jax.numpy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")


def random(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype or jnp.bfloat16)


def with_gradients(function: Callable[..., Any], inputs: tuple[Any, ...], d_o: Any) -> Any:
    out, pull = jax.vjp(jax.jit(function), *inputs)
    return (out, *pull(d_o.astype(out.dtype)))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"key_value_seq_lengths": np.array([77, 300], np.int32)},
    "a window": {"local_window_size": (100, 0)},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_is_jaxs(name: str, dtype: str) -> None:
    """Outputs and gradients are as near to those in fp32 as JAX's own of the same type, thrice."""
    options = CASES[name]
    q, d_o = (random(2, 300, 8, 128, seed=i, dtype=dtype) for i in (0, 3))
    k, v = (random(2, 300, 2, 128, seed=i, dtype=dtype) for i in (1, 2))
    found = with_gradients(lambda *x: dot_product_attention(*x, **options), (q, k, v), d_o)

    def own(*x: Any) -> Any:
        return jax.nn.dot_product_attention(*x, **options, implementation="xla")

    theirs = with_gradients(own, (q, k, v), d_o)
    with jax.default_matmul_precision("highest"):
        wide = tuple(x.astype(jnp.float32) for x in (q, k, v))
        exact = with_gradients(own, wide, d_o)
    for mine, other, true in zip(found, theirs, exact, strict=True):
        error, allowed = (abs(x.astype(jnp.float32) - true).max() for x in (mine, other))
        assert error <= 3 * allowed + 2e-3 * abs(true).max()


def loss(q: Any, k: Any, v: Any) -> Any:
    return jnp.sin(attention(q, k, v, causal=True, deterministic=True).astype(jnp.float32)).sum()


def test_batched() -> None:
    """``vmap`` of a gradient is the gradient of each."""
    q, k, v = (random(3, 2, 256, 4, 64, seed=i) for i in range(3))
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    found = jax.jit(jax.vmap(gradient))(q, k, v)
    for i in range(3):
        for many, one in zip(found, gradient(q[i], k[i], v[i]), strict=True):
            np.testing.assert_allclose(
                many[i].astype(jnp.float32), one.astype(jnp.float32), rtol=2e-2, atol=1e-3
            )


def test_inside_scan() -> None:
    """A loop of layers, recorded or not, gives the same numbers again and again."""
    q, w = random(2, 256, 4, 64), random(64, 64, seed=1) / 16

    def chain(w: Any) -> Any:
        def layer(x: Any, _: Any) -> tuple[Any, None]:
            return x + attention(x @ w, x, x, causal=True, deterministic=True), None

        return jax.lax.scan(layer, q, None, length=4)[0].astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(chain))
    first = step(w)
    for _ in range(5):
        value, gradient = step(w)
        assert value == first[0] and (gradient == first[1]).all()
    assert jnp.isfinite(first[1].astype(jnp.float32)).all()


def test_new_numbers_in_the_same_program() -> None:
    """A program that has run before reads its new arguments."""
    run = jax.jit(lambda q, k, v: attention(q, k, v, causal=True))
    for seed in range(6):
        q, k, v = (random(2, 256, 4, 64, seed=10 * seed + i) for i in range(3))
        wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        np.testing.assert_allclose(
            run(q, k, v).astype(jnp.float32), wanted.astype(jnp.float32), rtol=5e-2, atol=2e-2
        )


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_layers(library: str) -> None:
    """The layers of docs/jax.md give the gradients that they give with JAX's attention."""
    pytest.importorskip(library)
    check_layer(library, 5e-2)


def test_keys_in_pages() -> None:
    """Keys and values that a table finds are as good as those in one piece."""
    q, pages = random(2, 3, 4, 64), random(9, 16, 2, 64)
    table, lengths = np.array([[3, 0, 8], [5, 2, 1]], np.int32), np.array([40, 5], np.int32)
    whole = pages[table].reshape(2, 48, 2, 64)
    found, wanted = (
        jax.jit(lambda k, more=more: attention(q, k, k, lengths=(None, lengths), **more))(k)
        for k, more in ((pages, {"block_table": table}), (whole, {}))
    )
    np.testing.assert_allclose(
        found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=2e-2, atol=1e-2
    )
