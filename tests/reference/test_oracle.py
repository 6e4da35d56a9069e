"""The oracle itself: its tolerance admits sound kernels and refuses broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.builders import make_tensors
from tests.cases import Case
from tests.libraries import Library
from tests.pages import by_sequence
from tests.strategies import cases
from tests.tiled import tiled

_HALVES = st.sampled_from(("bfloat16", "float16"))


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
        oracle.assert_close(case, given, tiled(case, given, tile))


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
        oracle.assert_close(case, given, tiled(replace(case, **wrong), given, 16))


def test_refuses_another_soft_cap() -> None:
    """A cap that is 1 % off fails."""
    case = replace(_TYPICAL, softcap=2.0)
    given = _given(case)
    with pytest.raises(AssertionError):
        oracle.assert_close(case, given, tiled(replace(case, softcap=2.02), given, 16))


@pytest.mark.parametrize("alibi", [None, "cudnn", "H"])
def test_refuses_another_alibi(alibi: str | None) -> None:
    """Each form of ALiBi, and none, differ."""
    case = replace(_TYPICAL, alibi="BH")
    given = _given(case) | {"alibi_slopes": _given(case)["alibi_slopes"][::-1]}
    good = tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    wrong = given | {"alibi_slopes": given["alibi_slopes"][0]} if alibi == "H" else given
    with pytest.raises(AssertionError):
        oracle.assert_close(case, given, tiled(replace(case, alibi=alibi), wrong, 16))


@pytest.mark.parametrize(
    "wrong", [{"bias": None}, {"bias": "float32"}, {"bias_axes": "hqk"}], ids=repr
)
def test_refuses_another_bias(wrong: dict[str, Any]) -> None:
    """No bias, a mask that is added, and the bias of another batch entry fail."""
    case = replace(_TYPICAL, bias="bool")
    given = _given(case)
    oracle.assert_close(case, given, tiled(case, given, 16))
    with pytest.raises(AssertionError):
        other = given | {"bias": given["bias"][:1]} if "bias_axes" in wrong else given
        oracle.assert_close(case, given, tiled(replace(case, **wrong), other, 16))


@pytest.mark.parametrize(
    "wrong", [{"seed": 1}, {"dropout": None}, {"dropout": 0.11}, {"dropout": 0.5}], ids=repr
)
def test_refuses_another_dropout(wrong: dict[str, Any]) -> None:
    """Another mask, none, or another probability is not close."""
    case = replace(_TYPICAL, dropout=0.1, seed=0)
    given = _given(case)
    good = tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    other = tiled(replace(case, **wrong), given, 16)
    for role in ("o", "dQ", "dK", "dV"):
        with pytest.raises(AssertionError, match=f"{role}: error"):
            oracle.assert_close(case, given, {role: other[role]})


@pytest.mark.parametrize("axes", ["bhqk", "hqk", "qk", "bk", "bq"])
def test_refuses_another_gradient_of_a_bias(axes: str) -> None:
    """One that the scale multiplies, or that lacks a batch entry, or a head, fails."""
    case = replace(_TYPICAL, bias="float32", bias_axes=axes, d_bias="float32", right=None, sink=5.0)
    given = _given(case)
    good = tiled(case, given, 16)
    oracle.assert_close(case, given, {"dBias": good["dBias"]})
    lacking = {**given, "dO": given["dO"].copy()}
    lacking["dO"][0, 1] = 0
    for wrong in (good["dBias"] * np.float32(0.125), tiled(case, lacking, 16)["dBias"]):
        with pytest.raises(AssertionError, match="dBias"):
            oracle.assert_close(case, given, {"dBias": wrong})


@pytest.mark.parametrize("role", ["o", "dQ", "dK", "dV"])
def test_refuses_one_wrong_element(role: str) -> None:
    """One element of an otherwise good result, off by a tenth of the typical value, fails."""
    given = _given(_TYPICAL)
    good = {role: tiled(_TYPICAL, given, 16)[role].astype(np.float64)}
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
    oracle.assert_close(case, given, tiled(case, given, 16))


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


def test_noise_of_a_maximum_that_roundings_choose() -> None:
    """Where a sink is as large as a score but for what adding a bias to it rounds, the largest of
    both is as far off as that: found in the float32 sums themselves."""
    case = Case(
        dtype="float32", seq_q=400, seq_kv=1, head_dim_qk=16, scale=1.0, bias="float32",
        sink=0.0, row_outputs=("score_max",),
    )  # fmt: skip
    given = _given(case)
    products = given["q"][0, 0].astype(np.float64) @ given["k"][0, 0, 0].astype(np.float64)
    given["bias"] = (0.005 - products).astype(np.float32)[None, None, :, None]
    given["sink_token"] = np.full_like(given["sink_token"], 0.005)
    sums = products.astype(np.float32) + given["bias"][0, 0, :, 0]
    found = np.maximum(sums, np.float32(0.005))
    want = oracle.exact(case, given)
    off = found.astype(np.float64) - want["score_max"].ravel()
    sigma = oracle.noise(case, given, want)["score_max"].ravel()
    assert (abs(off) < 8 * sigma).all()
    assert (abs(off) > 8 * 2**-24 * 0.005).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_refuses_wrong_scores_with_an_offset(dtype: str) -> None:
    """A part in a million of a log-sum-exp near -120 is too much; so is one key too few."""
    case = replace(_OFFSET, dtype=dtype)
    given = _given(case)
    good = tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    with pytest.raises(AssertionError, match="stats"):
        oracle.assert_close(case, given, {"stats": good["stats"] * np.float32(1 + 1e-6)})
    for role in ("o", "stats", "dQ", "dK", "dV"):
        other = replace(case, len_kv=(55, 41))
        with pytest.raises(AssertionError), np.errstate(all="ignore"):
            oracle.assert_close(case, given, {role: tiled(other, given, 16)[role]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_refuses_another_sink(dtype: str) -> None:
    """The results of sinks 0.05 off, and of sinks that are far away, fail."""
    case = replace(_TYPICAL, sink=3.0, right=None, dtype=dtype)
    given = _given(case)
    good = tiled(case, given, 16)
    oracle.assert_close(case, given, good)
    for other in (given["sink_token"] + np.float32(0.05), np.full_like(given["sink_token"], -20)):
        wrong = tiled(case, given | {"sink_token": other}, 16)
        for role in ("o", "stats", "score_sum_exp", "dSink_token"):
            with pytest.raises(AssertionError):
                oracle.assert_close(case, given, {role: wrong[role]})


@pytest.mark.parametrize("role", ["o", "stats", "dQ", "dK", "dV"])
def test_refuses_nan(role: str) -> None:
    """A NaN anywhere fails, also in rows that should be 0 or -inf."""
    given = _given(_TYPICAL)
    good = {role: tiled(_TYPICAL, given, 16)[role].astype(np.float64)}
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
