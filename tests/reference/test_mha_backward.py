"""Backwards of attention written as primitive operations, on the CPU."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from tests.callers import Caller
from tests.mha import Mha
from tests.mha_backward import MhaBackward, check_backward, check_backward_meaning
from tests.primitive_strategies import backwards
from tests.reference.test_mha import SUBSETS


@pytest.mark.parametrize("late", [False, True])
def test_every_subset(late: bool) -> None:
    """Every subset of the parts gives what ``sdpa_backward`` of it gives, and is what it says."""
    for parts, bottom_right in product(SUBSETS, (False, True)):
        by = "transpose" if bottom_right else "reshape"
        for dtype, check in (("float32", check_backward), ("float64", check_backward_meaning)):
            of = Mha(dtype=dtype, bottom_right=bottom_right, **parts)
            check(MhaBackward(of, late=late, by=by, d_bias=True, again=late), Caller("numpy"))


@settings(max_examples=300)
@given(backwards())
def test_numpy(case: MhaBackward) -> None:
    """Primitives are lowered to the problem of ``sdpa_backward``, and give its very bits."""
    check_backward(case, Caller("numpy"))


@settings(max_examples=50)
@given(backwards())
def test_torch(case: MhaBackward) -> None:
    """So do those of torch tensors."""
    pytest.importorskip("torch")
    check_backward(case, Caller("torch"))


@settings(max_examples=300)
@given(backwards(dtype="float64"))
def test_meaning(case: MhaBackward) -> None:
    """What is found is what the operations mean: one by one they give the same."""
    check_backward_meaning(case, Caller("numpy"))
