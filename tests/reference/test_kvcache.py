"""``flash_attn_with_kvcache`` on the CPU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.callers import Caller
from tests.kvcache import CacheCase, check_cache
from tests.strategies import cache_cases


@settings(max_examples=300)
@given(cache_cases())
def test_numpy(case: CacheCase) -> None:
    """Of NumPy arrays, outputs and caches are right."""
    check_cache(case, Caller("numpy"))


@settings(max_examples=100)
@given(cache_cases())
def test_torch(case: CacheCase) -> None:
    """Of torch tensors, outputs and caches are right."""
    pytest.importorskip("torch")
    check_cache(case, Caller("torch"))
