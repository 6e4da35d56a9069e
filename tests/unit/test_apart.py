"""Memory for results is refused where it is another tensor's, by every call, like the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn.calls.cache import forget_calls
from dlattn.errors import InvalidArgumentError
from dlattn.flash import (
    flash_attn_with_kvcache,
    mha_bwd,
    mha_fwd,
    mha_varlen_bwd,
    mha_varlen_fwd,
)

CU = np.array([0, 3, 4], np.int32)

#: Calls of tensors by name, of those that are rows.
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v, out: dlattn.attention(q, k, v, out=out),
    "attention_backward": lambda q, k, v, dout, o, lse, dq, dk, dv: dlattn.attention_backward(
        dout, q, k, v, o, lse, dq=dq, dk=dk, dv=dv
    ),
    "mha_fwd": lambda q, k, v, out: mha_fwd(q, k, v, out),
    "mha_bwd": lambda q, k, v, dout, o, lse, dq, dk, dv: mha_bwd(dout, q, k, v, o, lse, dq, dk, dv),
    "mha_varlen_fwd": lambda q, k, v, out: mha_varlen_fwd(
        q[0], k[0], v[0], out[0], CU, CU, None, None, None, 4, 4
    ),
    "mha_varlen_bwd": lambda q, k, v, dout, o, lse, dq, dk, dv: mha_varlen_bwd(
        *(x[0] for x in (dout, q, k, v, o, lse, dq, dk, dv)), CU, CU, None, 4, 4
    ),
    "flash_attn_with_kvcache": lambda q, k, v, out: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=4, out=out
    ),
}
RESULTS = ("out", "dq", "dk", "dv")


def tensors(name: str, columns: int) -> dict[str, Any]:
    """Random ones, each in memory of its own."""
    names = CALLS[name].__code__.co_varnames
    made = {it: np.random.default_rng(1).normal(size=(1, 4, 2, columns)) for it in names}
    if "lse" in made:
        dtype = np.float64 if name == "attention_backward" else np.float32
        made["lse"] = np.zeros((1, 2, 4), dtype)
    return made


@pytest.mark.parametrize("columns", [8, 6])
@pytest.mark.parametrize("name", CALLS)
def test_memory_of_another_tensor_is_refused(name: str, columns: int) -> None:
    """It is, whether or not a call of such tensors went before, and nothing is written; head sizes
    that FlashAttention's functions pad are no exception."""
    call, right = CALLS[name], tensors(name, columns)
    pairs = [
        (result, other)
        for result in right.keys() & set(RESULTS)
        for other in right
        if other not in (result, "lse")
    ]
    for result, other in pairs:
        wrong = tensors(name, columns)
        wrong[result] = wrong[other]
        before = {it: x.copy() for it, x in wrong.items()}
        for went_before in (False, True):
            forget_calls()
            if went_before:
                call(**right)
            with pytest.raises(InvalidArgumentError, match="it begins where"):
                call(**wrong)
            assert all((x == before[it]).all() for it, x in wrong.items())


def test_memory_without_elements_is_nobodys() -> None:
    """Results without elements may begin anywhere, and inputs may be one tensor."""
    q, k = np.zeros((1, 4, 2, 8)), np.zeros((1, 0, 2, 8))
    lse = np.zeros((1, 2, 4))
    for _ in range(2):
        memory = np.zeros((1, 0, 2, 8))
        given = dlattn.attention_backward(q, q, k, k, q, lse, dk=memory, dv=memory)
        assert given.dk is given.dv is memory and not given.dq.any()
