"""The oracle itself: its tolerance admits sound kernels and refuses broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlattn.problem import alibi_slopes
from tests import oracle
from tests.builders import make_tensors
from tests.cases import Case
from tests.definition import kept_by, modified
from tests.libraries import Library
from tests.pages import by_sequence
from tests.strategies import cases

_HALVES = st.sampled_from(("bfloat16", "float16"))


def _tiled(case: Case, given: dict[str, Any], tile: int) -> dict[str, Any]:
    """A fused kernel's arithmetic: FlashAttention-2 in float32, with keys in tiles.

    P is rounded against the running maximum, which later tiles change; exponentials are base 2.
    """
    arrays = {role: given[role].astype(np.float32) for role in ("q", "k", "v", "dO")}
    dims, log2e = case.dims(), np.float32(np.log2(np.e))
    out = {role: np.zeros(dims[role], np.float32) for role in ("o", "dQ", "dK", "dV")}
    out |= {role: np.full(dims[role], -np.inf, np.float32) for role in ("stats", "score_max")}
    out["score_sum_exp"] = np.zeros(dims["stats"], np.float32)
    out["dSink_token"] = np.zeros(dims["dSink_token"], np.float32)
    if case.d_bias:
        out["dBias"] = np.zeros(case.bias_dim(), np.float32)
    sinks = np.full(case.heads_q, -np.inf, np.float32)
    if case.sink is not None:
        sinks = given["sink_token"].reshape(-1)

    mask, drop_scale = np.ones(case.scores_dim(), np.float32), np.float32(case.dropout_scale())
    if case.dropout is not None:
        mask = kept_by(case, given, "float32")

    def store(x: Any) -> Any:
        return given["q"].dtype.type(x).astype(np.float32)

    for b, h in np.ndindex(case.batch, case.heads_q):
        m, n = case.lengths_q()[b], case.lengths_kv()[b]
        hk, hv = h * case.heads_k // case.heads_q, h * case.heads_v // case.heads_q
        q, d_o = arrays["q"][b, h, :m], arrays["dO"][b, h, :m]
        k, v = arrays["k"][b, hk, :n], arrays["v"][b, hv, :n]
        row, column = np.arange(m)[:, None], np.arange(n)[None, :]
        ahead = column - row - (n - m if case.bottom_right else 0)
        keep = (ahead <= (n if case.right is None else case.right)) | (case.right is None)
        keep &= (ahead > -(m if case.left is None else case.left)) | (case.left is None)
        if case.blocks is not None:
            keep &= _blocks(case, given, b, h)[:m, :n]
        if case.softcap:
            tanh = _tanh((q @ k.T) * np.float32(case.scale_value / case.softcap))
            s, slope = tanh * (np.float32(case.softcap) * log2e), 1 - tanh * tanh
        else:
            s, slope = (q @ k.T) * (np.float32(case.scale_value) * log2e), np.float32(1)
        if case.score_mod is not None:
            edited, bend, kept = modified(case, given, arrays["q"], b, h, s / log2e)
            s, slope, keep = edited * log2e, slope * bend, keep & kept
        if case.bias:
            bias = np.broadcast_to(given["bias"], (case.batch, case.heads_q, *case.bias_dim()[2:]))
            bias = bias[b, h][:m, :n]
            if case.bias in ("bool", "uint8"):
                bias = np.where(bias, 0, -np.inf)
            s = s + bias.astype(np.float32) * log2e
        s = np.where(keep, s + _alibi(case, given, b, h, m, n) * log2e, np.float32(-np.inf))
        kept = mask[b, h, :m, :n]
        top = np.full((m, 1), -np.inf, np.float32)
        total, acc = np.zeros((m, 1), np.float32), np.zeros((m, case.head_dim_v), np.float32)
        for j in range(0, n, tile):
            new = np.maximum(top, s[:, j : j + tile].max(1, keepdims=True))
            safe = np.where(np.isinf(new), 0, new)
            shrink, p = np.exp2(top - safe), np.exp2(s[:, j : j + tile] - safe)
            total = total * shrink + p.sum(1, keepdims=True)
            acc = acc * shrink + (store(p) * kept[:, j : j + tile]) @ v[j : j + tile]
            top = new
        sink = sinks[h] * log2e
        new = np.maximum(top, sink)
        safe = np.where(np.isinf(new), 0, new)
        shrink = np.exp2(top - safe)
        total, acc, top = total * shrink + np.exp2(sink - safe), acc * shrink, new
        alive = total > 0
        o = store(acc / np.where(alive, total, 1) * drop_scale)
        stats = np.where(alive, top, 0) / log2e + np.log(np.where(alive, total, 1))
        p = np.exp2(s - np.where(alive, stats * log2e, np.inf))
        delta = (d_o * o).sum(1, keepdims=True)
        d_edited = p * (kept * (d_o @ v.T) - delta / drop_scale)
        if case.d_bias:
            shared = tuple(axis for axis, name in enumerate("qk") if name not in case.bias_axes)
            at = (b if "b" in case.bias_axes else 0, h if "h" in case.bias_axes else 0)
            d_bias = out["dBias"][at][: m if "q" in case.bias_axes else 1]
            d_bias = d_bias[:, : n if "k" in case.bias_axes else 1]
            d_bias += d_edited.sum(axis=shared, keepdims=True) * drop_scale
        d_s = store(slope * d_edited) * drop_scale
        out["o"][b, h, :m] = o
        out["stats"][b, h, :m] = np.where(alive, stats, -np.inf)
        out["score_max"][b, h, :m] = top / log2e
        out["score_sum_exp"][b, h, :m] = total
        out["dSink_token"][0, h] -= (
            np.exp2(sink - np.where(alive, stats * log2e, np.inf)) * delta
        ).sum(0, keepdims=True)
        for j in range(0, n, tile):
            out["dQ"][b, h, :m] += d_s[:, j : j + tile] @ k[j : j + tile]
        out["dK"][b, hk, :n] += d_s.T @ q * np.float32(case.scale_value)
        out["dV"][b, hv, :n] += (store(p) * kept).T @ d_o * drop_scale
    out["dQ"] *= np.float32(case.scale_value)
    if case.d_bias:
        out["dBias"] = out["dBias"].astype(Library().dtype(case.d_bias))
    return out | {role: given["q"].dtype.type(out[role]) for role in ("dQ", "dK", "dV")}


def _tanh(x: Any) -> Any:
    """As ``cuda_src/attn/softcap.cuh`` computes it."""
    square, total = x * x, np.float32(0.01799921877682209)
    for term in (-0.05339105427265167, 0.1333051323890686, -0.3333331048488617):
        total = total * square + np.float32(term)
    small = total * (x * square) + x
    large = 1 - 2 / (1 + np.exp2(np.float32(2 * np.log2(np.e)) * x))
    return np.where(abs(x) > 0.5, large, small)


def _alibi(case: Case, given: dict[str, Any], b: int, h: int, m: int, n: int) -> Any:
    row, column = np.arange(m)[:, None], np.arange(n)[None, :]
    if case.alibi is None:
        return np.float32(0)
    if case.alibi == "cudnn":
        return alibi_slopes(case.heads_q)[0, h, 0, 0] * np.float32(column - row)
    slopes = given["alibi_slopes"].reshape(-1, case.heads_q)
    return -slopes[b % len(slopes), h] * np.float32(abs(row + n - m - column))


def _blocks(case: Case, given: dict[str, Any], b: int, h: int) -> Any:
    """What a block mask keeps, (blocks of queries x 128, blocks of keys x 128)."""
    shape = (case.batch, case.heads_q, *case.blocks_dim()[2:])
    bits = np.unpackbits(np.broadcast_to(given["block_mask"], shape)[b, h], 1, bitorder="little")
    return bits.repeat(128, 0).repeat(128, 1) == 1


def _given(case: Case) -> dict[str, Any]:
    arrays = {role: t.padded() for role, t in make_tensors(case, Library()).items()}
    return by_sequence(case, arrays)


@settings(max_examples=100)
@given(cases(), _HALVES, st.sampled_from((1, 8, 16)))
def test_admits_tiled_kernels(case: Case, dtype: str, tile: int) -> None:
    """A correct kernel with other tiles, another order and other exponentials passes."""
    case = replace(case, dtype=dtype, stats="float32")
    given = _given(case)
    with np.errstate(all="ignore"):
        oracle.assert_close(case, given, _tiled(case, given, tile))


_TYPICAL = Case(
    batch=2,
    heads_q=4,
    heads_k=2,
    heads_v=4,
    seq_q=40,
    seq_kv=56,
    head_dim_qk=64,
    head_dim_v=48,
    scale=0.125,
    right=20,
    len_q=(40, 33),
    len_kv=(56, 41),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0.126},
        {"right": 21},
        {"right": 19},
        {"left": 39},
        {"bottom_right": True},
        {"len_kv": (55, 41)},
        {"len_q": (40, 32)},
        {"heads_k": 1},
        {"softcap": 4.0},
    ],
    ids=repr,
)
def test_refuses_other_problems(wrong: dict[str, Any], dtype: str) -> None:
    """The results of a slightly different call fail: a key more or less, a scale 1 % off."""
    case = replace(_TYPICAL, dtype=dtype)
    given = _given(case)
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        oracle.assert_close(case, given, _tiled(replace(case, **wrong), given, 16))


def test_refuses_another_soft_cap() -> None:
    """A cap that is 1 % off fails."""
    case = replace(_TYPICAL, softcap=2.0)
    given = _given(case)
    with pytest.raises(AssertionError):
        oracle.assert_close(case, given, _tiled(replace(case, softcap=2.02), given, 16))


@pytest.mark.parametrize("alibi", [None, "cudnn", "H"])
def test_refuses_another_alibi(alibi: str | None) -> None:
    """Each form of ALiBi, and none, differ."""
    case = replace(_TYPICAL, alibi="BH")
    given = _given(case) | {"alibi_slopes": _given(case)["alibi_slopes"][::-1]}
    good = _tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    wrong = given | {"alibi_slopes": given["alibi_slopes"][0]} if alibi == "H" else given
    with pytest.raises(AssertionError):
        oracle.assert_close(case, given, _tiled(replace(case, alibi=alibi), wrong, 16))


@pytest.mark.parametrize(
    "wrong", [{"bias": None}, {"bias": "float32"}, {"bias_axes": "hqk"}], ids=repr
)
def test_refuses_another_bias(wrong: dict[str, Any]) -> None:
    """No bias, a mask that is added, and the bias of another batch entry fail."""
    case = replace(_TYPICAL, bias="bool")
    given = _given(case)
    oracle.assert_close(case, given, _tiled(case, given, 16))
    with pytest.raises(AssertionError):
        other = given | {"bias": given["bias"][:1]} if "bias_axes" in wrong else given
        oracle.assert_close(case, given, _tiled(replace(case, **wrong), other, 16))


@pytest.mark.parametrize(
    "wrong", [{"seed": 1}, {"dropout": None}, {"dropout": 0.11}, {"dropout": 0.5}], ids=repr
)
def test_refuses_another_dropout(wrong: dict[str, Any]) -> None:
    """Another mask, none, or another probability is not close."""
    case = replace(_TYPICAL, dropout=0.1, seed=0)
    given = _given(case)
    good = _tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    other = _tiled(replace(case, **wrong), given, 16)
    for role in ("o", "dQ", "dK", "dV"):
        with pytest.raises(AssertionError, match=f"{role}: error"):
            oracle.assert_close(case, given, {role: other[role]})


@pytest.mark.parametrize("axes", ["bhqk", "hqk", "qk", "bk", "bq"])
def test_refuses_another_gradient_of_a_bias(axes: str) -> None:
    """One that the scale multiplies, or that lacks a batch entry, or a head, fails."""
    case = replace(_TYPICAL, bias="float32", bias_axes=axes, d_bias="float32", right=None, sink=5.0)
    given = _given(case)
    good = _tiled(case, given, 16)
    oracle.assert_close(case, given, {"dBias": good["dBias"]})
    lacking = {**given, "dO": given["dO"].copy()}
    lacking["dO"][0, 1] = 0
    for wrong in (good["dBias"] * np.float32(0.125), _tiled(case, lacking, 16)["dBias"]):
        with pytest.raises(AssertionError, match="dBias"):
            oracle.assert_close(case, given, {"dBias": wrong})


@pytest.mark.parametrize("role", ["o", "dQ", "dK", "dV"])
def test_refuses_one_wrong_element(role: str) -> None:
    """One element of an otherwise good result, off by a tenth of the typical value, fails."""
    given = _given(_TYPICAL)
    good = {role: _tiled(_TYPICAL, given, 16)[role].astype(np.float64)}
    oracle.assert_close(_TYPICAL, given, good)
    good[role][0, 0, 5, 7] += 0.1 * np.std(good[role])
    with pytest.raises(AssertionError):
        oracle.assert_close(_TYPICAL, given, good)


#: Every score is far from 0, and so is every partial sum of it.
_OFFSET = replace(_TYPICAL, offset=-120.0)


def _cut(x: Any, bits: int) -> Any:
    """x, towards zero, with so many bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits)


def _tensor_core(q: Any, k: Any, block: int, extra: int) -> Any:
    """``q @ k.T`` as tensor cores are known to add: a block of products and the sum so far at a
    time, all cut off ``extra`` bits below the last place of the largest, and their sum at its own.
    """
    total = np.zeros((len(q), len(k)))
    for first in range(0, q.shape[1], block):
        columns = slice(first, first + block)
        terms = np.stack([*(q.T[columns, :, None] * k.T[columns, None, :]), total])
        unit = np.exp2(np.frexp(abs(terms).max(0))[1] - 24.0 - extra)
        total = _cut((np.trunc(terms / unit) * unit).sum(0), 24)
    return total


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize(("block", "extra"), [(8, 1), (16, 2)], ids=["Ampere", "Hopper"])
def test_admits_the_sums_of_tensor_cores(head_dim: int, block: int, extra: int) -> None:
    """Scores with an offset, cut off as tensor cores do it, have an admissible log-sum-exp."""
    for seed in range(5):
        case = Case(
            seq_q=30, seq_kv=300, head_dim_qk=head_dim, scale=head_dim**-0.5, offset=-120.0,
            logits=(0.01, 1.0, 10.0)[seed % 3], seed=seed,
        )  # fmt: skip
        given = _given(case)
        q, k = (given[role][0, 0].astype(np.float64) for role in "qk")
        scores = _tensor_core(q, k, block, extra) * case.scale_value
        stats = np.logaddexp.reduce(scores, 1).astype(np.float32)
        oracle.assert_close(case, given, {"stats": stats.reshape(1, 1, -1, 1)})


@pytest.mark.parametrize("seed", range(4))
def test_admits_that_the_same_is_rounded_the_same(seed: int) -> None:
    """Few integers, and a soft cap that is nearly flat there, make elements of dS that are alike:
    their errors add up."""
    case = Case(
        dtype="float16", heads_q=2, heads_k=2, heads_v=2, seq_q=256, seq_kv=446, head_dim_qk=32,
        head_dim_v=32, scale=1.0, softcap=30.0, offset=120.0, numbers="sparse", seed=seed,
    )  # fmt: skip
    given = _given(case)
    oracle.assert_close(case, given, _tiled(case, given, 16))


@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_noise_of_a_sum_with_an_offset(head_dim: int) -> None:
    """The deviation of float32 sums, added in order, is what the model says, and not half of it.

    With a single key the log-sum-exp is the score. A first term in the middle of a binade is
    rounded like others of the same unit in the last place, which the model takes at its largest.
    """
    case = Case(
        dtype="float32", seq_q=2000, head_dim_qk=head_dim, scale=1.0, offset=96.0, logits=0.5
    )
    given = _given(case)
    terms = given["q"][0, 0].astype(np.float64) * given["k"][0, 0].astype(np.float64)
    total = np.zeros(len(terms), np.float32)
    for term in terms.T:
        total = (total + term).astype(np.float32)  # the product itself is exact: a fused add
    want = oracle.exact(case, given)
    sigma = oracle.noise(case, given, want)["stats"].ravel()
    share = np.sqrt(np.mean(((total - terms.sum(1)) / sigma) ** 2))
    assert 0.3 < share < 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_refuses_wrong_scores_with_an_offset(dtype: str) -> None:
    """A part in a million of a log-sum-exp near -120 is too much; so is one key too few."""
    case = replace(_OFFSET, dtype=dtype)
    given = _given(case)
    good = _tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    with pytest.raises(AssertionError, match="stats"):
        oracle.assert_close(case, given, {"stats": good["stats"] * np.float32(1 + 1e-6)})
    for role in ("o", "stats", "dQ", "dK", "dV"):
        other = replace(case, len_kv=(55, 41))
        with pytest.raises(AssertionError), np.errstate(all="ignore"):
            oracle.assert_close(case, given, {role: _tiled(other, given, 16)[role]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_refuses_another_sink(dtype: str) -> None:
    """The results of sinks 0.05 off, and of sinks that are far away, fail."""
    case = replace(_TYPICAL, sink=3.0, right=None, dtype=dtype)
    given = _given(case)
    good = _tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    for other in (given["sink_token"] + np.float32(0.05), np.full_like(given["sink_token"], -20)):
        wrong = _tiled(case, given | {"sink_token": other}, 16)
        for role in ("o", "stats", "score_sum_exp", "dSink_token"):
            with pytest.raises(AssertionError):
                oracle.assert_close(case, given, {role: wrong[role]})


@pytest.mark.parametrize("role", ["o", "stats", "dQ", "dK", "dV"])
def test_refuses_nan(role: str) -> None:
    """A NaN anywhere fails, also in rows that should be 0 or -inf."""
    given = _given(_TYPICAL)
    good = {role: _tiled(_TYPICAL, given, 16)[role].astype(np.float64)}
    good[role][1, 0, -1, 0] = np.nan
    with pytest.raises(AssertionError):
        oracle.assert_close(_TYPICAL, given, good)


def test_gradients_are_those_of_the_output() -> None:
    """The exact dQ, dK and dV match central differences of the exact o."""
    case = Case(
        dtype="float64", heads_q=2, heads_v=2, seq_q=6, seq_kv=9, scale=-0.5, right=3, len_kv=(7,)
    )
    given = _given(case)
    want = oracle.exact(case, given)
    for role, gradient in (("q", "dQ"), ("k", "dK"), ("v", "dV")):
        for index in np.ndindex(given[role].shape):
            losses = []
            for step in (1e-5, -1e-5):
                moved = given[role].copy()
                moved[index] += step
                o = oracle.exact(case, given | {role: moved})["o"]
                losses.append((o * given["dO"]).sum())
            slope = (losses[0] - losses[1]) / 2e-5
            assert abs(slope - want[gradient][index]) < 1e-7
