"""The division of query tiles among persistent blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.fwd_sm90_shares import shared_by_heads
from dlattn.plans.fwd_sm90_tiles import TileHeads
from dlattn.plans.fwd_sm90_tiling import tilings
from dlattn.plans.schedule import (
    ALL_KEYS,
    EMPTY_COST,
    FIXED_COST,
    LEAST_PART,
    Array,
    balance,
    band_sharing_blocks,
    sharing_blocks,
    table,
    tile_costs,
    visited_keys,
)
from dlattn.problem import (
    Bias,
    BlockMask,
    Direction,
    Geometry,
    Padding,
    Problem,
    Scale,
    TensorSpec,
)
from dlattn.runtime.target import KNOWN


@given(
    costs=st.lists(st.floats(0.5, 100), min_size=1, max_size=40),
    heads=st.integers(1, 9),
    batch=st.integers(1, 6),
    pairs_per_wave=st.integers(1, 60),
    blocks=st.integers(1, 200),
    heads_per_tile=st.integers(1, 4),
    alternates=st.booleans(),
)
def test_every_tile_once_and_nearly_even(
    costs: list[float],
    heads: int,
    batch: int,
    pairs_per_wave: int,
    blocks: int,
    heads_per_tile: int,
    alternates: bool,
) -> None:
    """Each tile has one block, each block a tile, and none has much more than the mean. Every other
    tile of a block ascends, or none."""
    blocks = min(blocks, len(costs) * heads * batch)
    first_heads = range(0, heads * heads_per_tile, heads_per_tile)
    rows = table(
        np.array(costs), np.array(first_heads), batch, pairs_per_wave, blocks, alternates=alternates
    )
    taken = rows_of_blocks(rows, blocks)
    assert {tuple(row[4:7]) for own in taken for row in own} == {ALL_KEYS}
    everything = product(range(len(costs)), first_heads, range(batch))
    assert sorted(tuple(row[:3]) for own in taken for row in own) == sorted(everything)
    loads = [sum(costs[row[0]] for row in own) for own in taken]
    assert max(loads) <= np.mean(loads) + 2 * max(costs)
    for own in taken:
        ups = [int(row[7]) for row in own]
        assert ups == [(turn + 1) % 2 if alternates else 0 for turn in range(len(own))]


def rows_of_blocks(rows: Array, blocks: int) -> list[list[Array]]:
    """The query tiles that each block takes, as the kernel reads them."""
    rows = rows.reshape(-1, 8)
    seconds = rows[: blocks + 1, 3]
    assert (seconds[0], seconds[-1]) == (blocks + 1, len(rows)) and (np.diff(seconds) >= 0).all()
    return [
        [rows[block], *rows[first:last]]
        for block, (first, last) in enumerate(zip(seconds, seconds[1:], strict=False))
    ]


@given(
    tiles=st.integers(1, 40),
    pairs=st.integers(1, 9),
    keys=st.integers(1, 20000),
    tile_k=st.sampled_from((32, 64, 96, 128)),
    multiprocessors=st.integers(1, 150),
)
def test_parts_of_keys_meet(
    tiles: int, pairs: int, keys: int, tile_k: int, multiprocessors: int
) -> None:
    """Where blocks share keys, each key tile of each query tile is visited once, blocks visit
    nearly as many, and who has the last part waits for those that the blocks just before leave
    first."""
    blocks, key_tiles = sharing_blocks(tiles * pairs, keys, multiprocessors), -(-keys // tile_k)
    assume(blocks)
    assert blocks <= multiprocessors
    visited = np.zeros(tiles, int), np.full(tiles, key_tiles)
    rows = table(np.ones(tiles), np.arange(pairs), 1, 3, blocks, shared_keys=visited)
    check_parts(rows_of_blocks(rows, blocks), pairs, *visited)


def test_few_tiles_have_as_many_blocks_each() -> None:
    """A block then has no more than one part, unless that leaves much of the GPU without one."""
    assert sharing_blocks(32, 16384, 132) == 4 * 32
    assert sharing_blocks(16, 4096, 132) == 8 * 16
    # A part would be a whole tile; or a third of one, where all multiprocessors have less.
    assert sharing_blocks(70, 16384, 132) == sharing_blocks(45, 2**20, 132) == 132


@given(
    keys=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=2, max_size=40),
    pairs=st.integers(1, 9),
    blocks=st.integers(1, 150),
)
def test_parts_of_different_keys_meet(keys: list[tuple[int, int]], pairs: int, blocks: int) -> None:
    """The same where each query tile has keys of its own, and all are shared."""
    begin, count = np.array(keys).T
    assume(np.ptp(begin) or np.ptp(begin + count))
    blocks = min(blocks, pairs * int(count.sum()))
    visited = begin, begin + count
    rows = table(tile_costs(*visited), np.arange(pairs), 1, 3, blocks, shared_keys=visited)
    check_parts(rows_of_blocks(rows, blocks), pairs, *visited)


def check_parts(taken: list[list[Array]], pairs: int, begin: Array, end: Array) -> None:
    """What blocks take, of query tiles that visit the key tiles from ``begin`` to ``end``."""
    parts: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
    visited = []
    for block, rows in enumerate(taken):
        own = []
        for row in rows:
            first, last = begin[row[0]], end[row[0]]
            own.append((max(int(row[4]), first), min(int(row[5]), last), int(row[6])))
        visited.append(sum(last - first for first, last, _ in own))
        left, added = ([number * sign > 0 for *_, number in own] for sign in (-1, 1))
        assert sum(left) <= 1 and added == sorted(added)
        for row, of_row in zip(rows, own, strict=True):
            parts.setdefault(tuple(map(int, row[:3])), []).append((block, *of_row))
    assert max(visited) - min(visited) <= 1 and len(parts) == len(begin) * pairs
    for (tile, *_), of_tile in parts.items():
        assert (of_tile[0][1], of_tile[-1][2]) == (begin[tile], end[tile])
        assert all(a[2] == b[1] and a[0] + 1 == b[0] for a, b in pairwise(of_tile))
        before = len(of_tile) - 1
        assert [part[3] for part in of_tile] == [-1] * before + [before]


@given(
    costs=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    pairs=st.integers(1, 40),
    multiprocessors=st.integers(1, 150),
)
def test_bands_are_shared_where_that_is_shorter(
    costs: list[int], pairs: int, multiprocessors: int
) -> None:
    """Blocks share keys only if none is at work for as long as the one with the most whole tiles,
    and each has the keys of a part that is worth it."""
    whole = np.array(costs) + FIXED_COST
    blocks = band_sharing_blocks(whole, pairs, 128, multiprocessors)
    assume(blocks)
    each = pairs * sum(costs) / blocks
    owner, _ = balance(whole, pairs, pairs, min(pairs * len(costs), multiprocessors))
    assert each < np.bincount(owner, np.tile(whole, pairs)).max()
    assert blocks <= multiprocessors and 128 * each >= LEAST_PART


@given(pairs=st.integers(1, 60), pairs_per_wave=st.integers(1, 60))
def test_a_block_finishes_a_wave_before_the_next(pairs: int, pairs_per_wave: int) -> None:
    """A block takes pairs wave by wave, no wave is larger than asked for, longest tiles first."""
    costs = np.array([1.0, 2.0, 3.0])
    owner, order = balance(costs, pairs, pairs_per_wave, 2)
    waves = -(-pairs // pairs_per_wave)
    wave = np.arange(pairs) * waves // pairs
    assert np.bincount(wave).max() <= pairs_per_wave
    for block in range(2):
        own = [int(tile) for tile in order if owner[tile] == block]
        keys = [(wave[tile // 3], -costs[tile % 3]) for tile in own]
        assert keys == sorted(keys)


@given(
    seq_q=st.integers(1, 900),
    seq_kv=st.integers(1, 900),
    left=st.none() | st.integers(1, 1000),
    right=st.none() | st.integers(0, 1000),
    bottom_right=st.booleans(),
    missing=st.sampled_from((0, 64)),
)
def test_costs_count_the_key_tiles(
    seq_q: int, seq_kv: int, left: int | None, right: int | None, bottom_right: bool, missing: int
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
    begin, end = visited_keys(geometry, 128, 64, missing)
    for tile, cost in enumerate(tile_costs(begin, end)):
        first = tile * 128 - missing
        attended = np.flatnonzero(keep[max(first, 0) : first + 128].any(0)) // 64
        want = attended[-1] - attended[0] + 1 if len(attended) else 0
        assert not want or (begin[tile], end[tile]) == (attended[0], attended[-1] + 1)
        assert cost == (want + FIXED_COST if want else EMPTY_COST)


@pytest.mark.parametrize(
    "batch, heads_q, heads_k, seq_q, heads",
    [
        (9, 32, 4, 64, TileHeads(3, 1)),
        (9, 32, 4, 17, TileHeads(4, 2)),
        (9, 32, 4, 65, TileHeads(4, 4)),
        (9, 32, 32, 64, TileHeads()),
        (8, 32, 4, 64, TileHeads(2, 1)),
        (4, 32, 4, 64, TileHeads()),
    ],
)
def test_heads_that_share_keys_share_tiles(
    batch: int, heads_q: int, heads_k: int, seq_q: int, heads: TileHeads
) -> None:
    """If those of one head leave some of their rows empty, and blocks then have fewer each."""

    def spec(role: str, heads: int, rows: int) -> TensorSpec:
        size = (batch, heads, rows, 128)
        return TensorSpec(role, size, (heads * rows * 128, rows * 128, 128, 1), data_type.HALF)

    tensors = {role: spec(role, heads_k, 300) for role in "kv"}
    tensors |= {role: spec(role, heads_q, seq_q) for role in "qo"}
    problem = Problem(Direction.FORWARD, data_type.HALF, 128, 128, (Scale(),), (Padding(),))
    plan = FwdSm90(problem, Geometry(tensors, 0.1), KNOWN["sm_90a"])
    group = heads_q // heads_k
    firsts = [head for head in range(heads_q) if head % group % heads.tile == 0]
    rows = plan.schedule().reshape(-1, 8)[:, 1]
    tiles = -(-seq_q // heads.tile_rows(plan.tiling))
    assert plan._heads == heads and {*rows} == {*firsts}
    assert len(rows) == batch * len(firsts) * tiles + 1
    # Where tiles are skipped, or a bias comes by tiles, a block has one head's.
    for apart in (
        replace(problem, masks=(*problem.masks, BlockMask())),
        replace(problem, edits=(Scale(), Bias(data_type.HALF, contiguous=True, aligned=True))),
    ):
        tiling = max(tilings(apart), key=lambda it: it.stages_bias)
        assert tiling.stages_bias or apart.has_blocks
        assert shared_by_heads(apart, plan.geometry, tiling, 132)[0] == TileHeads()
