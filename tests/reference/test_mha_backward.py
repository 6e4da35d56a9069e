"""Backwards of attention written as primitive operations, on the CPU."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.callers import Caller
from tests.mha import Mha
from tests.mha_backward import (
    MhaBackward,
    Primitives,
    check_backward,
    check_backward_meaning,
)
from tests.mha_bprop import Bprop, Change, check_bprop, check_change
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


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_every_subset_of_bprop(dtype: str) -> None:
    """A forward leaves in S what the backward of every subset of the parts needs."""
    for parts, late in product(SUBSETS, (False, True)):
        of = Mha(dtype=dtype, stats=late, **parts)
        check_bprop(MhaBackward(of, late=late, d_bias=True, again=late), Caller("numpy"))


@settings(max_examples=300)
@given(backwards(dtype="float64"))
def test_bprop(case: MhaBackward) -> None:
    """And of any attention."""
    check_bprop(case, Caller("numpy"))


@pytest.mark.parametrize("form", [Primitives, Bprop])
@settings(max_examples=600)
@given(
    case=backwards(dtype="float64"),
    kind=st.sampled_from(("scaled", "negated", "dropped", "other", "swapped")),
    number=st.integers(0, 30),
)
def test_one_node_wrong(form: type[Primitives], case: MhaBackward, kind: str, number: int) -> None:
    """What is found in a graph of which one node is wrong is what its operations mean."""
    check_change(case, form, lambda: Change(kind, number))


#: All tensors have shapes that fit each other.
_SQUARE = {
    **{"dtype": "float64", "heads_q": 2, "heads_k": 2, "heads_v": 2},
    **{"seq_q": 8, "seq_kv": 8, "head_dim_qk": 8, "head_dim_v": 8},
}


@pytest.mark.parametrize("form", [Primitives, Bprop])
@settings(max_examples=600)
@given(case=backwards(**_SQUARE), number=st.integers(1, 30), which=st.integers(0, 99))
def test_one_operand_wrong(
    form: type[Primitives], case: MhaBackward, number: int, which: int
) -> None:
    """And of which one operand is that of another node."""
    check_change(case, form, lambda: Change("rewired", number, which))
