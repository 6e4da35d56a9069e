"""Near a kink of a function of scores, either derivative is right; elsewhere, one is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import oracle
from tests.builders import make_tensors
from tests.cases import Case
from tests.leeway import leeway
from tests.libraries import Library

RELU = ("relu", "s")
#: The same function; where the score is 0, its derivative is 1.
OTHER_RELU = ("add", "s", ("relu", ("neg", "s")))

#: Many scores are 0, some of them as sums of other products than zeros.
CASE = Case(
    dtype="float32", heads_q=2, seq_q=20, seq_kv=30, head_dim_qk=16, scale=0.5,
    score_mod=(RELU, None), numbers="sparse",
)  # fmt: skip


def arrays(case: Case) -> dict[str, Any]:
    return {role: t.tensor for role, t in make_tensors(case, Library()).items()}


def gradients(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    exact = oracle.exact(case, given)
    return {role: exact[role].astype("float32") for role in ("dQ", "dK")}


def test_either_derivative_at_a_kink() -> None:
    """Of a score that roundings may put on either side of a kink, both derivatives are right, but
    not what lies beyond them."""
    given = arrays(CASE)
    mine, free = gradients(CASE, given), leeway(CASE, given)
    other = gradients(replace(CASE, score_mod=(OTHER_RELU, None)), given)
    for role in mine:
        moved = (other[role] - mine[role]).clip(-free[role], free[role])
        assert abs(moved).max() > 1e-2
        for share in (0, 0.5, 1):
            oracle.assert_close(CASE, given, {role: mine[role] + share * moved})
        with pytest.raises(AssertionError, match=f"{role}: error"):
            oracle.assert_close(CASE, given, {role: mine[role] + 1.1 * free[role]})


def test_a_score_of_zeros_has_one_derivative() -> None:
    """No rounding moves a sum of zeros: the convention holds."""
    given = arrays(CASE)
    for role in "qk":
        given[role][...] = 0
    assert not leeway(CASE, given)["dQ"].any()


@pytest.mark.parametrize("tree", [RELU, ("abs", "s"), ("max", ("mul", "s", 0.5), ("sin", "s"))])
def test_no_leeway_elsewhere(tree: Any) -> None:
    """Scores that are not near a kink give none."""
    case = replace(CASE, numbers="normal", score_mod=(tree, None))
    free = leeway(case, arrays(case))
    assert not any(free[role].any() for role in ("dQ", "dK"))
