"""How near results must be to the exact ones beside those of another kernel's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from tests import oracle, tally
from tests.cases import Case
from tests.definition import Tensors
from tests.flash import FlashCase
from tests.noise import noise

#: How many times the other's error, or what fp32 arithmetic can reach, an error may be.
FACTORS = {"o": 2.0, "dQ": 3.0, "dK": 3.0, "dV": 3.0}

#: Queries from the 128th on attend to one key each, others to none: PyTorch's dK is off by 1.2e-7.
ONE_KEY = FlashCase(
    dtype="bfloat16",
    lens_q=(193,),
    lens_k=(65,),
    packed=True,
    causal=True,
    left=0,
    right=22,
    logits=10.0,
    seed=253,
)


def check_nearness(case: Case, given: Tensors, results: Mapping[str, tuple[Any, Any]]) -> None:
    """Fails unless each largest error is at most ``FACTORS`` times the other kernel's, or times
    what :func:`arithmetic` can reach, and half the grain of the result's type about its largest.

    Both kernels round P and dS, of one log-sum-exp and one output, to the same 16 bits, and sum in
    fp32, each in an order of its own: their errors are alike wherever the former are errors. They
    are none where each row attends to one key, as of a window of (0, 0): P is 1, o a row of v, and
    dP - delta, two sums of the same products, 0 but for their orders. The other's error is then
    what its order happens to leave, or nothing. So an error counts from what any order may leave,
    which is hundreds of times less than what a unit in the last place of P does.

    Args:
        given: q, k, v and dO, in the case's type.
        results: role -> this library's and the other's, (B, H, S, D).
    """
    exact = oracle.exact(case, given)
    sigma = arithmetic(case, given, exact)
    for role, found in results.items():
        want = exact[role]
        error, other = (float(abs(x.astype(np.float64) - want).max(initial=0.0)) for x in found)
        reach = 3**0.5 * float(sigma[role].max(initial=0.0))
        allowed = FACTORS[role] * max(other, reach) + _half_grain(case, want)
        tally.measure(f"{role} of allowed", error / allowed)
        assert error <= allowed, (
            f"{role}: error {error:.3e}, allowed {allowed:.3e} (the other errs by {other:.3e}, "
            f"fp32 reaches {reach:.3e}); {case!r}"
        )


def arithmetic(case: Case, given: Tensors, exact: Tensors) -> dict[str, Any]:
    """:func:`tests.noise.noise` without roundings to 16 bits: of the same numbers, as if the
    case's type were that which sums have."""
    return noise(replace(case, dtype="float32"), given, exact)


def _half_grain(case: Case, want: Any) -> float:
    """The most that rounding the largest result moves it."""
    info = ml_dtypes.finfo(case.dtype)
    largest = float(abs(want).max(initial=0.0))
    exponent = math.frexp(largest)[1] - 1  # the power of two below it
    grain = math.ldexp(float(info.eps), exponent) if largest else 0.0
    return max(grain, float(info.smallest_subnormal)) / 2
