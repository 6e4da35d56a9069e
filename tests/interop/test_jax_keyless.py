"""``dlattn.jax`` where there is no key at all: what sinks alone say, computed with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from dlattn.jax import attention  # noqa: E402

B, S, H, D = 3, 5, 4, 8
SINKS = np.array([0.5, -np.inf, 3.0, 0.0], np.float32)


def passes(q: Any, k: Any, dlse: Any, **options: Any) -> Any:
    """The output, the log-sum-exp, and the gradients of q, k, v and the sinks, of that of the
    log-sum-exp."""

    @jax.jit
    def compiled(q: Any, k: Any, sinks: Any, dlse: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return attention(q, k, v, sinks=sinks, return_lse=True, **options)

        (out, lse), pull = jax.vjp(forward, q, k, k, sinks)
        return out, lse, pull((jax.numpy.zeros_like(out), dlse))

    return compiled(q, k, SINKS, dlse)


def sums(dlse: Any, exists: Any) -> Any:
    """The gradient of the sinks, of (B, H, S) or (H, T): rows that exist, of finite sinks."""
    shares = np.where(exists, dlse, 0).astype(np.float64)
    heads = shares.swapaxes(0, -2).reshape(H, -1).sum(1)
    return np.where(np.isinf(SINKS), 0, heads)


@pytest.mark.parametrize("lengths", [None, (5, 0, 2), (0, 0, 0)])
def test_sequences(lengths: Any) -> None:
    """Under jit, a row's log-sum-exp is its sink, past the lengths -inf; the gradient of a sink is
    the sum of those of its rows, of which others have no share, be they NaN."""
    rng = np.random.default_rng(0)
    q, k = np.ones((B, S, H, D), np.float32), np.ones((B, 0, H, D), np.float32)
    dlse = rng.normal(size=(B, H, S)).astype(np.float32)
    exists, options = np.ones((B, 1, S), bool), {}
    if lengths is not None:
        given = np.array(lengths, np.int32)
        exists = np.arange(S) < given[:, None, None]
        options = {"lengths": (given, np.zeros(B, np.int32))}
        dlse[~np.broadcast_to(exists, dlse.shape)] = np.nan
    out, lse, (dq, dk, dv, dsinks) = passes(q, k, dlse, **options)
    assert out.shape == dq.shape == q.shape and dk.shape == dv.shape == k.shape
    assert not out.any() and not dq.any()
    np.testing.assert_array_equal(lse, np.where(exists, SINKS[:, None], -np.inf))
    np.testing.assert_allclose(dsinks, sums(dlse, exists), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, (3, 0, 9)])
def test_packed_sequences(lengths: Any) -> None:
    """Of packed sequences, rows of none of them and past the lengths have no share."""
    cu = np.array([1, 5, 5, 9], np.int32)
    dlse = np.random.default_rng(1).normal(size=(H, 10)).astype(np.float32)
    q, k = np.ones((10, H, D), np.float32), np.ones((0, H, D), np.float32)
    options: dict[str, Any] = {"layout": "thd", "cu_seqlens": (cu, np.zeros_like(cu))}
    sizes = np.diff(cu)
    if lengths is not None:
        given = np.array(lengths, np.int32)
        sizes = np.minimum(sizes, given)
        options["lengths"] = (given, np.zeros(B, np.int32))
    exists = np.zeros(10, bool)
    for begin, size in zip(cu, sizes, strict=False):
        exists[begin : begin + size] = True
    dlse[:, ~exists] = np.nan
    out, lse, (dq, _, _, dsinks) = passes(q, k, dlse, **options)
    assert not out.any() and not dq.any()
    np.testing.assert_array_equal(lse[:, exists], np.repeat(SINKS[:, None], exists.sum(), 1))
    np.testing.assert_allclose(dsinks, sums(dlse, exists), rtol=1e-5, atol=1e-6)


def test_batched() -> None:
    """An entry of vmap is the call alone, with lengths of its own."""
    q, k = np.ones((2, B, S, H, D), np.float32), np.ones((B, 0, H, D), np.float32)
    lengths = np.array([[5, 0, 2], [1, 4, 3]], np.int32)

    def call(q: Any, lengths: Any) -> Any:
        return attention(q, k, k, sinks=SINKS, lengths=(lengths, None), return_lse=True)[1]

    found = jax.jit(jax.vmap(call))(q, lengths)
    exists = np.arange(S) < lengths[:, :, None, None]
    np.testing.assert_array_equal(found, np.where(exists, SINKS[:, None], -np.inf))
