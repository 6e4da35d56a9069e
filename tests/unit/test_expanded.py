"""Tensors of which many rows are one in memory, as numpy.broadcast_to and torch's expand make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn import flash

BEGIN = np.array([0, 4, 8], np.int32)

#: Of q, k, v and dout, packed.
CALLS: dict[str, Callable[..., Any]] = {
    "mha_varlen_fwd": lambda q, k, v, dout: flash.mha_varlen_fwd(
        q, k, v, None, BEGIN, BEGIN, None, None, None, 4, 4
    )[:1],
    "mha_varlen_bwd": lambda q, k, v, dout: flash.mha_varlen_bwd(
        dout, q, k, v, q, np.ones((2, 8), np.float32), None, None, None, BEGIN, BEGIN, None, 4, 4
    )[:3],
    "attention": lambda q, k, v, dout: (
        dlattn.attention(q, k, v, layout="thd", cu_seqlens=BEGIN, max_seqlens=4),
    ),
    "attention, dense": lambda q, k, v, dout: (
        dlattn.attention(*(x.reshape(2, 4, *x.shape[1:]) for x in (q, k, v))),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", range(4))
def test_rows_that_are_one_in_memory(name: str, which: int) -> None:
    """They are what a contiguous copy of them is."""
    rng = np.random.default_rng(which)
    tensors = [rng.standard_normal((8, 2, 8)).astype(np.float32) for _ in range(4)]
    tensors[which] = np.broadcast_to(tensors[which][:1], (8, 2, 8))
    copies = [np.ascontiguousarray(x) for x in tensors]
    for of, expected in zip(CALLS[name](*tensors), CALLS[name](*copies), strict=True):
        np.testing.assert_array_equal(of, expected)
