"""One key tile has all keys of its queries: an item of Hopper's backward stores their dQ itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.runtime.target import cuda_target
from tests.callers import gpu_callers
from tests.flash import FlashCase
from tests.flash_check import check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

#: Sequences without queries, without keys, and with more of either, whose first or last tiles of
#: queries attend to no key; memory of the caller's, with tokens before and behind them.
QUERIES = (100, 1, 0, 700, 64, 300, 129, 5)
KEYS = (128, 0, 77, 1, 64, 20, 128, 127)
PACKED = FlashCase(
    dtype="bfloat16", heads=4, heads_k=2, head_size=64, head_size_v=64, lens_q=QUERIES,
    lens_k=KEYS, packed=True, slack=7, given=True,
)  # fmt: skip
PADDED = replace(PACKED, packed=False, used=True, slack=0, lens_k=tuple(min(n, 125) for n in KEYS))
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"left": 30, "right": 10},
    "after": {"left": -1, "right": 5},
}
SIZES = {
    "64": {},
    "128": {"head_size": 128, "head_size_v": 128, "dtype": "float16"},
    "40 and 96": {"head_size": 40, "head_size_v": 96, "heads": 6, "heads_k": 6},
    "many heads": {"heads": 64, "heads_k": 4},
    "one head": {"heads": 1, "heads_k": 1, "head_size": 96, "head_size_v": 96},
    "in a fixed order": {"deterministic": True, "heads": 16, "heads_k": 1},
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's backward has such items")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("case", [PACKED, PADDED], ids=["packed", "padded"])
def test_all_of_dq_is_stored(
    case: FlashCase, size: dict, mask: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are right, and zero where there are no keys, by items that relay."""
    plans = []
    kernels = BwdSm90.kernels
    monkeypatch.setattr(BwdSm90, "kernels", lambda plan: plans.append(plan) or kernels(plan))
    check(replace(case, **size, **mask), gpu_callers()[0])
    assert plans and all(plan.tiling.relays for plan in plans)


@pytest.mark.parametrize("heads, heads_k", [(2, 2), (32, 1)])
def test_divided_items(heads: int, heads_k: int) -> None:
    """The same where an item has some heads of a group, or some of its queries."""
    alone = replace(PADDED, lens_q=(2000,), lens_k=(100,), heads=heads, heads_k=heads_k)
    check(alone, gpu_callers()[0])
    check(replace(alone, causal=True), gpu_callers()[0])
    check(replace(PACKED, lens_q=(2000, 3), lens_k=(100, 0), heads=32), gpu_callers()[0])
