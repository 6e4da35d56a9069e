"""What attention is, written from its definition, and how far a computation may be from it.

Nothing here uses dlattn. Every function takes arrays of NumPy, CuPy or PyTorch, and works on one
batch entry at a time, cut to its lengths.

A result is compared with the exact one by two yardsticks, both computed for the very data at hand:
the error of a plain computation that rounds where any fused kernel must (:func:`rounded`), and the
standard deviation that those roundings give each element (:func:`noise`). No tolerance is a number
that someone chose for some data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.strategies import Case

Tensors = Mapping[str, Any]

#: How many times the larger yardstick the largest error may be.
FACTORS = {
    **{"o": 2.0, "stats": 2.0, "score_max": 2.0, "score_sum_exp": 2.0},
    **{"dQ": 3.0, "dK": 3.0, "dV": 3.0, "dSink_token": 3.0},
}

#: Results whose type is not that of q, besides stats.
_TYPES = {"score_max": "float32", "score_sum_exp": "float32", "dSink_token": "float32"}

#: How many of its own standard deviations any element may be off. Sound kernels stay below 4 over
#: millions of elements; a wrong row that others dwarf does not.
_DEVIATIONS = 8.0


@dataclass(frozen=True)
class _Entry:
    """One batch entry: k and v repeated for the query heads, lengths cut off.

    Attributes:
        q, k, v, d_o: (Hq, m, Dqk), (Hq, n, Dqk), (Hq, n, Dv), (Hq, m, Dv).
        sink: (Hq, 1, 1), -inf without.
        keep: (m, n) booleans.
        alive: (Hq, m, 1) booleans: rows that attend to something, be it the sink.
    """

    xp: Any
    q: Any
    k: Any
    v: Any
    d_o: Any
    sink: Any
    keep: Any
    alive: Any


@dataclass(frozen=True)
class _Rows:
    """A softmax: the weights (Hq, m, n) of the keys, 0 where masked, and numbers (Hq, m, 1) of its
    rows, of which ``sink`` is the sink's weight."""

    p: Any
    sink: Any
    stats: Any
    largest: Any
    total: Any


def exact(case: Case, given: Tensors) -> dict[str, Any]:
    """Every result in float64, from q, k, v, dO and sinks; 0 and -inf where nothing is attended.

    The gradient is that of the softmax itself, ``dS = P * (dP - rowsum(P * dP))``; it uses neither
    o nor stats.
    """

    def entry(e: _Entry) -> dict[str, Any]:
        rows = _softmax(e, case.scale_value * (e.q @ _t(e.k)))
        p, d_p = rows.p, e.d_o @ _t(e.v)
        delta = _row_sum(e, p * d_p)
        d_s = case.scale_value * p * (d_p - delta)
        return {
            "o": p @ e.v,
            "stats": rows.stats,
            "score_max": rows.largest,
            "score_sum_exp": rows.total,
            "dQ": d_s @ e.k,
            "dK": _t(d_s) @ e.q,
            "dV": _t(p) @ e.d_o,
            "dSink_token": _sum_of_rows(e, -rows.sink * delta),
        }

    return _by_entry(case, given, entry, "float64")


def rounded(case: Case, given: Tensors) -> dict[str, Any]:
    """The same from a plain computation with the roundings that no fused kernel can avoid.

    Arithmetic is float32 (float64 for float64 tensors); P and dS, which the tensor cores read, and
    the results are rounded to the case's type. The gradient uses the rounded o and stats.
    """
    compute = _compute(case)

    def entry(e: _Entry) -> dict[str, Any]:
        def store(x: Any, dtype: str | None = None) -> Any:
            return _cast(_cast(x, dtype or case.dtype), compute)

        scores = case.scale_value * (e.q @ _t(e.k))
        rows = _softmax(e, scores)
        p, stats = rows.p, store(rows.stats, case.stats or compute)
        top = _row_max(e, p)
        unnormalised = p / e.xp.where(top > 0, top, 1.0)
        o = store(store(unnormalised) @ e.v * top)
        d_p = e.d_o @ _t(e.v)
        alive_stats = e.xp.where(e.alive, stats, 0.0)
        p = e.xp.exp(e.xp.where(e.keep, scores, -np.inf) - alive_stats)
        delta = _row_sum(e, e.d_o * o)
        d_s = store(p * (d_p - delta))
        return {
            "o": o,
            "stats": stats,
            "score_max": store(rows.largest, _TYPES["score_max"]),
            "score_sum_exp": store(rows.total, _TYPES["score_sum_exp"]),
            "dQ": store(case.scale_value * (d_s @ e.k)),
            "dK": case.scale_value * (_t(d_s) @ e.q),
            "dV": _t(store(p)) @ e.d_o,
            "dSink_token": _sum_of_rows(e, -e.xp.exp(e.sink - alive_stats) * delta),
        }

    results = _by_entry(case, given, entry, compute)
    # Only now, because these are sums of several heads, or batch entries, before they are rounded.
    late = {"dK": case.dtype, "dV": case.dtype, "dSink_token": _TYPES["dSink_token"]}
    return results | {role: _cast(results[role], dtype) for role, dtype in late.items()}


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
    """
    arithmetic = np.finfo(_compute(case))
    eps = float(arithmetic.eps)
    flushed = max(float(arithmetic.tiny), 1e-150)  # its square must not underflow here
    is_short = case.dtype in ("bfloat16", "float16")

    def rounding(x: Any, dtype: str | None = None) -> Any:
        info = ml_dtypes.finfo(dtype or case.dtype)
        least = max(float(info.smallest_subnormal) / 2, flushed)
        return ((float(info.eps) / 2 * x) ** 2 + least**2) / 3

    def product(x: Any, y: Any, x_variance: Any, first: Any = 0.0) -> Any:
        """Variance of ``x @ y`` when only x has errors of its own."""
        reach = abs(x) @ abs(y)
        partial_sums = x.shape[-1] / 36 * (first**2 + first * reach + reach**2)
        return x_variance @ y**2 + eps**2 * (reach**2 + partial_sums)

    def entry(e: _Entry) -> dict[str, Any]:
        scores = case.scale_value * (e.q @ _t(e.k))
        rows = _softmax(e, scores)
        p, stats, largest = rows.p, e.xp.where(e.alive, rows.stats, 0.0), rows.largest
        largest = e.xp.where(e.alive, largest, 0.0)
        o, d_p = p @ e.v, e.d_o @ _t(e.v)
        first = abs(e.q[..., :1] @ _t(e.k)[..., :1, :]) * bool(case.offset)
        score = case.scale_value**2 * product(e.q, _t(e.k), 0 * e.q, first)
        # What all scores of a row have in common, and what moves them against the sink.
        cut_off = eps / 32 * e.q.shape[-1] * abs(case.scale_value) * first * is_short
        common = _row_sum(e, p * cut_off) ** 2 / 3
        sink = e.xp.where(e.sink > -np.inf, e.sink, 0.0)
        apart = common + eps**2 * (sink**2 + largest**2) / 3
        sunk = rows.sink**2 * apart
        # An error in a score moves o by p times its key's distance from o.
        o_score = (p**2 * score) @ e.v**2 + o**2 * (_row_sum(e, p**2 * score) + sunk)
        o_own = product(p, e.v, rounding(p)) + o_score
        # delta = rowsum(dO * o) has the errors of o: its own, and those of p, common to its row.
        delta = (
            _row_sum(e, e.d_o**2 * (rounding(o) + (eps * o) ** 2))
            + _row_sum(e, rounding(p) * d_p**2)
            + _row_sum(e, p**2 * score * d_p**2)
        )
        # The backward's p is exp(score - stats), with the rounding of stats.
        stored = rounding(stats, case.stats or _compute(case))
        p_variance = p**2 * (score + sunk + stored) + flushed**2
        stats_variance = stored + 4 * eps**2 + _row_sum(e, p**2 * score) + common + sunk
        # A sink's weight has all errors of stats.
        d_sink = rows.sink * _row_sum(e, e.d_o * o)
        d_sink_variance = rows.sink**2 * delta + d_sink**2 * (stats_variance + sunk)
        # The sum is of weights relative to the largest score, which is rounded at its own size.
        is_largest = e.keep & (scores >= largest)
        own = _row_max(e, e.xp.where(is_largest, score, 0.0))
        size = eps**2 * largest**2 / 3
        moved = e.xp.where(e.sink >= largest, rows.total - 1, rows.sink * rows.total)
        sum_variance = (
            rows.total**2 * (_row_sum(e, p**2 * score) + size + eps**2 * (4 + p.shape[-1] / 36))
            + (rows.total - 1) ** 2 * own
            + moved**2 * apart
        )
        centred = d_p - _row_sum(e, p * d_p)
        d_s = p * centred
        d_s_variance = (
            rounding(d_s) + p_variance * centred**2 + p**2 * product(e.d_o, _t(e.v), 0 * e.d_o)
        )
        scale = case.scale_value**2
        return {
            "o": o_own,
            "stats": stats_variance,
            "score_max": own + size + _row_max(e, is_largest * cut_off) ** 2 / 3,
            "score_sum_exp": sum_variance,
            "dQ": scale * (product(d_s, e.k, d_s_variance) + delta * (p @ e.k) ** 2),
            "dK": scale * product(_t(d_s), e.q, _t(d_s_variance + p**2 * delta)),
            "dV": product(_t(p), e.d_o, _t(rounding(p) + p_variance)),
            "dSink_token": _sum_of_rows(e, d_sink_variance)
            + (1 + d_sink.shape[1] / 36) * (eps * _sum_of_rows(e, abs(d_sink))) ** 2,
        }

    variance = _by_entry(case, given, entry, "float64", dead=0.0)
    return {
        role: (x if role == "stats" else x + rounding(want[role], _TYPES.get(role))) ** 0.5
        for role, x in variance.items()
    }


def assert_close(case: Case, given: Tensors, got: Tensors) -> None:
    """Fails unless each result in ``got`` is as near to the exact one as its type allows.

    Args:
        given: q, k, v and dO, in the case's type.
        got: any of o, stats, score_max, score_sum_exp, dQ, dK, dV, dSink_token.

    The largest absolute error may be ``FACTORS`` times the larger of the largest error of
    :func:`rounded` and what the largest :func:`noise` can reach (a plain computation on a few
    elements may be lucky; a uniform error reaches sqrt(3) of its deviations). No error may exceed
    ``_DEVIATIONS`` times its own noise. Infinities must agree, and nothing may be NaN.
    """
    want = exact(case, given)
    plain, sigma = rounded(case, given), noise(case, given, want)
    for role, result in got.items():
        finite = abs(want[role]) != np.inf
        same = _cast(result, "float64") == want[role]
        assert bool((same | finite).all()), f"{role}: infinities differ; {case!r}"
        x, y, z, deviation = (
            _cast(a, "float64")[finite] for a in (result, want[role], plain[role], sigma[role])
        )
        error, usual, luck = _largest(x - y), _largest(z - y), 3**0.5 * _largest(deviation)
        deviations = _largest((x - y) / deviation)
        allowed = FACTORS[role] * max(usual, luck)
        assert error <= allowed and deviations <= _DEVIATIONS, (
            f"{role}: error {error:.3e}, allowed {allowed:.3e} (a plain computation errs by "
            f"{usual:.3e}, noise reaches {luck:.3e}, values reach {_largest(y):.3e}); one is "
            f"{deviations:.1f} deviations off, allowed {_DEVIATIONS}; {case!r}"
        )


def _compute(case: Case) -> str:
    """The type of arithmetic that goes with a case's tensors."""
    return "float64" if case.dtype == "float64" else "float32"


def _by_entry(
    case: Case,
    given: Tensors,
    compute: Callable[[_Entry], dict[str, Any]],
    dtype: str,
    dead: float = -np.inf,
) -> dict[str, Any]:
    """Runs ``compute`` on each batch entry, and gathers the results in full-size tensors.

    What no entry computes is 0, and ``dead`` in stats and score_max. Key and value gradients are
    summed over the query heads that share them, the sinks' over the batch.
    """
    q, k, v, d_o = (_cast(given[role], dtype) for role in ("q", "k", "v", "dO"))
    xp, row = _module(q), q[..., :1]
    like = {"o": d_o, "stats": row, "score_max": row, "score_sum_exp": row}
    like |= {"dQ": q, "dK": k, "dV": v, "dSink_token": row[:1, :, :1]}
    full = {role: xp.zeros_like(x) for role, x in like.items()}
    full["stats"], full["score_max"] = full["stats"] + dead, full["score_max"] + dead
    sink = full["dSink_token"][0] - np.inf
    if case.sink is not None:
        sink = _cast(given["sink_token"], dtype)[0]
    heads_of = {"dK": case.heads_k, "dV": case.heads_v}
    for index, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
        if m == 0:
            continue
        # Without keys, one that is masked: no library takes the maximum of nothing.
        keys, values = (x[index, :, :n] if n else xp.zeros_like(x[index, :, :1]) for x in (k, v))
        keep = _keep(case, xp, q, m, n)
        e = _Entry(
            xp=xp,
            q=q[index, :, :m],
            k=_repeat(keys, case.heads_q),
            v=_repeat(values, case.heads_q),
            d_o=d_o[index, :, :m],
            sink=sink,
            keep=keep,
            alive=keep.any(-1)[:, None] | (sink > -np.inf),
        )
        for role, x in compute(e).items():
            if role in heads_of:
                heads = heads_of[role]
                x = xp.sum(x.reshape(heads, case.heads_q // heads, *x.shape[1:]), 1)
                full[role][index, :, :n] = x[:, :n]
            elif role == "dSink_token":
                full[role][0] += x
            else:
                full[role][index, :, :m] = x
    return full


def _keep(case: Case, xp: Any, like: Any, m: int, n: int) -> Any:
    """Which of (m, n) positions are attended: cuDNN's diagonal band. Of no keys, one is not."""
    row = _positions(xp, like, m)[:, None]
    column = _positions(xp, like, max(n, 1))[None, :]
    ahead = column - row - (n - m if case.bottom_right else 0)
    keep = (ahead == ahead) & (column < n)
    if case.right is not None:
        keep = keep & (ahead <= case.right)
    if case.left is not None:
        keep = keep & (ahead > -case.left)
    return keep


def _positions(xp: Any, like: Any, size: int) -> Any:
    """0, 1, ... on the device of ``like``."""
    return xp.cumsum(xp.ones_like(like[0, 0, :1, :1].reshape(1).repeat(size)), 0) - 1


def _repeat(x: Any, heads: int) -> Any:
    """Head h of the result is head ``h // (heads / H)`` of x (H, n, D)."""
    return _module(x).stack([x[h * x.shape[0] // heads] for h in range(heads)])


def _softmax(e: _Entry, scores: Any) -> _Rows:
    """Of the kept scores and the sink."""
    low = e.xp.where(e.keep, scores, -np.inf)
    largest = e.xp.maximum(_row_max(e, low), e.sink)
    top = e.xp.where(e.alive, largest, 0.0)
    weights = e.xp.where(e.keep, e.xp.exp(low - top), 0.0)
    sink = e.xp.exp(e.sink - top)
    total = _row_sum(e, weights) + sink
    safe = e.xp.where(e.alive, total, 1.0)
    stats = e.xp.where(e.alive, top + e.xp.log(safe), -np.inf)
    return _Rows(weights / safe, sink / safe, stats, largest, total)


def _t(x: Any) -> Any:
    """The transpose within each head."""
    return x.swapaxes(-1, -2)


def _row_sum(e: _Entry, x: Any) -> Any:
    return e.xp.sum(x, -1)[..., None]


def _sum_of_rows(e: _Entry, x: Any) -> Any:
    return e.xp.sum(x, -2)[..., None]


def _row_max(e: _Entry, x: Any) -> Any:
    return e.xp.amax(x, -1)[..., None]


def _largest(x: Any) -> float:
    """The largest magnitude; NaN if any is NaN; 0 of nothing."""
    return float(abs(x).max()) if x.shape[0] else 0.0


def _module(x: Any) -> Any:
    """The library that made an array."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def _cast(x: Any, dtype: str) -> Any:
    if _module(x).__name__ == "torch":
        return x.to(getattr(_module(x), dtype))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
