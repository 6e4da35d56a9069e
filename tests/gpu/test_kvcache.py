"""``flash_attn_with_kvcache`` on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from dlattn.flash import flash_attn_with_kvcache
from tests.callers import gpu_callers
from tests.kvcache import SMALL, CacheCase, check_cache
from tests.strategies import cache_cases

pytestmark = pytest.mark.gpu


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
