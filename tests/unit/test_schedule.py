"""The division of query tiles among persistent blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.schedule import FIXED_COST, balance, tile_costs
from dlattn.problem import Geometry, TensorSpec


@given(
    costs=st.lists(st.floats(0.5, 100), min_size=1, max_size=40),
    pairs=st.integers(1, 50),
    pairs_per_wave=st.integers(1, 60),
    blocks=st.integers(1, 200),
)
def test_every_tile_once_and_nearly_even(
    costs: list[float], pairs: int, pairs_per_wave: int, blocks: int
) -> None:
    """Each tile has one block, and no block has more than a longest tile above the mean."""
    blocks = min(blocks, len(costs) * pairs)
    table = balance(np.array(costs), pairs, pairs_per_wave, blocks)
    offsets = table[: blocks + 1]
    assert offsets[0] == blocks + 1 and offsets[-1] == len(table)
    assert sorted(table[blocks + 1 :]) == list(range(len(costs) * pairs))
    loads = [
        sum(costs[tile % len(costs)] for tile in table[first:last])
        for first, last in zip(offsets, offsets[1:], strict=False)
    ]
    assert max(loads) <= np.mean(loads) + 2 * max(costs)


@given(
    seq_q=st.integers(1, 900),
    seq_kv=st.integers(1, 900),
    left=st.none() | st.integers(1, 1000),
    right=st.none() | st.integers(0, 1000),
    bottom_right=st.booleans(),
)
def test_costs_count_the_key_tiles(
    seq_q: int, seq_kv: int, left: int | None, right: int | None, bottom_right: bool
) -> None:
    """A tile costs its key tiles from the first to the last that a query of it attends to."""

    def spec(role: str, rows: int) -> TensorSpec:
        return TensorSpec(role, (1, 1, rows, 8), (0, 0, 8, 1), data_type.HALF)

    geometry = Geometry(
        {"q": spec("q", seq_q), "k": spec("k", seq_kv)}, 1.0, left, right, bottom_right
    )
    row, column = np.arange(seq_q)[:, None], np.arange(seq_kv)[None]
    diagonal = row + (seq_kv - seq_q if bottom_right else 0)
    keep = np.ones((seq_q, seq_kv), bool)
    if left is not None:
        keep &= column + left > diagonal
    if right is not None:
        keep &= column <= diagonal + right
    costs = tile_costs(geometry, 128, 64)
    for tile, cost in enumerate(costs):
        attended = np.flatnonzero(keep[tile * 128 : (tile + 1) * 128].any(0)) // 64
        want = attended[-1] - attended[0] + 1 if len(attended) else 0
        assert cost == want + FIXED_COST
