"""Beside a kernel that is exact by luck, fp32's own errors are none, and a bfloat16 ulp is one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import oracle
from tests.callers import Caller
from tests.flash import FlashCall, FlashCase
from tests.flash_check import given_arrays
from tests.nearness import ONE_KEY, arithmetic, check_nearness

BF16 = ml_dtypes.bfloat16


def given(case: FlashCase) -> Any:
    return given_arrays(FlashCall(case, Caller("numpy")).arrays)


def by_hand(p: float = 1.0, o_by: float = 1.0, short: bool = False, backwards: bool = True) -> Any:
    """Results of :data:`ONE_KEY` as a kernel computes them, in fp32.

    Args:
        p: each probability.
        o_by: what o is multiplied by before the backward reads it.
        short: dP is rounded to bfloat16 before delta is subtracted.
        backwards: delta's products are added in the other order than those of dP.
    """
    q, k, v, d_o = (given(ONE_KEY)[role].astype(np.float32) for role in ("q", "k", "v", "dO"))
    q, d_o = q[:, :, 128:], d_o[:, :, 128:]

    def total(products: Any) -> Any:
        return np.add.accumulate(products, -1, dtype=np.float32)[..., -1:]

    o = (p * v).astype(BF16)
    d_p = total(d_o * v)
    delta = d_o * (o_by * o.astype(np.float32)).astype(BF16).astype(np.float32)
    delta = total(delta[..., ::-1] if backwards else delta)
    d_s = np.float32(8**-0.5) * ((d_p.astype(BF16).astype(np.float32) if short else d_p) - delta)
    none = np.zeros((1, 1, 128, 8), BF16)
    return {
        "o": np.concatenate((none, o), 2),
        "dQ": np.concatenate((none, (d_s * k).astype(BF16)), 2),
        "dK": (d_s * q).astype(BF16),
        "dV": (p * d_o).astype(BF16),
    }


def beside(mine: Any, theirs: Any, *roles: str) -> None:
    check_nearness(
        ONE_KEY.as_case(), given(ONE_KEY), {role: (mine[role], theirs[role]) for role in roles}
    )


def test_orders_of_addition_are_no_error() -> None:
    """dP - delta is 0 in one order and not in another; both are right, however near to 0 one is."""
    exact, other = by_hand(backwards=False), by_hand()
    assert abs(exact["dK"]).max() == 0 < abs(other["dK"]).max() < 1e-4
    beside(other, exact, "o", "dQ", "dK", "dV")


@pytest.mark.parametrize("p", [1 + 2**-7, 1 - 2**-8])
def test_an_ulp_of_a_probability_is_one(p: float) -> None:
    """Probabilities that are the next numbers of bfloat16 fail in o and in dV; outputs that much
    off, where the backward reads them, in dQ and dK."""
    right = by_hand(backwards=False)
    for role in ("o", "dV"):
        with pytest.raises(AssertionError, match=f"^{role}: error"):
            beside(by_hand(p=p), right, role)
    for role in ("dQ", "dK"):
        with pytest.raises(AssertionError, match=f"^{role}: error"):
            beside(by_hand(o_by=p), right, role)


def test_a_rounding_that_is_not_due_is_one() -> None:
    """dP rounded to bfloat16 fails in dQ and dK."""
    for role in ("dQ", "dK"):
        with pytest.raises(AssertionError, match=f"^{role}: error"):
            beside(by_hand(short=True), by_hand(backwards=False), role)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits", [0.01, 1.0, 10.0])
def test_among_many_keys_it_adds_nothing(dtype: str, logits: float) -> None:
    """Where 16-bit roundings are errors, a computation with them errs by more than fp32 reaches, so
    that the other kernel's error alone is what counts."""
    case = FlashCase(
        dtype=dtype,
        head_size=64,
        head_size_v=64,
        lens_q=(70,),
        lens_k=(130,),
        packed=True,
        logits=logits,
        seed=1,
    )
    as_case, arrays = case.as_case(), given(case)
    exact = oracle.exact(as_case, arrays)
    plain, sigma = oracle.rounded(as_case, arrays), arithmetic(as_case, arrays, exact)
    for role in ("o", "dQ", "dK", "dV"):
        error = abs(plain[role].astype(np.float64) - exact[role]).max()
        assert 3**0.5 * sigma[role].max() < error
