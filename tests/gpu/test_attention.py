"""``dlattn.attention`` on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

import dlattn
from dlattn.one_call.forward import _CALLS
from dlattn.runtime import jit
from tests.calls import (
    check_added_mask,
    check_attention,
    check_full_pages,
    check_huge_scores,
    check_pages,
)
from tests.cases import Case
from tests.drivers import gpu_library
from tests.states import to_numpy
from tests.strategies import call_cases

pytestmark = pytest.mark.gpu


@settings(settings.get_profile("gpu"))
@given(call_cases("gpu"))
def test_random(case: Case) -> None:
    """A call is right for every case, and writes nothing but its outputs."""
    check_attention(case, gpu_library())


def tensors(*shape: int) -> list[Any]:
    library = gpu_library()
    return [library.cast(library.normal(shape, seed), "bfloat16") for seed in range(3)]


def test_split_keys_merge() -> None:
    """Attention over parts of the keys, merged, is attention over all of them."""
    q, k, v = tensors(2, 300, 4, 128)
    o, lse = dlattn.attention(q, k, v, return_lse=True)
    parts = [
        dlattn.attention(q, k[:, some], v[:, some], return_lse=True)
        for some in (slice(0, 77), slice(77, 300))
    ]
    merged, sums = dlattn.merge_states(*parts[0], *parts[1])
    assert abs(to_numpy(merged) - to_numpy(o)).max() < 2e-2
    assert abs(to_numpy(sums) - to_numpy(lse)).max() < 1e-4


def test_packed_sequences() -> None:
    """Packed sequences give what each gives alone."""
    q, k, v = tensors(500, 4, 64)
    ends = (0, 100, 100, 351, 500)
    cu = gpu_library().values(ends, "int32")
    o, lse = dlattn.attention(q, k, v, layout="thd", cu_seqlens=cu, causal=True, return_lse=True)
    for first, end in zip(ends, ends[1:], strict=False):
        if first == end:
            continue
        own = slice(first, end)
        alone, sums = dlattn.attention(
            q[None, own], k[None, own], v[None, own], causal=True, return_lse=True
        )
        assert abs(to_numpy(o[own]) - to_numpy(alone[0])).max() < 1e-2
        assert abs(to_numpy(lse[:, own]) - to_numpy(sums[0])).max() < 1e-4


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_keys_in_pages(layout: str, page: int) -> None:
    """Keys and values in pages give what they give in one piece."""
    check_pages(layout, gpu_library(), "bfloat16", page)
    check_full_pages(gpu_library(), "bfloat16", page)


def test_a_second_call_compiles_nothing() -> None:
    """A call like an earlier one finds its plan, one of another size its kernels."""
    q, k, v = tensors(2, 200, 4, 128)
    dlattn.attention(q, k, v, causal=True)
    kept, compiled = len(_CALLS), jit.statistics.compiles
    dlattn.attention(q, k, v, causal=True)
    assert len(_CALLS) == kept
    dlattn.attention(q[:1], k[:1, :100], v[:1, :100], causal=True)
    assert jit.statistics.compiles == compiled


@pytest.mark.parametrize("engine", ["sm90", "sm80", "best"])
@pytest.mark.parametrize("low", [-1e4, -1e9, -1e10, -1e20])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_added_masks(dtype: str, low: float, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number far below all scores masks keys, however far; few queries are decoded."""
    if engine != "best":
        monkeypatch.setenv("DLATTN_ENGINE", engine)
    for seq_q in (3, 150) if engine == "best" else (150,):
        for dim in (64, 128):
            check_added_mask(gpu_library(), dtype, low, seq_q, dim)


@pytest.mark.parametrize("engine", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_huge_scores(dtype: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of huge scores are inexact; probabilities made of them are finite all the same."""
    monkeypatch.setenv("DLATTN_ENGINE", engine)
    check_huge_scores(gpu_library(), dtype)
