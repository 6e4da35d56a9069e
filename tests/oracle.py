"""The oracle: the exact results of a case, and how far a computation may be from them.

Nothing here uses dlattn. A result is compared with the exact one by two yardsticks, both computed
for the very data at hand: the error of a plain computation that rounds where any fused kernel must
(:func:`rounded`), and the standard deviation that those roundings give each element
(:func:`tests.noise.noise`). No tolerance is a number that someone chose for some data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cases import Case
from tests.definition import (
    Entry,
    Tensors,
    _module,
    by_entry,
    cast,
    kept_by,
    row_max,
    row_sum,
    scores_of,
    slopes_of,
    softmax,
    sum_of_rows,
    sum_of_shared,
    transposed,
)
from tests.leeway import leeway
from tests.noise import RESULT_TYPES, compute_type, noise, result_type
from tests.score_mods import TENSORS

#: How many times the larger yardstick the largest error may be.
FACTORS = {
    **{"o": 2.0, "stats": 2.0, "score_max": 2.0, "score_sum_exp": 2.0},
    "debug_softmax": 3.0,
    **{"dQ": 3.0, "dK": 3.0, "dV": 3.0, "dSink_token": 3.0, "dBias": 3.0},
    **{f"d_mod_{name}": 3.0 for name in TENSORS},
}

#: How many of its own standard deviations any element may be off. Sound kernels stay below 4 over
#: millions of elements; a wrong row that others dwarf does not.
_DEVIATIONS = 8.0


def exact(case: Case, given: Tensors) -> dict[str, Any]:
    """Every result in float64, from q, k, v, dO and sinks; 0 and -inf where nothing is attended.

    The gradient is that of the softmax itself, ``dS = P * (dP - rowsum(P * dP))``; it uses neither
    o nor stats.
    """

    def entry(e: Entry) -> dict[str, Any]:
        scores, slope, _ = scores_of(case, e)
        rows = softmax(e, scores)
        p, kept = rows.p, e.kept * case.dropout_scale()
        d_p = kept * (e.d_o @ transposed(e.v))
        delta = row_sum(e, p * d_p)
        d_edited = p * (d_p - delta)
        d_s = case.scale_value * slope * d_edited
        asked = _sums(case, e, d_edited)
        asked |= {"debug_softmax": p} if case.looks_inside else {}
        return asked | {
            "o": (kept * p) @ e.v,
            "stats": rows.stats,
            "score_max": rows.largest,
            "score_sum_exp": rows.total,
            "dQ": d_s @ e.k,
            "dK": transposed(d_s) @ e.q,
            "dV": transposed(kept * p) @ e.d_o,
            "dSink_token": sum_of_rows(e, -rows.sink * delta),
        }

    return by_entry(case, given, entry, "float64")


def rounded(case: Case, given: Tensors) -> dict[str, Any]:
    """The same from a plain computation with the roundings that no fused kernel can avoid.

    Arithmetic is float32 (float64 for float64 tensors); P and dS, which the tensor cores read, and
    the results are rounded to the case's type. The gradient uses the rounded o and stats.
    """
    compute = compute_type(case)

    def entry(e: Entry) -> dict[str, Any]:
        def store(x: Any, dtype: str | None = None) -> Any:
            return cast(cast(x, dtype or case.dtype), compute)

        scores, slope, _ = scores_of(case, e)
        rows = softmax(e, scores)
        p, stats = rows.p, store(rows.stats, case.stats or compute)
        top = row_max(e, p)
        unnormalised = p / e.xp.where(top > 0, top, 1.0)
        scale = case.dropout_scale()
        o = store((store(unnormalised) * e.kept) @ e.v * top * scale)
        d_p = e.kept * (e.d_o @ transposed(e.v))
        alive_stats = e.xp.where(e.alive, stats, 0.0)
        p = e.xp.exp(e.xp.where(e.keep, scores, -np.inf) - alive_stats)
        delta = row_sum(e, e.d_o * o)
        d_edited = p * (d_p - delta / scale)
        d_s = store(slope * d_edited) * scale
        asked = _sums(case, e, d_edited * scale)
        asked |= {"debug_softmax": store(p)} if case.looks_inside else {}
        return asked | {
            "o": o,
            "stats": stats,
            "score_max": store(rows.largest, RESULT_TYPES["score_max"]),
            "score_sum_exp": store(rows.total, RESULT_TYPES["score_sum_exp"]),
            "dQ": store(case.scale_value * (d_s @ e.k)),
            "dK": case.scale_value * (transposed(d_s) @ e.q),
            "dV": transposed(store(p) * e.kept) @ e.d_o * scale,
            "dSink_token": sum_of_rows(e, -e.xp.exp(e.sink - alive_stats) * delta),
        }

    results = by_entry(case, given, entry, compute)
    # Only now, because these are sums of several heads, or batch entries, before they are rounded.
    late = {"dK": case.dtype, "dV": case.dtype, "dSink_token": RESULT_TYPES["dSink_token"]}
    late |= {role: result_type(case, role) for role in case.added_axes()}
    return results | {role: cast(results[role], dtype) for role, dtype in late.items()}


def _sums(case: Case, e: Entry, d_edited: Any) -> dict[str, Any]:
    """Of the gradient of scores, what each element that is added to or read by them gets."""
    return {
        role: sum_of_shared(e, d_edited * slope, case.added_axes()[role])
        for role, slope in slopes_of(case, e).items()
    }


def assert_close(case: Case, given: Tensors, got: Tensors) -> None:
    """Fails unless each result in ``got`` is as near to the exact one as its type allows.

    Args:
        given: q, k, v and dO, in the case's type.
        got: any of o, stats, score_max, score_sum_exp, dQ, dK, dV, dSink_token, dBias, gradients of
            what a function reads, and debug_softmax, without signs and in the shape of the scores.

    The largest absolute error may be ``FACTORS`` times the larger of the largest error of
    :func:`rounded` and what the largest :func:`noise` can reach (a plain computation on a few
    elements may be lucky; a uniform error reaches sqrt(3) of its deviations). No error may exceed
    ``_DEVIATIONS`` times its own noise. Infinities must agree, and nothing may be NaN. Of an error,
    what :func:`leeway` lets a result move is none.
    """
    want, free = exact(case, given), leeway(case, given)
    plain, sigma = rounded(case, given), noise(case, given, want)
    for role, result in got.items():
        finite = abs(want[role]) != np.inf
        same = cast(result, "float64") == want[role]
        assert bool((same | finite).all()), f"{role}: infinities differ; {case!r}"
        x, y, z, deviation = (
            cast(a, "float64")[finite] for a in (result, want[role], plain[role], sigma[role])
        )
        may_move = free[role][finite] if role in free else 0.0
        off = _beyond(x - y, may_move)
        error, usual = _largest(off), _largest(_beyond(z - y, may_move))
        luck, deviations = 3**0.5 * _largest(deviation), _largest(off / deviation)
        allowed = FACTORS[role] * max(usual, luck)
        assert error <= allowed and deviations <= _DEVIATIONS, (
            f"{role}: error {error:.3e}, allowed {allowed:.3e} (a plain computation errs by "
            f"{usual:.3e}, noise reaches {luck:.3e}, values reach {_largest(y):.3e}); one is "
            f"{deviations:.1f} deviations off, allowed {_DEVIATIONS}; {case!r}"
        )


def assert_dump(case: Case, given: Tensors, dump: Any) -> None:
    """Fails unless a dump is the mask, to the bit and wherever it is."""
    wrong = int((dump != kept_by(case, given, "float32")).sum())
    assert wrong == 0, f"rng_dump: {wrong} elements are wrong; {case!r}"


def assert_debug_softmax(case: Case, given: Tensors, got: Any) -> None:
    """Fails unless signs are those of the mask, to the bit, magnitudes are near the probabilities,
    and all beyond the shape of the scores is 0."""
    batch, heads, seq_q, seq_kv = case.scores_dim()
    there = cast(got[:, :, :seq_q, :seq_kv], "float64")
    if case.dropout is not None:
        signs = _module(there).signbit(there)
        wrong = int((signs != (kept_by(case, given, "float64") == 0)).sum())
        assert wrong == 0, f"debug_softmax: {wrong} signs are wrong; {case!r}"
    for beyond in (got[:, :, seq_q:], got[..., seq_kv:]):
        beyond = cast(beyond, "float64").reshape(-1)
        assert _largest(beyond) == 0, f"debug_softmax: not 0 beyond the scores; {case!r}"
    assert_close(case, given, {"debug_softmax": abs(there)})


#: Results of the size of the scores, and what they must be.
OF_SCORES = {"rng_dump": assert_dump, "debug_softmax": assert_debug_softmax}


def _beyond(error: Any, may_move: Any) -> Any:
    """How much of an error is none of what may move; NaN is all error."""
    off = abs(error) - may_move
    return off * ~(off < 0)


def _largest(x: Any) -> float:
    """The largest magnitude; NaN if any is NaN; 0 of nothing."""
    return float(abs(x).max()) if x.shape[0] else 0.0
