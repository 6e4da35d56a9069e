"""How far roundings that no fused kernel can avoid may move each element of a result."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.cases import Case
from tests.definition import (
    Entry,
    Tensors,
    by_entry,
    capped,
    row_max,
    row_sum,
    scores_of,
    slopes_of,
    softmax,
    sum_of_rows,
    sum_of_shared,
    transposed,
)

#: By which differences tell how a derivative bends, and near which it may jump.
_STEP = 1e-5

#: How many deviations a score may be below the largest, and roundings still make it that.
_NEAR = 8.0

#: The most that a kernel's soft cap is off, of its value (`few_terms` in dlattn/plans/params.py).
_CAP_ERROR = 2.0**-20.6

#: Types that tensor cores multiply.
SHORT = ("bfloat16", "float16")

#: Results whose type is not that of q, besides stats.
RESULT_TYPES = {"score_max": "float32", "score_sum_exp": "float32", "dSink_token": "float32"}


def noise(case: Case, given: Tensors, want: Tensors) -> dict[str, Any]:
    """Standard deviation of each element of :func:`rounded`, to first order.

    Args:
        want: the :func:`exact` results.

    A value x that is rounded to a type carries an independent error, uniform within ``u * |x|`` (or
    half of the smallest subnormal, or what the arithmetic may flush to 0): variance a third of the
    square. A sum of n products carries the error of each partial sum. Those grow from the first
    product f, which counts only where the case gives it an offset, to at most the sum s of absolute
    products: the mean of their squares is ``(f^2 + f s + s^2) / 3``. As variance that is n times
    ``eps^2 / 12`` of it, and ``eps^2`` of ``s^2`` for the products' own errors.

    Tensor cores, which multiply 16-bit types, do not round partial sums but cut them off: about a
    quarter of a unit in the last place for each eight products (Fasi, Higham, Mikaitis, Pranesh:
    "Numerical behavior of NVIDIA tensor cores", 2021). Scores with an offset share that error, so
    that it is the log-sum-exp's, too; P does not see it, unless there is a sink beside them. What
    moves all scores against the sink is also the rounding of factors that both are multiplied by.

    What edits add to a score is rounded at its own size, alike for neighbours. A kernel's soft cap
    is a polynomial, whose error neighbours share, too. Dropout's scale is a factor of results,
    after P and dS are rounded.
    """
    eps = roundoff(case)
    # Its square must not underflow here.
    flushed = max(float(np.finfo(compute_type(case)).tiny), 1e-150)
    if case.dtype in SHORT:
        # Kernels have exponentials of up to 2^14 (`most_sum` in attn/softmax.cuh) before they meet
        # a larger score or the sink, and what these are multiplied by then may be flushed.
        flushed *= 2.0**14

    def rounding(x: Any, dtype: str | None = None) -> Any:
        info = ml_dtypes.finfo(dtype or case.dtype)
        least = max(float(info.smallest_subnormal) / 2, flushed)
        return ((float(info.eps) / 2 * x) ** 2 + least**2) / 3

    def product(x: Any, y: Any, x_variance: Any, first: Any = 0.0) -> Any:
        """Variance of ``x @ y`` when only x has errors of its own."""
        return x_variance @ y**2 + _sum_variance(x, y, eps, first)

    def entry(e: Entry) -> dict[str, Any]:
        scores, slope, edited = scores_of(case, e)
        rows = softmax(e, scores)
        p, stats, largest = rows.p, e.xp.where(e.alive, rows.stats, 0.0), rows.largest
        largest = e.xp.where(e.alive, largest, 0.0)
        kept, factor = e.kept * case.dropout_scale(), case.dropout_scale()
        o, d_p = (kept * p) @ e.v, kept * (e.d_o @ transposed(e.v))
        first = _first_product(case, e)
        products = _sum_variance(e.q, transposed(e.k), eps, first)
        score = (slope * case.scale_value) ** 2 * products
        # What edits round: numbers as large as the score, and as what they add to it.
        score = score + (eps * edited) ** 2
        bent_off = _cap_error(case, e)
        score = score + bent_off**2 / 3
        # What exponentials are of, the distance from the largest, is rounded at its own size.
        score = score + (eps * (scores - largest)) ** 2 / 3
        # What all scores of a row have in common, and what moves them against the sink.
        cut_off = abs(slope * case.scale_value) * _cut_off(case, e)
        common = (row_sum(e, p * cut_off) ** 2 + row_sum(e, p * bent_off) ** 2) / 3
        if e.added is not None:
            # Neighbours to which alike numbers are added are rounded alike.
            alike = p * eps * edited
            common = common + row_sum(e, alike) ** 2 - row_sum(e, alike**2)
        sink = e.xp.where(e.sink > -np.inf, e.sink, 0.0)
        apart = common + eps**2 * (sink**2 + largest**2) / 3
        sunk = rows.sink**2 * apart
        # An error in a score moves o by p times its key's distance from o.
        o_score = (p**2 * score * kept**2) @ e.v**2 + o**2 * (row_sum(e, p**2 * score) + sunk)
        o_own = product(kept * p, e.v, rounding(p) * kept**2) + o_score
        # delta = rowsum(dO * o) has the errors of o: its own, and those of p, common to its row.
        delta = (
            row_sum(e, e.d_o**2 * (rounding(o) + (eps * o) ** 2))
            + row_sum(e, rounding(p) * d_p**2)
            + row_sum(e, p**2 * score * d_p**2)
        )
        # The backward's p is exp(score - stats), with the rounding of stats, however wide they are.
        held = rounding(stats, compute_type(case))
        stored = e.xp.maximum(held, rounding(stats, case.stats or compute_type(case)))
        # Those of other keys' scores have come into stats.
        p_variance = p**2 * (score + row_sum(e, p**2 * score) + sunk + stored) + flushed**2
        stats_variance = stored + 4 * eps**2 + row_sum(e, p**2 * score) + common + sunk
        # A sink's weight has all errors of stats.
        d_sink = rows.sink * row_sum(e, e.d_o * o)
        d_sink_variance = rows.sink**2 * delta + d_sink**2 * (stats_variance + sunk)
        # The sum is of weights relative to the largest score, which is rounded at its own size.
        # Roundings decide which one that is, or the sink, where others are as near.
        is_largest = e.keep & (scores + _NEAR * score**0.5 >= largest)
        own = row_max(e, e.xp.where(is_largest, score, 0.0))
        size = eps**2 * largest**2 / 3
        moved = e.xp.where(e.sink >= largest, rows.total - 1, rows.sink * rows.total)
        sum_variance = (
            rows.total**2 * (row_sum(e, p**2 * score) + size + eps**2 * (4 + p.shape[-1] / 36))
            + (rows.total - 1) ** 2 * own
            + moved**2 * apart
        )
        centred = d_p - row_sum(e, p * d_p)
        d_s = slope * p * centred
        own_d_p = kept**2 * product(e.d_o, transposed(e.v), 0 * e.d_o)
        held_d_s = rounding(d_s / factor) * factor**2
        d_s_variance = held_d_s + slope**2 * (p_variance * centred**2 + p**2 * own_d_p)
        d_s_variance = d_s_variance + (eps * (1 - slope) * p * centred) ** 2
        # The slope is taken at a score that has errors.
        before, after = (scores_of(case, e, off)[1] for off in (-_STEP, _STEP))
        bent = case.scale_value * (after - before) / (2 * _STEP)
        d_s_variance = d_s_variance + (bent * p * centred) ** 2 * products
        scale = case.scale_value**2
        d_q = product(d_s, e.k, d_s_variance) + delta * ((slope * p) @ e.k) ** 2
        if case.offset and case.numbers == "sparse":
            d_q[..., 0] += _of_alike(e, d_s, held_d_s**0.5 * e.k[..., None, :, 0])
        asked = {"debug_softmax": p_variance} if case.looks_inside else {}
        given_score = given_variance(case, e)
        steps = [slopes_of(case, e, off) for off in (-_STEP, _STEP)]
        for role, by in slopes_of(case, e).items():
            axes = case.added_axes()[role]
            # The derivative by what is read has the errors of the score, and its own.
            bent = (steps[1][role] - steps[0][role]) / (2 * _STEP)
            by_variance = (role != "dBias") * (bent**2 * given_score + (eps * (1 + abs(by))) ** 2)

            def keys(x: Any, axes: str = axes) -> Any:
                return x if "k" in axes else row_sum(e, x)

            each = (p**2 * score + flushed**2) * centred**2
            each = by**2 * (each + p**2 * product(e.d_o, transposed(e.v), 0 * e.d_o))
            each = each + (p * centred) ** 2 * by_variance
            # The errors of delta and of stats move all elements of a row alike.
            alike = delta * keys(by * p) ** 2 + (stored + sunk) * keys(by * p * centred) ** 2
            reach = sum_of_shared(e, abs(by * p * centred), axes)
            terms = np.prod(p.shape) / np.prod(reach.shape)
            asked[role] = sum_of_shared(e, keys(each) + alike, axes)
            asked[role] = asked[role] + (1 + terms / 36) * (eps * reach) ** 2
        return asked | {
            "o": o_own,
            "stats": stats_variance,
            "score_max": own + size + row_max(e, is_largest * cut_off) ** 2 / 3,
            "score_sum_exp": sum_variance,
            "dQ": scale * d_q,
            "dK": scale
            * product(transposed(d_s), e.q, transposed(d_s_variance + (slope * p) ** 2 * delta)),
            "dV": product(
                transposed(kept * p), e.d_o, transposed((rounding(p) + p_variance) * kept**2)
            ),
            "dSink_token": sum_of_rows(e, d_sink_variance)
            + (1 + d_sink.shape[1] / 36) * (eps * sum_of_rows(e, abs(d_sink))) ** 2,
        }

    variance = by_entry(case, given, entry, "float64", dead=0.0)
    return {
        role: (x if role == "stats" else x + rounding(want[role], result_type(case, role))) ** 0.5
        for role, x in variance.items()
    }


def given_variance(case: Case, e: Entry) -> Any:
    """Of the scores that a user's function is given."""
    eps = roundoff(case)
    scores, slope, _ = capped(case, e)
    products = _sum_variance(e.q, transposed(e.k), eps, _first_product(case, e))
    return (slope * case.scale_value) ** 2 * products + (eps * scores) ** 2


def given_shift(case: Case, e: Entry) -> Any:
    """How far tensor cores may move all of those scores of a row together."""
    return abs(capped(case, e)[1] * case.scale_value) * _cut_off(case, e)


def _sum_variance(x: Any, y: Any, eps: float, first: Any) -> Any:
    """Of ``x @ y``, of the roundings of products and partial sums."""
    reach = abs(x) @ abs(y)
    partial_sums = x.shape[-1] / 36 * (first**2 + first * reach + reach**2)
    return eps**2 * (reach**2 + partial_sums)


def _of_alike(e: Entry, values: Any, deviations: Any) -> Any:
    """What the variance of the sum of a row's errors is more than theirs, because the same values
    have the same error. Those are what is within a millionth of the row's largest magnitude."""
    largest = row_max(e, abs(values))
    steps = e.xp.round(1e6 * values / e.xp.where(largest > 0, largest, 1.0))
    steps = steps.reshape(-1, values.shape[-1])
    rows = e.xp.cumsum(e.xp.ones_like(steps[:, :1]), 0)
    _, group, size = e.xp.unique(steps + 3e6 * rows, return_inverse=True, return_counts=True)
    together = e.xp.bincount(group.reshape(-1), deviations.reshape(-1))
    shares = (together**2 / size)[group.reshape(-1)].reshape(values.shape)
    return (shares - deviations**2).sum(-1)


def _first_product(case: Case, e: Entry) -> Any:
    """Of each score; it counts only where the case gives it an offset."""
    return abs(e.q[..., :1] @ transposed(e.k)[..., :1, :]) * bool(case.offset)


def _cut_off(case: Case, e: Entry) -> Any:
    """What tensor cores cut off products of q and k."""
    is_short = case.dtype in SHORT
    return roundoff(case) / 32 * e.q.shape[-1] * _first_product(case, e) * is_short


def _cap_error(case: Case, e: Entry) -> Any:
    """How far a kernel's soft cap may be off."""
    if not case.softcap or case.dtype not in SHORT:
        return 0.0
    return _CAP_ERROR * capped(case, e)[2]


def roundoff(case: Case) -> float:
    """Of the type of arithmetic that goes with a case's tensors."""
    return float(np.finfo(compute_type(case)).eps)


def result_type(case: Case, role: str) -> str | None:
    """The type that a result is rounded to, if not that of q."""
    if role.startswith("d_mod_"):
        return case.d_mods
    return case.d_bias if role == "dBias" else RESULT_TYPES.get(role)


def compute_type(case: Case) -> str:
    """The type of arithmetic that goes with a case's tensors."""
    return "float64" if case.dtype == "float64" else "float32"
