"""Packed sequences in the Hopper backward, where items have some heads of a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlattn.calls.cache import forget_calls
from dlattn.flash import mha_varlen_bwd, mha_varlen_fwd
from dlattn.plans import bwd_division
from dlattn.runtime.target import cuda_target
from tests.callers import gpu_callers
from tests.flash import FlashCase
from tests.flash_check import check

pytestmark = pytest.mark.gpu

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
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups are divided while a test runs."""
    if cuda_target(0).capability != (9, 0):
        pytest.skip("only Hopper's backward has such items")
    monkeypatch.setattr(bwd_division, "DIVIDES_RAGGED", True)
    forget_calls()
    yield
    forget_calls()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_of_groups_add_up(case: FlashCase) -> None:
    """Gradients of keys are right, and nothing else is written, whoever computes which heads."""
    check(case, gpu_callers()[case.heads % len(gpu_callers())])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, heads_k", [(8, 1), (12, 4)])
def test_reruns_leave_the_same_bits(heads: int, heads_k: int, causal: bool) -> None:
    """A hundred runs in a fixed order, in which items take turns to add to sums of dK and dV."""
    torch = pytest.importorskip("torch")
    lengths = torch.tensor([0, *(1100, 20, 700, 0, 300, 64, 1000, 129) * 4], device="cuda")
    starts, longest = lengths.cumsum(0).int(), int(lengths.max())
    q, dout, k, v = (
        torch.randn(int(starts[-1]), n, 128, device="cuda", dtype=torch.bfloat16)
        for n in (heads, heads, heads_k, heads_k)
    )
    masks = {"softmax_scale": 128**-0.5, "is_causal": causal}
    sizes = (starts, starts, None, None, None, longest, longest)
    out, *_, lse = mha_varlen_fwd(q, k, v, None, *sizes, **masks)[:5]
    sizes = (starts, starts, None, longest, longest)
    first = None
    for _ in range(100):
        gradients = mha_varlen_bwd(
            dout, q, k, v, out, lse, None, None, None, *sizes, **masks, deterministic=True
        )[:3]
        first = first or gradients
        for gradient, before in zip(gradients, first, strict=True):
            assert torch.equal(gradient, before)
