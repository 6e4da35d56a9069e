"""One key tile has all keys of its queries: an item of Hopper's backward stores their dQ itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.flash import mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd
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


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[BwdSm90]:
    """Those whose kernels are made."""
    made: list[BwdSm90] = []
    kernels = BwdSm90.kernels
    monkeypatch.setattr(BwdSm90, "kernels", lambda plan: made.append(plan) or kernels(plan))
    return made


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("case", [PACKED, PADDED], ids=["packed", "padded"])
def test_all_of_dq_is_stored(case: FlashCase, size: dict, mask: dict, plans: list[BwdSm90]) -> None:
    """Gradients are right, and zero where there are no keys, by items that relay."""
    check(replace(case, **size, **mask), gpu_callers()[0])
    assert plans and all(plan.tiling.relays for plan in plans)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, heads_k", [(2, 2), (32, 1)])
def test_divided_items(heads: int, heads_k: int, causal: bool, plans: list[BwdSm90]) -> None:
    """The same where an item has some heads of a group, or some of its queries."""
    sizes = {"heads": heads, "heads_k": heads_k, "causal": causal}
    check(replace(PADDED, lens_q=(2000,), lens_k=(100,), **sizes), gpu_callers()[0])
    check(replace(PACKED, lens_q=(2000, 3), lens_k=(100, 0), **sizes), gpu_callers()[0])
    assert all(plan.tiling.relays for plan in plans)
    assert any(plan.tiling.adds_keys for plan in plans) or (heads_k == 2 and causal)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, heads_k", [(3, 3), (48, 3)])
def test_what_is_written(heads: int, heads_k: int, causal: bool, deterministic: bool) -> None:
    """Of packed gradients, the rows of sequences alone; of padded dQ all, zeros beyond a length; if
    asked, the same bits twice. Items may be more than had places, and tiles no step of any."""
    torch = pytest.importorskip("torch")
    queries, keys, batch, gap = 300, 77, 60, 5

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, 64, device="cuda", dtype=torch.bfloat16)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    lens = [(37 * n) % 301 for n in range(batch)]
    kv_lens = [(29 * n) % 78 for n in range(batch)]
    options = {"is_causal": causal, "softmax_scale": 0.125}

    q, dO = tensor(batch, queries, heads), tensor(batch, queries, heads)
    k, v = tensor(batch, keys, heads_k), tensor(batch, keys, heads_k)
    used = {"seqused_q": integers(lens), "seqused_k": integers(kv_lens)}
    o, *_, lse = mha_fwd(q, k, v, **options, **used)[:5]
    results = []
    for _ in range(2):
        dQ = torch.full_like(q, torch.nan)
        mha_bwd(dO, q, k, v, o, lse, dQ, **options, **used, deterministic=deterministic)
        results.append(dQ)
    beyond = torch.arange(queries, device="cuda")[None] >= used["seqused_q"][:, None]
    assert (results[0][beyond] == 0).all()
    assert results[0].isfinite().all()
    assert not deterministic or torch.equal(*results)

    starts, kv_starts = ([gap + sum(of[:n]) for n in range(batch + 1)] for of in (lens, kv_lens))
    packed = integers(starts), integers(kv_starts), None, None, None, queries, keys
    q, dO = (tensor(starts[-1] + gap, heads) for _ in range(2))
    k, v = (tensor(kv_starts[-1] + gap, heads_k) for _ in range(2))
    o, *_, lse = mha_varlen_fwd(q, k, v, None, *packed, **options)[:5]
    dQ, dK, dV = (torch.full_like(x, torch.nan) for x in (q, k, v))
    starts_of = packed[0], packed[1], None, queries, keys
    mha_varlen_bwd(
        dO, q, k, v, o, lse, dQ, dK, dV, *starts_of, **options, deterministic=deterministic
    )
    for gradient in (dQ, dK, dV):
        assert gradient[:gap].isnan().all() and gradient[-gap:].isnan().all()
        assert gradient[gap:-gap].isfinite().all()
