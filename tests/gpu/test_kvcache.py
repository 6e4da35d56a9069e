"""``flash_attn_with_kvcache`` on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dlattn.flash import flash_attn_with_kvcache
from tests.callers import gpu_callers
from tests.flash_strategies import cache_cases
from tests.kvcache import SMALL, CacheCase, check_cache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_what_it_launches")]


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    """Every way to lay a cache out, once."""
    for caller in gpu_callers():
        check_cache(SMALL[name], caller)


@settings(settings.get_profile("gpu"))
@given(cache_cases("gpu"))
def test_random(case: CacheCase) -> None:
    """Outputs and caches are right."""
    check_cache(case, gpu_callers()[case.seed % len(gpu_callers())])


def test_beyond_the_cache() -> None:
    """Tokens without a row, and pages that there are not, are not written; nothing else is."""
    caller = gpu_callers()[0]
    rng = np.random.default_rng(0)
    cache = [rng.normal(size=(4, 16, 2, 64)).astype(np.float16) for _ in "kv"]
    q, k, v = (rng.normal(size=(3, 4, 2, 64)).astype(np.float16) for _ in range(3))
    table = np.array([[0, 1], [2, -1], [3, 2**30]], np.int32)
    lengths = np.array([30, 14, -5], np.int32)  # of 32 rows; into no page; taken for 0
    held = [caller.tensor(x) for x in cache]
    flash_attn_with_kvcache(
        *map(caller.tensor, (q,)), *held, *map(caller.tensor, (k, v)),
        cache_seqlens=caller.tensor(lengths), block_table=caller.tensor(table), causal=True,
    )  # fmt: skip
    for before, after, new in zip(cache, held, (k, v), strict=True):
        before[1, 14:] = new[0, :2]
        before[2, 14:] = new[1, :2]
        before[3, :4] = new[2]
        assert (caller.host(after) == before).all()


def test_cuda_graph() -> None:
    """A captured step appends behind what the lengths on the device say at each replay."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch on CUDA")
    k_cache, v_cache = torch.zeros(2, 2, 64, 2, 64, device="cuda", dtype=torch.half)
    q = torch.randn(2, 1, 8, 64, device="cuda").half()
    k, v = torch.zeros(2, 2, 1, 2, 64, device="cuda", dtype=torch.half)
    cached = torch.zeros(2, device="cuda", dtype=torch.int32)

    def step() -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cached, causal=True)

    step()  # compiles, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for n in range(4):
        cached.fill_(n)
        k.normal_()
        v.normal_()
        graph.replay()
        assert (k_cache[:, n] == k[:, 0]).all() and not k_cache[:, n + 1 :].any()
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k_cache[:, : n + 1], v_cache[:, : n + 1])),
            enable_gqa=True,
        )
        torch.testing.assert_close(o.float().transpose(1, 2), want, atol=5e-3, rtol=3e-3)
