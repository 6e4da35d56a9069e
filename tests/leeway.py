"""How far gradients may be from the exact ones where roundings decide which derivative a user's
function has."""

from __future__ import annotations

from typing import Any

from tests.cases import Case
from tests.definition import (
    Entry,
    Tensors,
    by_entry,
    capped,
    row_sum,
    scores_of,
    softmax,
    sum_of_shared,
    transposed,
)
from tests.noise import given_shift, given_variance, roundoff


def leeway(case: Case, given: Tensors) -> dict[str, Any]:
    """The most that each element of a gradient may move when every score that lies so near to a
    kink of the function takes any derivative between those of the kink's two sides."""
    if case.score_mod is None:
        return {}
    eps, axes = roundoff(case), case.added_axes()

    def entry(e: Entry) -> dict[str, Any]:
        p = softmax(e, scores_of(case, e)[0]).p
        d_p = e.kept * case.dropout_scale() * (e.d_o @ transposed(e.v))
        d_score = abs(p * (d_p - row_sum(e, p * d_p)))
        scores, slope, _ = capped(case, e)
        off = (given_variance(case, e) ** 0.5 + given_shift(case, e)) / eps

        def moved(by: str) -> Any:
            assert e.mod is not None
            return d_score * e.mod(scores, by=by, error=off, unit=eps).jump

        product = moved("s") * abs(slope * case.scale_value)
        found = {"dQ": product @ abs(e.k), "dK": transposed(product) @ abs(e.q)}
        for name in case.mod_gradients():
            role = f"d_mod_{name}"
            found[role] = sum_of_shared(e, moved(name), axes[role])
        return found

    return by_entry(case, given, entry, "float64", dead=0.0)
