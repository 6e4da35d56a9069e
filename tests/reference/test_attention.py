"""``dlattn.attention`` on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError, cudnnGraphNotSupportedError
from tests.calls import check_added_mask, check_attention, check_full_pages, check_pages
from tests.cases import Case
from tests.libraries import Library
from tests.strategies import call_cases


@settings(max_examples=150)
@given(call_cases())
def test_numpy(case: Case) -> None:
    """Of NumPy arrays, a call is right for every case, and writes nothing but its outputs."""
    check_attention(case, Library())


@settings(max_examples=100)
@given(call_cases())
def test_torch(case: Case) -> None:
    """Of torch tensors, a call is right for every case, and writes nothing but its outputs."""
    check_attention(case, Library(pytest.importorskip("torch")))


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


LENGTHS = ((5, 9), (0, 4), (7, 0), (3, 3), (1, 12))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 1)}, {"max_seqlens": (7, 12)}]
)
def test_packed_sequences(options: dict[str, Any]) -> None:
    """Packed sequences give what each gives alone; others' rows are not written."""
    cu_q, cu_kv = (
        np.cumsum([0, *lengths], dtype=np.int32) for lengths in zip(*LENGTHS, strict=True)
    )
    q, k, v = random(cu_q[-1] + 2, 4, 8), random(cu_kv[-1], 2, 8), random(cu_kv[-1], 1, 16)
    out = np.full((len(q), 4, 16), 7.0)
    o, lse = dlattn.attention(
        q, k, v, layout="thd", cu_seqlens=(cu_q, cu_kv), return_lse=True, out=out, **options
    )
    assert o is out and lse.shape == (4, len(q)) and lse.dtype == np.float64
    options.pop("max_seqlens", None)
    for b in range(len(LENGTHS)):
        of_q, of_kv = (slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_kv))
        alone, sums = dlattn.attention(
            q[None, of_q], k[None, of_kv], v[None, of_kv], return_lse=True, **options
        )
        np.testing.assert_allclose(o[of_q], alone[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse[:, of_q], sums[0], rtol=1e-12)
    assert (o[cu_q[-1] :] == 7).all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_keys_in_pages(layout: str) -> None:
    """Keys and values in pages give what they give in one piece."""
    check_pages(layout, Library(), "float32", page=4)
    check_full_pages(Library(), "float32", page=4)


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_added_masks(dtype: str, low: float) -> None:
    """A number far below all scores masks keys, however far."""
    check_added_mask(Library(), dtype, low, 5, 16)


def test_pages_have_no_gradients() -> None:
    """Which the backward says, and torch's, too."""
    torch = pytest.importorskip("torch")
    from dlattn.torch import attention

    q, pages = torch.zeros(1, 2, 2, 8, requires_grad=True), torch.zeros(3, 4, 2, 8)
    out = attention(q, pages, pages, block_table=torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(cudnnGraphNotSupportedError, match="block_table: attention of keys"):
        out.sum().backward()


def test_split_keys_merge() -> None:
    """Attention over parts of the keys, merged, is attention over all of them."""
    q, k, v = random(2, 6, 4, 8), random(2, 30, 2, 8), random(2, 30, 2, 8)
    whole = dlattn.attention(q, k, v, return_lse=True)
    parts = [
        dlattn.attention(q, k[:, some], v[:, some], return_lse=True)
        for some in (slice(0, 11), slice(11, 11), slice(11, 30))
    ]
    merged = dlattn.merge_states(*parts[0], *parts[1])
    merged = dlattn.merge_states(*merged, *parts[2])
    stacked = dlattn.merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
    for found in (merged, stacked):
        for got, want in zip(found, whole, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_one_tensor_of_lengths_is_of_queries_and_keys() -> None:
    """Lengths alone cut q, k and v; a causal mask ends in the corner of what is left."""
    q, k, v = (random(3, 6, 2, 8) for _ in range(3))
    lengths = np.array([6, 2, 4], np.int64)
    o = dlattn.attention(q, k, v, causal=True, lengths=lengths)
    for b, n in enumerate(lengths):
        alone = dlattn.attention(*(x[b : b + 1, :n] for x in (q, k, v)), causal=True)
        np.testing.assert_allclose(o[b, :n], alone[0], rtol=1e-12)
        assert (o[b, n:] == 0).all()


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_lengths_beyond_the_tensors(alignment: str) -> None:
    """They are full, also to the diagonal that ends where they do; below 0 they are 0."""
    q, k, v = random(2, 5, 2, 8), random(2, 7, 2, 8), random(2, 7, 2, 8)
    options: dict[str, Any] = {"causal": True, "alignment": alignment, "return_lse": True}
    given = np.array([9, -3]), np.array([2**40, 2**40])
    wanted = dlattn.attention(q, k, v, lengths=(np.array([5, 0]), np.array([7, 7])), **options)
    for got, want in zip(dlattn.attention(q, k, v, lengths=given, **options), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_bias_broadcasts_as_in_numpy() -> None:
    """A bias may lack dimensions in front."""
    q, k, v = (random(2, 6, 4, 8) for _ in range(3))
    bias = random(4, 1, 6)
    np.testing.assert_array_equal(
        dlattn.attention(q, k, v, bias=bias), dlattn.attention(q, k, v, bias=bias[None])
    )


def test_strides_of_one_entry_mean_nothing() -> None:
    """A batch of one may be reversed."""
    q, k, v = (random(1, 5, 2, 8) for _ in range(3))
    reversed_ = dlattn.attention(*(x[::-1] for x in (q, k, v)))
    np.testing.assert_array_equal(reversed_, dlattn.attention(q, k, v))


def test_scale_is_that_of_the_paper() -> None:
    """Unless given, scores are divided by the root of the head dimension."""
    q, k, v = (random(1, 6, 2, 16) for _ in range(3))
    np.testing.assert_array_equal(dlattn.attention(q, k, v), dlattn.attention(q, k, v, scale=0.25))


def test_packed_gradients() -> None:
    """Gradients of packed sequences are those of each alone; rows of no sequence have none."""
    cu_q, cu_kv = (
        np.cumsum([0, *lengths], dtype=np.int32) for lengths in zip(*LENGTHS, strict=True)
    )
    q, k, v = random(cu_q[-1] + 2, 4, 8), random(cu_kv[-1] + 1, 2, 8), random(cu_kv[-1] + 1, 1, 16)
    packed = {"layout": "thd", "cu_seqlens": (cu_q, cu_kv), "causal": True}
    o, lse = dlattn.attention(q, k, v, return_lse=True, **packed)
    d_o = random(*o.shape)
    found = dlattn.attention_backward(d_o, q, k, v, o, lse, **packed)
    assert found.dbias is found.dsinks is None
    for b in range(len(LENGTHS)):
        of_q, of_kv = (slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_kv))
        each = [x[None, of_q] for x in (d_o, q)] + [x[None, of_kv] for x in (k, v)]
        alone = dlattn.attention_backward(
            *each, *dlattn.attention(*each[1:], causal=True, return_lse=True), causal=True
        )
        for got, want, rows in zip(found, alone, (of_q, of_kv, of_kv), strict=False):
            np.testing.assert_allclose(got[rows], want[0], rtol=1e-11, atol=1e-12)
    for gradient, cu in zip(found, (cu_q, cu_kv, cu_kv), strict=False):
        assert (gradient[cu[-1] :] == 0).all()


def test_packed_rows_that_count_for_nothing() -> None:
    """Past the lengths, and in no sequence, gradients are 0, and memory that is given for them, as
    that for the output, is left as it was."""
    q = random(12, 2, 8)
    packed = {"layout": "thd", "cu_seqlens": np.array([1, 5, 10], np.int32)}
    packed["lengths"] = np.array([3, 0], np.int32)
    out, *given = (np.full_like(q, np.nan) for _ in range(4))
    _, lse = dlattn.attention(q, q, q, return_lse=True, out=out, **packed)
    made = dlattn.attention_backward(q, q, q, q, out, lse, **packed)[:3]
    dlattn.attention_backward(
        q, q, q, q, out, lse, **packed, **dict(zip(("dq", "dk", "dv"), given, strict=True))
    )
    used = np.isin(np.arange(12), (1, 2, 3))
    for there, zeros in zip((out, *given), (None, *made), strict=True):
        assert np.isnan(there[~used]).all() and np.isfinite(there[used]).all()
        assert zeros is None or not zeros[~used].any()


def test_bias_gradients_have_the_shape_of_the_bias() -> None:
    """Sums over what a bias broadcasts to, also where it lacks dimensions."""
    q, k, v, d_o = (random(2, 6, 4, 8) for _ in range(4))
    whole, less = random(2, 4, 6, 6), random(4, 1, 6)
    o, lse = dlattn.attention(q, k, v, bias=0 * whole + less, return_lse=True)
    given = (d_o, q, k, v, o, lse)
    full = dlattn.attention_backward(*given, bias=0 * whole + less, bias_gradient=True)
    found = dlattn.attention_backward(*given, bias=less, bias_gradient=True)
    assert found.dbias.shape == (4, 1, 6) and found.dsinks is None
    np.testing.assert_allclose(found.dbias, full.dbias.sum((0, 2))[:, None], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.dq, full.dq, rtol=1e-12)


@pytest.mark.parametrize("missing", ["keys", "queries", "batch"])
def test_nothing_to_attend_to(missing: str) -> None:
    """Without keys, outputs are 0 and log-sum-exps -inf; without queries there are none."""
    batch, queries, keys = (
        0 if missing == name else size for name, size in (("batch", 2), ("queries", 5), ("keys", 3))
    )
    o, lse = dlattn.attention(
        random(batch, queries, 4, 8), *(random(batch, keys, 2, 8) for _ in "kv"), return_lse=True
    )
    assert o.shape == (batch, queries, 4, 8) and (o == 0).all()
    assert lse.shape == (batch, 4, queries) and (lse == -np.inf).all()
    q, k = random(batch, queries, 4, 8), random(batch, keys, 2, 8)
    for gradient, of in zip(dlattn.attention_backward(o, q, k, k, o, lse), (q, k, k), strict=False):
        assert gradient.shape == of.shape and (gradient == 0).all()


def test_sinks_alone() -> None:
    """Without keys, a row's sum is its sink."""
    sinks = random(4).astype(np.float32)
    q, k = random(2, 5, 4, 8), random(2, 0, 2, 8)
    o, lse = dlattn.attention(q, k, k, sinks=sinks, return_lse=True)
    assert (o == 0).all() and (lse == sinks[:, None]).all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    """It changes nothing, forward or backward, with keys or without, and has no gradient."""
    q, k, v = random(1, 3, 4, 8), random(1, 5, 4, 8), random(1, 5, 4, 8)
    lengths, none = (None, np.array([0])), np.full(4, -np.inf, np.float32)
    for options in ({}, {"lengths": lengths}):
        found, wanted = (
            dlattn.attention(q, k, v, sinks=it, return_lse=True, **options) for it in (none, None)
        )
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y)
        out, lse = found
        given: Any = (q, q, k, v, out, lse)
        *gradients, _, dsinks = dlattn.attention_backward(
            *given, sinks=none, sinks_gradient=True, **options
        )
        for x, y in zip(gradients, dlattn.attention_backward(*given, **options), strict=False):
            np.testing.assert_array_equal(x, y)
        assert (dsinks == 0).all()


def test_jax() -> None:
    """JAX arrays give JAX arrays."""
    jax = pytest.importorskip("jax")
    q, k, v = (random(2, 6, 4, 8).astype(np.float32) for _ in range(3))
    o = dlattn.attention(*map(jax.numpy.asarray, (q, k, v)), causal=True)
    assert isinstance(o, jax.Array)
    np.testing.assert_allclose(np.asarray(o), dlattn.attention(q, k, v, causal=True), rtol=1e-6)


def test_seeds_make_no_new_plan() -> None:
    """Another seed is another mask, of the same plan."""
    from dlattn.one_call.forward import _CALLS

    q, k, v = (random(1, 40, 2, 8) for _ in range(3))
    first = dlattn.attention(q, k, v, dropout=(0.5, 1, 0))
    kept = len(_CALLS)
    others = [dlattn.attention(q, k, v, dropout=(0.5, *at)) for at in ((2, 0), (1, 1), (1, 0))]
    assert len(_CALLS) == kept
    assert [(other == first).all() for other in others] == [False, False, True]


Q, K = np.zeros((2, 5, 4, 8), np.float16), np.zeros((2, 7, 2, 8), np.float16)
CU = np.array([0, 5], np.int32)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "hsbd"}, "layout: expected one of"),
    "alignment": ({"alignment": "centre"}, "alignment: expected one of"),
    "dimensions": ({"q": Q[0]}, "q: expected shape"),
    "columns of k": ({"k": K[..., :4]}, "k: expected shape"),
    "keys of v": ({"v": K[:, :6]}, "v: expected shape"),
    "heads": ({"k": K[:, :, [0, 1, 1]], "v": K[:, :, [0, 1, 1]]}, "k: expected a number of heads"),
    "type": ({"v": K.astype(np.float32)}, "v: expected elements of HALF, as q has"),
    "integers": ({"q": Q.astype(np.int32)}, "q: expected elements of HALF or"),
    "columns apart": ({"q": np.zeros((2, 5, 4, 16), np.float16)[..., ::2]}, "q: expected a stride"),
    "window": ({"window": 3}, r"window: expected a pair \(left, right\)"),
    "window of floats": ({"window": (1.5, None)}, "window: expected an integer"),
    "negative window": ({"window": (-2, None)}, "window: expected 0 or more"),
    "scale": ({"scale": "1"}, "scale: expected a finite number"),
    "scale of a tensor": ({"scale": np.array(0.5)}, "scale: .*, as a float or an int, got array"),
    "scale beyond float32": ({"scale": 1e39}, "scale: expected a finite number"),
    "scale beyond floats": ({"scale": 10**400}, "scale: expected a finite number"),
    "softcap": ({"softcap": -1.0}, "softcap: expected 0 or None, for none, or"),
    "softcap beyond float32": ({"softcap": 1e300}, "softcap: expected a finite number"),
    "softcap that has no reciprocal": ({"softcap": 1e-40}, "softcap: expected 0 or None"),
    "no keys": ({"k": None}, "k: expected a tensor, got None"),
    "bias": ({"bias": np.zeros((2, 3, 5, 7))}, r"bias: expected a shape that broadcasts"),
    "slopes": ({"alibi_slopes": np.zeros(3, np.float32)}, "alibi_slopes: expected shape"),
    "sinks": ({"sinks": np.zeros(4)}, "sinks: expected elements of FLOAT"),
    "lengths of both": ({"lengths": np.array([1, 2])}, "lengths: one tensor is of q, k and v"),
    "lengths": ({"lengths": (None, np.array([1]))}, "lengths of k and v: expected shape"),
    "cu_seqlens": ({"cu_seqlens": CU}, "cu_seqlens and max_seqlens describe packed sequences"),
    "packed": ({"layout": "thd", "q": Q[0], "k": K[0], "v": K[0]}, "give cu_seqlens"),
    "packed alike": (
        {"layout": "thd", "q": Q[0], "k": K[0], "v": K[0], "cu_seqlens": CU},
        "cu_seqlens: one tensor is of q, k and v alike",
    ),
    "beyond the tokens": (
        {"layout": "thd", "q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens": CU + 1},
        "cu_seqlens of q: expected numbers that never fall",
    ),
    "table": (
        {"k": K[:, :4], "v": K[:, :4], "block_table": np.zeros((1, 2), np.int32)},
        "block_table: expected shape",
    ),
    "table of int64": (
        {"k": K[:, :4], "v": K[:, :4], "block_table": np.zeros((2, 2), int)},
        "block_table: expected elements of",
    ),
    "more keys than pages": (
        {
            "layout": "thd", "q": Q[0], "k": K[:, :4], "v": K[:, :4], "cu_seqlens": CU,
            "block_table": np.zeros((1, 2), np.int32), "max_seqlens": 9,
        },
        "max_seqlens: expected at most the 8 keys that the pages",
    ),
    "dropout": ({"dropout": 0.5}, r"dropout: expected \(p, seed, offset\)"),
    "p": ({"dropout": (1.5, 0, 0)}, "dropout: expected p of at least 0 and at most 1"),
    "seed": ({"dropout": (0.5, None, 0)}, "dropout: expected a seed"),
    "float seed": ({"dropout": (0.5, 1.5, 0)}, "dropout's seed: Expected a tensor"),
    "out": ({"out": Q[:, :4]}, "out: expected shape"),
    "read-only out": ({"out": np.broadcast_to(Q[:1], Q.shape)}, "out: it is written to"),
}  # fmt: skip


REFUSED_BACKWARD: dict[str, tuple[dict[str, Any], str]] = {
    "dout": ({"dout": Q[:, :4]}, "dout: expected shape"),
    "out": ({"out": Q[..., :4].copy()}, "out: expected shape"),
    "type of dout": ({"dout": Q.astype(np.float32)}, "dout: expected elements of HALF"),
    "lse": ({"lse": np.zeros((2, 5, 4), np.float32)}, "lse: expected shape"),
    "type of lse": ({"lse": np.zeros((2, 4, 5))}, "lse: expected elements of FLOAT"),
    "bias": ({"bias_gradient": True}, "bias_gradient: expected bias, whose gradient"),
    "mask": (
        {"bias": np.ones((5, 7), np.bool_), "bias_gradient": True},
        "bias_gradient: the bias is a mask, of BOOLEAN",
    ),
    "sinks": ({"sinks_gradient": True}, "sinks_gradient: expected sinks, whose gradient"),
    "dk": ({"dk": Q.copy()}, "dk: expected shape"),
    "no dout": ({"dout": None}, "dout: expected a tensor, got None"),
    "no lse": ({"lse": None}, "lse: expected a tensor, got None"),
    "read-only dq": ({"dq": np.broadcast_to(Q[:1], Q.shape)}, "dq: it is written to"),
}


@pytest.mark.parametrize("name", REFUSED_BACKWARD)
def test_backward_refusals(name: str) -> None:
    """So they are by the backward."""
    changes, message = REFUSED_BACKWARD[name]
    lse = np.zeros((2, 4, 5), np.float32)
    arguments = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": lse, **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        dlattn.attention_backward(**arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Arguments that contradict each other are refused by name."""
    changes, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        dlattn.attention(**{"q": Q, "k": K, "v": K, **changes})


def test_pages_that_there_are_not() -> None:
    """In host memory, tables are looked at, by each call."""
    pages, table = K[:, :4], np.array([[0, 1], [1, 0]], np.int32)
    dlattn.attention(Q, pages, pages, block_table=table)
    for wrong in (2, -1):
        bad = np.array([[0, 1], [wrong, 0]], np.int32)
        with pytest.raises(InvalidVariantPackError, match="block_table: the pages of sequence 1"):
            dlattn.attention(Q, pages, pages, block_table=bad)


def test_other_devices() -> None:
    """A tensor without memory is refused by name."""
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match="q: This Tensor on device meta has no memory"):
        dlattn.attention(*(torch.zeros(1, 1, 1, 8, device="meta") for _ in range(3)))
