"""Pointwise operations of the reference engine, where their formulas lose digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn.problem import POINTWISE


def of(name: str, *operands: Any, **numbers: float) -> Any:
    return POINTWISE[name].function(*operands, **numbers)


@given(x=st.floats(-700, 700))
def test_sigmoid_keeps_its_digits(x: float) -> None:
    """Also far from 0, and in float32, as far as that has such numbers."""
    for dtype, least, tolerance in ((np.float64, -700, 1e-14), (np.float32, -80, 1e-5)):
        if x >= least:
            with np.errstate(under="ignore", over="ignore"):
                found = of("sigmoid", np.asarray(x, dtype))
            assert found.dtype == dtype
            np.testing.assert_allclose(float(found), 1 / (1 + np.exp(-x)), rtol=tolerance)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rectifiers_of_infinities(dtype: str) -> None:
    """What is below the bound is the bound, however far, and NaN stays; above, the slope is 1."""
    x = np.array([-np.inf, -1, 0.5, np.inf, np.nan], dtype)
    assert repr(of("relu", x).tolist()) == "[0.0, 0.0, 0.5, inf, nan]"
    assert of("relu", x, upper_clip=0.25).tolist()[:4] == [0, 0, 0.25, 0.25]
    assert of("relu", x, negative_slope=0.5).tolist()[:4] == [-np.inf, -0.5, 0.5, np.inf]
    ones = np.ones_like(x)
    assert of("relu_backward", ones, x).tolist()[:4] == [0, 0, 1, 1]
    assert of("relu_backward", ones, x, upper_clip=2.0).tolist()[:4] == [0, 0, 1, 0]
