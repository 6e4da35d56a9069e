"""Where there is no key at all: sinks and given memory are as where every key is masked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn.flash import mha_fwd

B, S, H, D = 3, 5, 4, 8
LENGTHS = np.array([5, 0, 2], np.int32)
#: One of no sequence in front, and one behind.
CU = np.array([1, 5, 5, 9], np.int32)


def libraries() -> list[Any]:
    """Of each library, what makes its tensors of arrays; the last one takes all by turns."""
    torch = pytest.importorskip("torch")
    plain = [np.asarray, lambda x: torch.from_numpy(x.copy())]
    turn = itertools.cycle(plain)
    return [*plain, lambda x: next(turn)(x)]


def passes(
    make: Callable[[Any], Any], keys: int, dtype: Any = np.float64, **options: Any
) -> tuple[Any, Any, Any]:
    """The log-sum-exp and its gradient, and that of the sinks, of so many keys in each sequence, or
    of packed ones in all."""
    rng = np.random.default_rng(0)
    packed = "cu_seqlens" in options
    sinks = np.array([0.5, -np.inf, 3.0, 0.0], np.float32)
    dlse = rng.normal(size=(H, 10) if packed else (B, H, S)).astype(dtype)
    q = rng.normal(size=(10, H, D) if packed else (B, S, H, D)).astype(dtype)
    k, v = rng.normal(size=(2, keys, H, D) if packed else (2, B, keys, H, D)).astype(dtype)
    options = {
        name: tuple(map(make, x)) if isinstance(x, tuple) else x for name, x in options.items()
    }
    options["sinks"] = make(sinks)
    q, k, v, tangent = map(make, (q, k, v, dlse))
    out, lse = dlattn.attention(q, k, v, return_lse=True, **options)
    assert not np.asarray(out)[1 if packed else slice(None)].any()
    found = dlattn.attention_backward(
        out, q, k, v, out, lse, dlse=tangent, sinks_gradient=True, **options
    )
    assert not any(np.asarray(x).any() for x in found[:3])
    assert isinstance(found.dsinks, type(q))
    return np.asarray(lse), dlse, np.asarray(found.dsinks)


@pytest.mark.parametrize("library", range(3), ids=["numpy", "torch", "both"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_sequences_of_no_key(library: int, dtype: Any, lengths: Any) -> None:
    """A row's log-sum-exp is its sink, and -inf past the lengths; the gradient of a sink, unless it
    is -inf, is the sum of those of its rows: what calls with masked keys say, whichever libraries
    the tensors are of."""
    make = libraries()[library]
    given = np.full(B, S, np.int32) if lengths is None else lengths
    no_key = np.zeros(B, np.int32)
    options = {} if lengths is None else {"lengths": (lengths, no_key)}
    lse, dlse, dsinks = passes(make, 0, dtype, **options)
    exists = np.arange(S) < given[:, None, None]
    sinks = np.array([0.5, -np.inf, 3.0, 0.0])[:, None]
    np.testing.assert_array_equal(lse, np.where(exists, sinks, -np.inf))
    want = np.where(np.isinf(sinks[:, 0]), 0, (dlse * exists).sum((0, 2), np.float64))
    np.testing.assert_allclose(dsinks, want, rtol=1e-5, atol=1e-6)
    masked = passes(make, 1, dtype, lengths=(given, no_key))
    np.testing.assert_array_equal(lse, masked[0])
    np.testing.assert_allclose(dsinks, masked[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", range(3), ids=["numpy", "torch", "both"])
@pytest.mark.parametrize("lengths", [None, LENGTHS - 1])
def test_packed_sequences_of_no_key(library: int, lengths: Any) -> None:
    """Of packed sequences, rows of none of them, and past the lengths, have no share either."""
    make = libraries()[library]
    options: dict[str, Any] = {"layout": "thd", "cu_seqlens": (CU, np.zeros_like(CU))}
    if lengths is not None:
        options["lengths"] = (lengths.clip(0), np.zeros(B, np.int32))
    _, dlse, dsinks = passes(make, 0, **options)
    sizes = np.diff(CU) if lengths is None else np.minimum(np.diff(CU), lengths.clip(0))
    want = sum(dlse[:, a : a + n].sum(1) for a, n in zip(CU, sizes, strict=False))
    want[1] = 0
    np.testing.assert_allclose(dsinks, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dsinks, passes(make, 2, **options)[2], rtol=1e-5, atol=1e-6)


def test_flash_attention_of_no_key() -> None:
    """Its rows past the lengths are +inf, with sinks too."""
    q, k = np.zeros((B, S, H, D)), np.zeros((B, 0, H, D))
    sinks = np.arange(H, dtype=np.float32)
    lse = mha_fwd(q, k, k, seqused_q=LENGTHS, sinks=sinks)[4]
    exists = np.arange(S) < LENGTHS[:, None, None]
    np.testing.assert_array_equal(lse, np.where(exists, sinks[:, None], np.inf))


def test_what_jax_still_computes() -> None:
    """JAX's arrays are waited for, which JAX hands out before they are computed: sinks, lengths and
    the gradients of log-sum-exps."""
    jax = pytest.importorskip("jax")

    @jax.jit
    def late(seed: Any) -> Any:
        x = jax.numpy.full((1000, 1000), seed)
        return jax.numpy.tanh(x @ x @ x @ x)[0, 0]  # of a positive seed 1

    late(0.5).block_until_ready()
    compute = jax.jit(lambda x, by: x * by)
    q, k = jax.numpy.ones((B, S, H, D)), jax.numpy.ones((B, 0, H, D))
    wanted = np.arange(1, H + 1, dtype=np.float32), LENGTHS, np.ones((B, H, S), np.float32)
    for x in wanted:
        compute(x, late(0.5)).block_until_ready()
    exists = np.arange(S) < LENGTHS[:, None, None]
    for seed in (0.6, 0.7):
        sinks, dlse = (compute(x, late(seed)) for x in (wanted[0], wanted[2]))
        lengths = (compute(LENGTHS, late(seed)).astype("int32"), None)
        _, lse = dlattn.attention(q, k, k, sinks=sinks, lengths=lengths, return_lse=True)
        np.testing.assert_array_equal(
            np.asarray(lse), np.where(exists, wanted[0][:, None], -np.inf)
        )
        sinks, dlse = (compute(x, late(seed + 0.01)) for x in (wanted[0], wanted[2]))
        dsinks = dlattn.attention_backward(
            q, q, k, k, q, lse, sinks=sinks, dlse=dlse, sinks_gradient=True
        ).dsinks
        np.testing.assert_array_equal(np.asarray(dsinks), np.full(H, B * S))


@pytest.mark.parametrize("ranks", ["allow", "raise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_programs_of_jax_without_keys(compiled: bool, ranks: str) -> None:
    """In JAX's programs, too, rows past the lengths are -inf, and the gradient of a sink is the sum
    of those of its rows, of sequences of one length and packed ones, whether or not JAX may
    broadcast arrays of other ranks."""
    jax = pytest.importorskip("jax")
    from dlattn.jax import attention

    q, k, sinks = np.ones((B, S, H, D), "f4"), np.ones((B, 0, H, D), "f4"), np.arange(H) - 1.5

    def dense(sinks: Any, lengths: Any) -> Any:
        return attention(q, k, k, sinks=sinks, lengths=(lengths, None), return_lse=True)[1]

    def packed(sinks: Any, cu_seqlens: Any) -> Any:
        return attention(
            q[0], k[0], k[0], layout="thd", sinks=sinks, cu_seqlens=cu_seqlens, return_lse=True
        )[1]

    def total(function: Any) -> Any:
        return lambda *given: function(*given).sum()

    wrap: Any = jax.jit if compiled else lambda function: function
    sinks = sinks.astype(np.float32)
    exists = np.arange(S) < LENGTHS[:, None, None]
    with jax.numpy_rank_promotion(ranks):
        lse = wrap(dense)(sinks, LENGTHS)
    np.testing.assert_array_equal(np.asarray(lse), np.where(exists, sinks[:, None], -np.inf))
    for function, more, rows in (
        (dense, LENGTHS, LENGTHS.sum()),
        (packed, (np.array([1, 2, 4], np.int32), np.zeros(3, np.int32)), 3),
    ):
        with jax.numpy_rank_promotion(ranks):
            gradient = wrap(jax.grad(total(function)))(sinks, more)
        np.testing.assert_array_equal(np.asarray(gradient), np.full(H, rows))


@pytest.mark.parametrize("library", range(3), ids=["numpy", "torch", "both"])
@pytest.mark.parametrize("lengths", [None, LENGTHS.clip(max=3)])
@pytest.mark.parametrize("missing", ["keys", "most keys", "queries"])
def test_given_memory_of_packed_sequences(missing: str, lengths: Any, library: int) -> None:
    """Rows that a sequence has are 0; others, whose calls may have written there, stay."""
    make, none = libraries()[library], np.zeros_like(CU)
    rows, begins = [10, 10], [CU, CU]
    without = int(missing != "queries")
    begins[without] = none
    options: dict[str, Any] = {"layout": "thd", "cu_seqlens": tuple(map(make, begins))}
    if missing == "most keys":
        options["max_seqlens"] = (10, 0)
    else:
        rows[without] = 0
    used = [x if lengths is None else lengths for x in (np.diff(CU), np.diff(CU))]
    used[without] = none[1:]
    if lengths is not None:
        options["lengths"] = tuple(make(x.astype(np.int32)) for x in used)
    q, k, v = (make(np.ones((count, H, D))) for count in (rows[0], rows[1], rows[1]))
    out, dq, dk, dv = (
        make(np.full((count, H, D), 7.0)) for count in (rows[0], rows[0], rows[1], rows[1])
    )
    _, lse = dlattn.attention(q, k, v, out=out, return_lse=True, **options)
    dlattn.attention_backward(q, q, k, v, q, lse, dq=dq, dk=dk, dv=dv, **options)
    for memory, at in ((out, 0), (dq, 0), (dk, 1), (dv, 1)):
        wanted = np.full((rows[at], H, D), 7.0)
        for first, count in zip(begins[at], used[at], strict=False):
            wanted[first : first + count] = 0
        np.testing.assert_array_equal(np.asarray(memory), wanted)
