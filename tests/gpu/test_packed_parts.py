"""Packed sequences in the Hopper backward, where items have some heads of a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.runtime.target import cuda_target
from tests.callers import gpu_callers
from tests.flash import FlashCase
from tests.flash_check import check
from tests.gpu.test_deterministic import check_packed_reruns

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]

#: Sequences that end in any row of a tile, some without queries or keys; memory of the caller's,
#: with tokens before and behind them.
LENGTHS = (400, 20, 0, 129, 64, 0, 1, 300)
KEYS = (300, 0, 129, 1, 20, 400, 128, 64)
CASE = FlashCase(
    dtype="bfloat16", heads=8, heads_k=1, head_size=128, head_size_v=128, lens_q=LENGTHS,
    lens_k=LENGTHS, packed=True, slack=7, given=True, causal=True,
)  # fmt: skip
CASES = {
    "causal": CASE,
    "full": replace(CASE, causal=False),
    "64": replace(CASE, head_size=64, head_size_v=64),
    "64, full": replace(CASE, head_size=64, head_size_v=64, causal=False),
    "fp16, 96": replace(CASE, dtype="float16", head_size=96, head_size_v=96),
    "8 and 128": replace(CASE, head_size=8, heads=6, heads_k=2),
    "128 and 40": replace(CASE, head_size_v=40, heads=10, heads_k=2),
    "other keys": replace(CASE, lens_k=KEYS, heads=12, heads_k=3),
    "other keys, full": replace(CASE, lens_k=KEYS, causal=False, zero_tensors=True),
    "fewer keys": replace(CASE, used=True, heads=8, heads_k=2),
    "a window": replace(CASE, causal=False, left=100, right=30, lens_k=KEYS),
    "keys after": replace(CASE, causal=False, left=150, lens_k=KEYS),
    "longer than they are": replace(CASE, heads=16, more=1000),
    "in a fixed order": replace(CASE, deterministic=True),
    "in a fixed order, other keys": replace(CASE, deterministic=True, lens_k=KEYS, causal=False),
    "in a fixed order, 64": replace(CASE, deterministic=True, head_size=64, head_size_v=64),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's backward has such items")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_of_groups_add_up(case: FlashCase) -> None:
    """Gradients of keys are right, and nothing else is written, whoever computes which heads."""
    check(case, gpu_callers()[case.heads % len(gpu_callers())])


#: One long sequence among many short ones, and few heads.
LONG = replace(CASE, lens_q=(60, 3, 1500, 0, 200, 17), heads=1)
#: More pairs than have places at a time.
MANY = replace(CASE, lens_q=tuple(37 * i * i % 401 for i in range(60)), heads=3, heads_k=3)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [LONG, MANY], ids=["long", "many"])
def test_sums_in_places_and_of_their_own(
    case: FlashCase,
    causal: bool,
    deterministic: bool,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of queries are right, whether pairs take turns at places of sums or not."""
    monkeypatch.setattr(BwdSm90, "_own_sums", own)
    # Calls are kept by their problems: another slack makes another one.
    changed = {"causal": causal, "deterministic": deterministic, "slack": 8 + own}
    check(replace(case, lens_k=case.lens_q, **changed), gpu_callers()[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, heads_k", [(8, 1), (12, 4)])
def test_reruns_leave_the_same_bits(heads: int, heads_k: int, causal: bool) -> None:
    """A hundred runs in a fixed order, in which items take turns to add to sums of dK and dV."""
    check_packed_reruns(pytest.importorskip("torch"), heads, heads_k, causal)
