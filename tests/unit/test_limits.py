"""What 32 bits of a kernel, or the copy engine, cannot count is refused, or never asked of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dlattn
from dlattn.calls.cache import forget_calls
from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import WIDE_TILINGS, BwdSm80
from dlattn.plans.cuda import refusal
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.kernels import MOST_BLOCKS
from dlattn.plans.params import params_for
from dlattn.plans.reference import Reference
from dlattn.problem import Direction, Geometry, Padding, Problem, Scale, SoftCap, TensorSpec
from dlattn.problem.layout import FARTHEST, LONGEST, MOST_RAGGED_ELEMENTS
from dlattn.runtime.target import KNOWN

HOPPER = KNOWN["sm_90a"]
PROBLEM = Problem(
    Direction.FORWARD, data_type.HALF, 64, 64, (Scale(positive=True),), (Padding(),)
)  # fmt: skip

#: Rows of the largest tile.
OVERHANG = 256


def geometry(seq_q: int = 64, seq_kv: int = 64, batch: int = 1, heads: int = 1) -> Geometry:
    """Of tensors whose keys are the same memory over and over, so that they may be many."""
    tensors = {}
    for role in "qkvo":
        rows, step = (seq_kv, 0) if role in "kv" else (seq_q, 64)
        dim, stride = (batch, heads, rows, 64), (64 * rows * heads, 64 * rows, step, 1)
        tensors[role] = TensorSpec(role, dim, stride, data_type.HALF)
    return Geometry(tensors)


@pytest.mark.parametrize("sizes", [{"seq_kv": 2**31}, {"seq_q": LONGEST + 1}, {"batch": 2**16}])
def test_sizes_that_kernels_cannot_count(sizes: dict[str, int]) -> None:
    """They would be other numbers in a kernel's argument, or on its way to a position."""
    assert FwdSm80.supports(PROBLEM, geometry(**sizes), HOPPER) is not None
    assert FwdSm80.supports(PROBLEM, geometry(seq_kv=LONGEST), HOPPER) is None
    assert params_for(geometry(seq_kv=LONGEST)).seq_kv == LONGEST


def test_positions_and_bounds_have_32_bits() -> None:
    """The farthest bound, from the last row of a tile that overhangs the longest sequence."""
    assert LONGEST + OVERHANG + FARTHEST < 2**31 - 1
    assert -LONGEST - FARTHEST >= -(2**31)


def packed(tokens: int, row: int, columns: int = 64) -> Geometry:
    """One packed sequence, by cumulative lengths."""
    dim, stride = (1, row // columns, 2048, columns), (0, columns, row, 1)
    tensors = {role: TensorSpec(role, dim, stride, data_type.HALF, ragged=True) for role in "qkvo"}
    lengths = TensorSpec("cu", (2,), (1,), data_type.INT32)
    tensors |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    return Geometry(tensors, most_tokens_q=tokens, most_tokens_kv=tokens)


def test_ragged_tensors_that_the_copy_engine_cannot_count() -> None:
    """From 2**34 - 15 elements on they are left to the portable kernels."""
    problem, row = replace(PROBLEM, ragged=True), 2**14
    most = MOST_RAGGED_ELEMENTS // row
    assert FwdSm90.supports(problem, packed(most, row), HOPPER) is None
    reason = FwdSm90.supports(problem, packed(most + 1, row), HOPPER)
    assert reason is not None and "q may have" in reason
    assert refusal(problem, packed(most + 1, row), HOPPER, Direction.FORWARD, "any") is None
    assert FwdSm80.supports(problem, packed(most + 1, row), HOPPER) is None


def test_blocks_of_the_smallest_tiles_of_a_backward() -> None:
    """Packed sequences take as many as if all were as long as the longest: more than a grid has are
    refused, of the widest heads, whose tiles have the fewest keys, too."""
    target, batch, heads, columns = KNOWN["sm_120"], 2**16 - 1, 8, 488
    problem = Problem(
        Direction.BACKWARD, data_type.HALF, columns, 64, (Scale(positive=True), SoftCap()),
        (Padding(),), data_type.FLOAT, ragged=True,
    )  # fmt: skip
    longest = -(-MOST_BLOCKS // (batch * heads)) * WIDE_TILINGS[-1].tile_k

    def sequences(rows: int) -> Geometry:
        stride = (0, columns, heads * columns, 1)
        spec = TensorSpec("x", (batch, heads, rows, columns), stride, data_type.HALF, ragged=True)
        return Geometry({role: spec for role in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")})

    largest = BwdSm80(problem, sequences(longest - WIDE_TILINGS[-1].tile_k), target)
    assert largest.tiling == WIDE_TILINGS[-1]
    assert largest.main_kernel(largest._pairs * largest._key_tiles).grid[0] <= MOST_BLOCKS
    assert BwdSm80.supports(problem, largest.geometry, target) is None
    assert "must be below 2**31" in str(BwdSm80.supports(problem, sequences(longest), target))


def test_bounds_of_lengths_beyond_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scratch memory is for longer sequences than the tokens that there are, and windows are
    what they were."""
    seen = []
    run = Reference.execute

    def execute(self: Reference, *given: object) -> None:
        seen.append((self.geometry.seq_q, self.geometry.seq_kv))
        run(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Reference, "execute", execute)
    forget_calls()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((13, 2, 8)) for _ in range(3))
    cu = np.array([0, 5, 13], np.int32)
    results = [
        dlattn.attention(
            q, k, v, layout="thd", cu_seqlens=cu, max_seqlens=most, window=(3, 2**40), causal=True
        )
        for most in (8, 2**40)
    ]
    for most in (8, 2**30 - 2**10):
        results.append(
            dlattn.flash.mha_varlen_fwd(
                q, k, v, None, cu, cu, None, None, None, most, most, is_causal=True,
                window_size_left=3,
            )[0]
        )  # fmt: skip
    assert seen == [(8, 8), (13, 13)] * 2
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
