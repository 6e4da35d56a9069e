"""Attention written as primitive operations, on the CPU."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from tests.callers import Caller
from tests.mha import Mha
from tests.mha_checks import check_meaning, check_mha
from tests.primitive_strategies import mhas

#: Every subset of the optional parts of cuDNN's Mha-fprop.
PARTS = {
    "scale": (None, "scores"),
    "padding": ("", "qk"),
    "causal": (None, 0),
    "mask": (False, True),
    "bias": (None, (True, True, True, True)),
    "dropout": (None, "rng"),
}
SUBSETS = [dict(zip(PARTS, chosen, strict=True)) for chosen in product(*PARTS.values())]
#: Which parts there are in each.
NAMES = [
    "-".join(name for name, part in parts.items() if part != PARTS[name][0]) for parts in SUBSETS
]


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("softmax", ["primitives", "node"])
def test_every_subset(softmax: str, bottom_right: bool) -> None:
    """Every subset of the parts gives what ``sdpa`` of it gives, and is what it says."""
    for parts in SUBSETS:
        case = Mha(softmax=softmax, bottom_right=bottom_right, stats=True, **parts)
        check_mha(case, Caller("numpy"))
        check_meaning(
            Mha(dtype="float64", softmax=softmax, bottom_right=bottom_right, stats=True, **parts),
            Caller("numpy"),
        )


@settings(max_examples=300)
@given(mhas())
def test_numpy(case: Mha) -> None:
    """Primitives are lowered to the problem of ``sdpa``, and give its very bits."""
    check_mha(case, Caller("numpy"))


@settings(max_examples=50)
@given(mhas())
def test_torch(case: Mha) -> None:
    """So do those of torch tensors."""
    pytest.importorskip("torch")
    check_mha(case, Caller("torch"))


@settings(max_examples=300)
@given(mhas(dtype="float64", stats=True))
def test_meaning(case: Mha) -> None:
    """What is found is what the operations mean: one by one they give the same."""
    check_meaning(case, Caller("numpy"))
