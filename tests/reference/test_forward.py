"""The reference engine's forward: what it does at the edges of its contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from dlattn.dtypes import data_type
from dlattn.plans.reference import Reference, attention_forward
from dlattn.problem import BlockMask, Direction, Values, Where, alibi_slopes
from dlattn.runtime.target import CPU, KNOWN
from tests.builders import Guarded, make_tensors
from tests.cases import Case
from tests.drivers import check, geometry_of, problem_of
from tests.engine import forward, run_plan
from tests.libraries import Library
from tests.reference.examples import CASE, Cube, Weave
from tests.strategies import cases


def _run(case: Case) -> dict[str, Any]:
    tensors = make_tensors(case, Library())
    run_plan(case, tensors)
    return {role: t.padded() for role, t in tensors.items()}


@settings(max_examples=60)
@given(cases())
def test_blocks_of_rows(case: Case) -> None:
    """However few rows fit in a block, forward and backward are right."""
    with patch("dlattn.plans.reference._SCORES_PER_BLOCK", 3 * case.heads_q * case.seq_kv):
        check(case, Library(), run_plan)


def test_rows_that_attend_to_nothing() -> None:
    """Valid rows whose band is empty hold 0 and -inf."""
    out = _run(replace(CASE, seq_q=9, seq_kv=5, right=0, bottom_right=True))
    assert (out["o"][:, :, :4] == 0).all() and (out["stats"][:, :, :4] == -np.inf).all()
    assert np.isfinite(out["stats"][:, :, 4:]).all()


@pytest.mark.parametrize("tails", ["nan", "inf", "huge"])
def test_padding(tails: str) -> None:
    """Rows past the query length hold 0 and -inf; nothing past a length is read."""
    out = _run(replace(CASE, len_q=(3, 0), len_kv=(4, 9), tails=tails))
    assert (out["o"][0, :, 3:] == 0).all() and (out["o"][1] == 0).all()
    assert (out["stats"][0, :, 3:] == -np.inf).all() and (out["stats"][1] == -np.inf).all()
    assert np.isfinite(out["o"]).all() and np.isfinite(out["stats"][0, :, :3]).all()


def test_no_keys() -> None:
    """With a key length of 0 every row holds 0 and -inf."""
    out = _run(replace(CASE, len_kv=(0, 0)))
    assert (out["o"] == 0).all() and (out["stats"] == -np.inf).all()


@pytest.mark.parametrize("len_dtype", ["int32", "int64"])
def test_lengths_are_clamped(len_dtype: str) -> None:
    """Lengths outside [0, S] count as the nearer of the two."""
    case = replace(CASE, len_dtypes=(len_dtype, len_dtype))
    wild = replace(case, len_q=(-7, 2**31 - 1), len_kv=(99, -1))
    tame = replace(case, len_q=(0, 5), len_kv=(9, 0))
    tensors, lengths = make_tensors(tame, Library()), make_tensors(wild, Library())
    tensors |= {role: lengths[role] for role in ("seq_len_q", "seq_len_kv")}
    run_plan(wild, tensors)
    expected = _run(tame)
    for role in ("o", "stats", "dQ", "dK", "dV"):
        assert (tensors[role].tensor == expected[role]).all()


def test_nan_among_the_keys_reaches_the_rows_that_attend_to_it() -> None:
    """A NaN in a valid key spoils the rows that see it, and no others."""
    case = replace(CASE, right=0)
    arrays = {role: t.padded().copy() for role, t in make_tensors(case, Library()).items()}
    arrays["k"][0, 1, 3, 0] = np.nan
    o, stats, *_ = forward(case, arrays)
    spoilt = np.zeros(o.shape[:3], bool)
    spoilt[0, 2:, 3:] = True
    assert (np.isnan(o).any(-1) == spoilt).all() and (np.isnan(stats[..., 0]) == spoilt).all()


def test_scale_zero() -> None:
    """A scale of 0 takes the mean of v, and stats count the keys."""
    case = replace(CASE, scale=0.0, heads_v=4)
    arrays = _run(case)
    mean = arrays["v"].mean(2, keepdims=True)
    assert np.allclose(arrays["o"], mean, atol=1e-14) and np.allclose(arrays["stats"], np.log(9))


@pytest.mark.parametrize("scale_as", ["host", "device"])
def test_scale_as_a_tensor(scale_as: str) -> None:
    """A scale in a tensor does what the same number does as an argument."""
    by_value = replace(CASE, scale=-0.25)
    expected, got = _run(by_value), _run(replace(by_value, scale_as=scale_as))
    assert (expected["o"] == got["o"]).all() and (expected["dQ"] == got["dQ"]).all()


def test_soft_caps() -> None:
    """Scores far above a soft cap count as the cap; a cap far above the scores does nothing."""
    arrays = _run(replace(CASE, softcap=1e6))
    assert np.allclose(arrays["o"], _run(CASE)["o"], rtol=1e-9)
    capped = replace(CASE, logits=1e3, softcap=0.01, heads_v=4, heads_k=4)
    arrays = _run(capped)
    weights = np.exp(0.01 * np.sign(arrays["q"] @ arrays["k"].swapaxes(2, 3)))
    expected = weights @ arrays["v"] / weights.sum(-1, keepdims=True)
    assert np.allclose(arrays["o"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
    ],
)
def test_slopes_of_cudnn(heads: int, slopes: list[float]) -> None:
    """The slopes of the ALiBi paper, written out."""
    assert alibi_slopes(heads).reshape(-1).tolist() == slopes


@pytest.mark.parametrize("bias", ["float64", "bool", "uint8"])
def test_rows_that_a_bias_masks(bias: str) -> None:
    """A row of -inf, or of false, holds 0 and -inf, and gets no gradient."""
    case = replace(CASE, bias=bias)
    tensors = make_tensors(case, Library())
    masks = bias != "float64"
    tensors["bias"].tensor[...] = 1
    tensors["bias"].tensor[0, 1, 2] = 0 if masks else -np.inf
    run_plan(case, tensors)
    out = {role: t.padded() for role, t in tensors.items()}
    assert (out["o"][0, 1, 2] == 0).all() and out["stats"][0, 1, 2] == -np.inf
    assert (out["dQ"][0, 1, 2] == 0).all()
    assert np.isfinite(out["stats"]).sum() == out["stats"].size - 1
    assert all(np.isfinite(out[role]).all() for role in ("o", "dQ", "dK", "dV"))


def test_blocks_are_bits_from_the_lowest() -> None:
    """Bit i of byte j keeps the block of keys 8 j + i; each has 128, and there may be many."""
    kept = np.zeros((1, 1, 1, 1300), bool)
    kept[..., :128] = kept[..., 256:384] = kept[..., 8 * 128 : 9 * 128] = True
    first, length = np.zeros((1, 1, 1, 1), int), np.full((1, 1, 1, 1), 1300)
    where = Where(first, first, query=first + 130, key=np.arange(1300).reshape(1, 1, 1, -1))
    mask = np.array([[0xFF, 0xFF], [0b101, 0b1]], np.uint8).reshape(1, 1, 2, 2)
    values = Values(1.0, length, length, block_mask=mask)
    assert np.array_equal(BlockMask().keep(where, values), kept)


def test_a_mask_takes_the_place_of_minus_infinity() -> None:
    """A boolean bias does what a float one does that is 0 and -inf."""
    case = replace(CASE, bias="bool", bias_axes="qk")
    arrays = _run(case)
    added = np.where(arrays["bias"], 0.0, -np.inf)
    o, stats, *_ = forward(replace(case, bias="float64"), arrays | {"bias": added})
    assert (arrays["o"] == o).all() and (arrays["stats"] == stats).all()


def test_computes_as_told() -> None:
    """A problem that computes in DOUBLE has exact bf16 results, rounded once."""
    case = replace(CASE, dtype="bfloat16", stats=None)
    tensors = make_tensors(case, Library())
    used = {role: tensors[role] for role in ("q", "k", "v", "o")}
    problem = replace(problem_of(case, Direction.FORWARD), compute=data_type.DOUBLE)
    plan = Reference(problem, geometry_of(case, used), CPU)
    plan.execute({role: t.tensor.ctypes.data for role, t in used.items()}, 0, 0)
    exact, *_ = forward(case, {role: t.padded() for role, t in tensors.items()})
    assert (tensors["o"].tensor == exact.astype(tensors["o"].tensor.dtype)).all()


def test_supports() -> None:
    """It takes four types on the CPU, and says in a sentence what it does not take."""
    tensors: dict[str, Guarded] = make_tensors(CASE, Library())
    problem, geometry = problem_of(CASE, Direction.FORWARD), geometry_of(CASE, tensors)
    for dtype in (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE):
        assert Reference.supports(replace(problem, dtype=dtype), geometry, CPU) is None
    assert "cuda:0" in (Reference.supports(problem, geometry, KNOWN["sm_90a"]) or "")
    fp8 = replace(problem, dtype=data_type.FP8_E4M3)
    assert "FP8_E4M3" in (Reference.supports(fp8, geometry, CPU) or "")


def test_any_edit_and_mask() -> None:
    """Edits and masks run through their twins alone, in order."""
    case = replace(CASE, heads_k=4, heads_v=4)
    q, k, v = (make_tensors(case, Library())[role].tensor for role in "qkv")
    o, *_ = attention_forward(q, k, v, edits=(Cube(), Cube()), masks=(Weave(),))
    b, h, i, j = np.ogrid[:2, :4, :5, :9]
    scores = q @ k.swapaxes(2, 3)
    for _ in range(2):
        scores = scores**3 / 9 + 0.1 * (h - b) * (i - j)
    scores = np.where((b + h + i + j) % 3 > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.allclose(o, weights @ v / weights.sum(-1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("sink", [None, 0.75])
def test_statistics_of_rows_that_attend_to_nothing(sink: float | None) -> None:
    """Without keys a valid row is its sink's, or empty; rows past the length are always empty."""
    case = replace(CASE, len_q=(5, 3), right=0, bottom_right=True, sink=sink)
    case = replace(case, seq_kv=3, len_kv=(3, 0), row_outputs=("score_max", "score_sum_exp"))
    got = _run(case)
    sinks = np.full((1, 4, 1, 1), -np.inf) if sink is None else got["sink_token"]
    # The first entry's rows 0 and 1 stand before its keys; the second entry has none.
    alone = [(0, slice(0, 2)), (1, slice(0, 3))]
    for entry, rows in alone:
        for role in ("stats", "score_max"):
            assert (got[role][entry, :, rows] == sinks[0]).all()
        assert (got["score_sum_exp"][entry, :, rows] == (sink is not None)).all()
        assert (got["o"][entry, :, rows] == 0).all() and (got["dQ"][entry, :, rows] == 0).all()
    assert (got["stats"][1, :, 3:] == -np.inf).all() and (
        got["score_max"][1, :, 3:] == -np.inf
    ).all()
    assert (got["score_sum_exp"][1, :, 3:] == 0).all() and (got["o"][1, :, 3:] == 0).all()
    if sink is not None:
        assert np.isfinite(got["dSink_token"]).all() and (got["dSink_token"] != 0).all()
