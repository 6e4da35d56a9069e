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


def test_a_state_with_gaps_is_refused() -> None:
    """Or at an odd word: the two numbers of a state are read one behind the other."""
    q = np.zeros((1, 4, 2, 8))
    for state in (
        np.array([[11, 7777], [22, 8888]])[:, 0],
        np.broadcast_to(np.array([11]), (2,)),
        np.zeros(5, np.int32)[1:],
    ):
        with pytest.raises(dlattn.InvalidArgumentError, match="contiguous state"):
            flash.mha_fwd(q, q, q, None, None, 0.5, gen_=state)
    for state in (np.array([11, 22]), np.array([[11], [22]]), np.zeros(4, np.int32)):
        assert np.isfinite(flash.mha_fwd(q, q, q, None, None, 0.5, gen_=state)[0]).all()


def test_angles_with_gaps_are_refused() -> None:
    """Also those of one position."""
    q = np.zeros((1, 1, 2, 8), np.float32)
    angles = np.ones((1, 8), np.float32)
    given = {"k": q, "v": q, "cache_seqlens": 0}
    for wrong in ({"rotary_cos": angles[:, ::2]}, {"rotary_sin": angles[:, ::2]}):
        right = {"rotary_cos": angles[:, :4], "rotary_sin": angles[:, :4]}
        flash.flash_attn_with_kvcache(q, q.copy(), q.copy(), **given, **right)
        with pytest.raises(dlattn.InvalidArgumentError, match="expected a contiguous tensor"):
            flash.flash_attn_with_kvcache(q, q.copy(), q.copy(), **given, **{**right, **wrong})
