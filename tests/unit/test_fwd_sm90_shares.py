"""How query tiles of the Hopper forward are shared out among blocks, where more of them may."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlattn.plans import fwd_sm90_shares
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.fwd_sm90_shares import pairs_at_work
from dlattn.plans.fwd_sm90_tiles import Sharing, TileHeads, rows_missing
from dlattn.plans.kernels import pairs_per_wave
from dlattn.plans.schedule import ALL_KEYS, tile_costs
from tests.unit.hopper_forward import HOPPER, plan
from tests.unit.test_schedule import rows_of_blocks


@given(
    heads=st.integers(1, 8) | st.integers(40, 90),
    group=st.integers(1, 7),
    seq_q=st.integers(1, 1500),
    seq_kv=st.integers(1, 6000),
    head_dim=st.sampled_from((64, 96, 128, 256)),
    left=st.none() | st.integers(1, 5000),
    right=st.none() | st.integers(0, 50),
    corner=st.booleans(),
    stay=st.booleans(),
)
def test_parts_of_a_band_are_what_queries_attend_to(
    heads: int, group: int, seq_q: int, seq_kv: int, head_dim: int, left: int | None,
    right: int | None, corner: bool, stay: bool,
) -> None:  # fmt: skip
    """All parts of a query tile together are its key tiles from the first to the last that a query
    attends to, each once; no more blocks than run at a time wait for each other."""
    heads_q = heads * group
    with pytest.MonkeyPatch.context() as patch:
        if not stay:
            patch.setattr(fwd_sm90_shares, "WAVE_BYTES", 1)
        it = plan(1, heads_q, heads, seq_q, seq_kv, head_dim, left, right, corner)
    if not it._sharing.blocks:  # each tile is one block's
        return
    assert it._sharing.blocks <= HOPPER.multiprocessors
    assert it.tiling.shares_more or (left, right) == (None, None)
    shape = it.problem, it.geometry, it.tiling, it._heads
    tile_q, tile_k = it._heads.tile_rows(it.tiling), it.tiling.tile_k
    missing = rows_missing(*shape)
    shift = seq_kv - seq_q if corner else 0
    diagonal, key = np.arange(seq_q)[:, None] + shift, np.arange(seq_kv)[None]
    keep = np.ones((seq_q, seq_kv), bool)
    if left is not None:
        keep &= key > diagonal - left
    if right is not None:
        keep &= key <= diagonal + right

    def attended(tile: int) -> range:
        first = tile * tile_q - missing
        tiles = np.flatnonzero(keep[max(first, 0) : first + tile_q].any(0)) // tile_k
        return range(tiles[0], tiles[-1] + 1)

    visited: dict[tuple[int, int], list[int]] = {}
    for row in np.concatenate(rows_of_blocks(it.schedule(), it._blocks)):
        tile, head, _, _, begin, end, parts, _ = map(int, row)
        visited.setdefault((tile, head), []).extend(range(begin, end) if parts else attended(tile))
    of_group = -(-group // it._heads.tile)
    assert len(visited) == heads * of_group * -(-(seq_q + missing) // tile_q)
    for (tile, _), tiles in visited.items():
        assert sorted(tiles) == list(attended(tile))


@given(
    batch=st.sampled_from((1, 1, 2, 5)),
    heads_k=st.sampled_from((1, 2, 3, 8, 16, 53, 64)),
    group=st.sampled_from((1, 2, 3, 5, 6, 7, 8, 16)),
    seq_q=st.integers(1, 64) | st.integers(1, 3000),
    seq_kv=st.integers(1, 5000) | st.integers(1, 70_000),
    head_dim=st.sampled_from((64, 96, 128, 192, 256)),
    left=st.none() | st.integers(1, 5000),
    right=st.none() | st.just(0) | st.integers(1, 300),
    corner=st.booleans(),
    multiprocessors=st.sampled_from((2, 5, 24, 132, 132)),
)
@example(1, 8, 1, 1024, 16384, 128, None, 0, False, 132)
@example(1, 1, 2, 2048, 70_000, 128, None, 0, False, 132)
@example(2, 3, 1, 1024, 258_180, 128, 4474, 0, False, 132)
def test_every_tile_has_its_keys(
    batch: int, heads_k: int, group: int, seq_q: int, seq_kv: int, head_dim: int, left: int | None,
    right: int | None, corner: bool, multiprocessors: int,
) -> None:  # fmt: skip
    """Whoever shares what, each head has its query tiles, and each of these all its key tiles once,
    in parts that neighbouring blocks have, one behind the other; and all blocks run at a time, each
    of which has a tile."""
    heads_q = heads_k * group
    it = plan(
        batch, heads_q, heads_k, seq_q, seq_kv, head_dim, left, right, corner, multiprocessors
    )
    begin, end = it.visited()
    parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    taken = rows_of_blocks(it.schedule(), it._blocks)
    assert len(taken) <= multiprocessors and all(map(len, taken))
    for block, rows in enumerate(taken):
        for row in rows:
            tile, head, entry, _, first, last, part, _ = map(int, row)
            whole = (first, last, part) == ALL_KEYS
            keys = (int(begin[tile]), int(end[tile])) if whole else (first, last)
            parts.setdefault((tile, head, entry), []).append((block, *keys, part))
    assert len(parts) == it._tiles
    # The last tile of heads that share keys has those that are left, as `heads_of_tile` says.
    most, places = it._heads.tile, {(tile, entry) for tile, _, entry in parts}
    heads = [
        (tile, entry, head + i)
        for tile, head, entry in parts
        for i in range(min(most, group - head % group))
    ]
    assert sorted(heads) == [(*at, head) for at in sorted(places) for head in range(heads_q)]
    for (tile, *_), of_tile in parts.items():
        assert (of_tile[0][1], of_tile[-1][2]) == (begin[tile], end[tile])
        assert all(a[2] == b[1] and a[0] + 1 == b[0] for a, b in pairwise(of_tile))
        assert [part[3] for part in of_tile] == [-1] * (len(of_tile) - 1) + [len(of_tile) - 1]
    if it._sharing.apart:
        check_told(it, {tile: [block for block, *_ in rows] for tile, rows in parts.items()})


def check_told(it: FwdSm90, blocks_of: dict[tuple[int, ...], list[int]]) -> None:
    """The kernel that puts parts together is told of each tile that has some, and where its blocks
    leave them: nowhere else, and no two in one place."""
    places: list[int] = []
    told = [tuple(map(int, row)) for row in it._shared_tiles.reshape(-1, 8)]
    for tile, head, batch, _, first, last, count, _ in told:
        blocks = blocks_of.pop((tile, head, batch))
        assert blocks == [*range(first, first + count - 1), last - it._blocks]
        places += [*range(first, first + count - 1), last]
    assert all(len(blocks) == 1 for blocks in blocks_of.values())
    assert len({*places}) == len(places) and max(places, default=0) < 2 * it._blocks


def test_the_next_queries_of_a_prompt_are_shared() -> None:
    """Where a causal mask leaves each query tile nearly all keys, and tiles are fewer than
    multiprocessors, these share the keys; where they are many more, none does."""
    few = plan(1, 32, 8, 256, 16384, right=0)
    assert few._sharing == Sharing(128, 8) and few.tiling.shares_more
    many = plan(4, 64, 64, 4096, 4096, right=0)
    assert many._sharing == Sharing(0) and not many.tiling.shares_more


def test_heads_share_tiles_whose_keys_blocks_share() -> None:
    """Half as many tiles, whose keys all multiprocessors share, are half the work."""
    packed = plan(1, 32, 8, 64, 16384, right=0)
    assert (packed._heads.tile, packed._tiles) == (2, 16)
    assert packed._sharing.blocks == 8 * 16
    # Two heads a consumer, whose rows they fill; also where tiles are enough for all.
    few = plan(1, 32, 8, 32, 16384, right=0)
    assert (few._heads.tile, few._tiles) == (4, 8) and few.tiling.shares_more
    assert few.box_rows()["q"] == 32 and packed.box_rows()["q"] == 64
    many = plan(33, 32, 8, 32, 4096, right=0)  # two rounds
    assert many._heads == TileHeads(4, 2) and not many._sharing.blocks
    assert plan(1, 32, 16, 32, 16384, right=0)._heads.tile == 2
    # Of heads that do not fill their last tile, one does not wait for other keys' heads.
    for heads, (of_tile, *first) in {28: (4, 0, 4, 7), 12: (3, 0, 3, 6), 20: (3, 0, 3, 5)}.items():
        odd = plan(8, heads, 4, 32, 8192, right=0)
        rows = np.concatenate(rows_of_blocks(odd.schedule(), odd._blocks))
        assert (odd._heads.tile, *np.unique(rows[:, 1])[:3]) == (of_tile, *first)
    assert plan(8, 20, 4, 64, 8192, right=0)._tiles == 8 * 4 * 3
    # Nearly as many tiles as multiprocessors, each of which one has to itself.
    even = plan(4, 64, 8, 64, 8192, right=0)
    assert (even._heads.tile, even._tiles, even._sharing) == (2, 128, Sharing(0))
    # Nothing is gained if keys are few; nor by most blocks, if they are not many.
    assert plan(1, 32, 8, 64, 400, right=0)._heads.tile == 1
    assert plan(1, 16, 2, 32, 1024)._heads.tile == 1


@pytest.mark.parametrize(
    "shape, band, heads",
    [
        # A tile of one head in a window has many keys that some of its rows do not attend to.
        ((2, 32, 8, 8192, 8192), {"left": 512}, TileHeads(4, 4)),
        ((2, 32, 16, 8192, 8192), {"left": 512}, TileHeads(2, 2)),
        ((2, 24, 8, 8192, 8192), {"left": 512}, TileHeads(3, 1)),
        ((2, 64, 8, 8192, 8192, 64), {"left": 128}, TileHeads(4, 1)),
        # Four consumers would have a head each, or three seven in three tiles.
        ((2, 24, 8, 8192, 8192, 64), {"left": 512}, TileHeads()),
        ((2, 28, 4, 4096, 4096), {"left": 1024}, TileHeads()),
        # Under a causal mask, those of few tiles.
        ((32, 32, 8, 512, 512), {}, TileHeads(4, 4)),
        ((4, 28, 4, 2048, 2048), {}, TileHeads()),
        # No keys are shared.
        ((2, 32, 32, 8192, 8192), {"left": 512}, TileHeads()),
    ],
)
def test_heads_that_share_keys_share_tiles_under_a_band(
    shape: tuple[Any, ...], band: dict[str, Any], heads: TileHeads
) -> None:
    """What was measured as the fastest is what is chosen."""
    it = plan(*shape, right=0, **band)
    assert it._heads == heads
    assert it.box_rows()["q"] == 64 // heads.consumer


def test_tiles_with_the_same_keys_go_side_by_side() -> None:
    """Where L2 has no room for all keys, each of the tiles that read a head's keys has as many
    blocks, those with the same keys begin one after the other, and have them at the same place;
    unless many would have nothing to do."""
    for it, beside in (
        (plan(1, 16, 16, 256, 16384, 256), 2),
        (plan(1, 32, 8, 256, 65536, right=0), 8),
        (plan(1, 32, 8, 64, 65536, right=0), 2),
    ):
        assert it._sharing.beside == beside
        assert it.kernels()[0].grid == (beside, it._sharing.blocks // beside, 1)
        group, each = it.geometry.heads_q // it.geometry.heads_k, it._sharing.blocks // beside
        key_tiles = it.geometry.seq_kv // it.tiling.tile_k
        # Which key tile each block reads first, of those of all heads.
        first = np.array(
            [
                int(row[1]) // group * key_tiles + int(row[4])
                for row, *_ in rows_of_blocks(it.schedule(), it._blocks)
            ]
        ).reshape(beside, each)
        assert np.ptp(first, axis=0).max() <= 8
    assert plan(1, 16, 2, 100, 16384)._sharing.beside == 1
    assert plan(1, 45, 1, 256, 2**20)._sharing.beside == 1
    # Two rounds of whole tiles, and one that all blocks share; as many as would be left.
    rest, left = plan(1, 265, 53, 100, 70_000, right=0), plan(1, 16, 16, 1000, 16384)
    assert rest._sharing == Sharing(HOPPER.multiprocessors, apart=True)
    assert left._sharing == Sharing(HOPPER.multiprocessors)
    assert rest.schedule().size and left.schedule().size


def test_many_parts_meet_in_a_kernel_of_their_own() -> None:
    """Where one block would add more than some, and only there."""
    many = plan(heads_q=16)  # 132 blocks for 16 tiles
    assert many._sharing.apart and many.tiling.shares_more
    assert [launch.source.name for launch in many.kernels()] == [
        "dlattn_fwd_sm90",
        "dlattn_fwd_parts",
    ]
    # Of 140 tiles with the same keys, whether a mask says so or not, the last eight.
    for right in (None, 0):
        rest = plan(heads_q=140, heads_k=140, seq_q=64, seq_kv=20_000, right=right)
        assert rest._sharing.apart and rest._shared_tiles.size == 8 * 8
    few = plan(heads_q=64, heads_k=64)
    assert few._sharing.blocks and not few._sharing.apart and not few.tiling.shares_more
    assert len(few.kernels()) == 1


@pytest.mark.parametrize(
    "shape, band, rows, keys",
    [
        # Many tiles: three consumers at 128, four at 64.
        ((4, 16, 16, 4096, 4096), {"right": 0}, 192, 64),
        ((1, 64, 8, 16384, 16384), {}, 192, 64),
        ((8, 8, 8, 4096, 4096, 64), {"right": 0}, 256, 64),
        # Rows that 192 do not divide, or keys that 128 do not.
        ((32, 16, 16, 512, 512), {}, 128, 128),
        ((18, 16, 16, 900, 900), {}, 192, 64),
        ((28, 32, 32, 576, 576, 64), {}, 192, 96),
        ((32, 32, 32, 512, 512, 64), {}, 256, 64),
        # One head: the longest of 342 tiles would end long after the mean; at 64, of few.
        ((1, 1, 1, 65536, 65536), {"right": 0}, 128, 128),
        ((1, 8, 8, 4096, 4096, 64), {"right": 0}, 128, 128),
        # Parts of the keys of few tiles, for which three or four consumers have no kernel.
        ((1, 16, 16, 256, 16384), {}, 128, 128),
        ((1, 16, 16, 256, 16384, 64), {}, 128, 128),
        # Of a window, each consumer has keys of its own, which others pass.
        ((1, 16, 16, 8192, 8192), {"right": 0, "left": 512}, 192, 64),
        ((1, 32, 32, 8192, 8192, 64), {"right": 0, "left": 64}, 256, 64),
        # What rows leave of a tile is the first one's, and takes little.
        ((32, 16, 16, 512, 512), {"right": 0}, 192, 64),
        ((54, 32, 32, 300, 300, 64), {"right": 0}, 256, 64),
        ((16, 16, 16, 1024, 1024, 192), {"right": 0}, 128, 64),
        # Few columns leave four consumers their registers, and more than 128 three theirs; rows of
        # a head that begin within a sector of L2 ask for more rows of queries.
        ((4, 16, 16, 4096, 4096, 32), {}, 256, 64),
        ((4, 16, 16, 4096, 4096, 160), {}, 128, 96),
        ((16, 16, 16, 1024, 1024, 160), {"right": 0}, 192, 48),
        ((16, 16, 16, 1024, 1024, 136), {}, 192, 48),
        ((4, 16, 16, 4096, 4096, 168), {}, 192, 32),
        # Of few keys, 96 fit a diagonal worse than 64.
        ((4, 16, 16, 4096, 4096, 192), {"right": 0}, 128, 96),
        ((16, 16, 16, 1024, 1024, 192), {"right": 0}, 128, 64),
    ],
)
def test_tilings_fit_the_shape(
    shape: tuple[Any, ...], band: dict[str, Any], rows: int, keys: int
) -> None:
    """What was measured as the fastest is what is chosen."""
    tiling = plan(*shape, **band).tiling
    assert (tiling.tile_q, tiling.tile_k) == (rows, keys)


@pytest.mark.parametrize("lengths, consumers", [(False, 2), (True, 3)])
def test_unknown_lengths_fill_tiles_of_no_one_height(lengths: bool, consumers: int) -> None:
    """1024 rows are eight tiles of 128, and five and a third of 192, which are faster; rows of
    sequences up to 1024 are as many of either (measured: 1.09 to 1.14)."""
    it = plan(batch=16, heads_k=16, seq_q=1024, seq_kv=1024, lengths=lengths)
    assert it.tiling.consumers == consumers


def visits(it: FwdSm90) -> list[list[int]]:
    """The key tiles that each block visits, one after the other, of whichever head."""
    begin, end = it.visited()
    blocks = []
    for rows in rows_of_blocks(it.schedule(), it._blocks):
        visited: list[int] = []
        for row in rows:
            own = range(begin[row[0]], end[row[0]])
            visited.extend(own if row[7] else reversed(own))
        blocks.append(visited)
    return blocks


@pytest.mark.parametrize("seq, heads", [(4096, 32), (16384, 8)])
def test_blocks_come_to_a_key_together(seq: int, heads: int) -> None:
    """Under a causal mask at 256, blocks that visit key tiles up and down are at nearly the same
    one of their heads for the first two tiles of each; only downwards, they are far apart."""

    def apart(alternates: bool) -> float:
        it = plan(1, heads, heads, seq, seq, 256, right=0)
        assert it.tiling.alternates
        it.tiling = replace(it.tiling, alternates=alternates)
        places = np.array([own[: seq // it.tiling.tile_k] for own in visits(it)])
        return float(np.median(places.std(axis=0)))

    assert apart(alternates=True) < 1 and apart(alternates=False) > seq / 64 / 10


@pytest.mark.parametrize("seq, heads", [(512, 256), (4096, 32)])
def test_neighbours_begin_with_the_same_keys(seq: int, heads: int) -> None:
    """Under a causal mask, too, where the longest tiles of all heads are dealt first, blocks that
    begin with the same head stand side by side, and none has much more to do than others."""
    it = plan(1, heads, heads, seq, seq, 256, right=0)
    blocks = rows_of_blocks(it.schedule(), it._blocks)
    first = [int(rows[0][1]) for rows in blocks]
    assert first == sorted(first) and len({*first}) < len(first)
    load = [sum(row[0] + 1 for row in rows) for rows in blocks]
    assert max(load) <= 1.1 * sum(load) / len(load)


def test_a_round_of_short_sequences_has_all_lengths() -> None:
    """The first tiles of all blocks are from the first to the last of their heads, if heads divide
    as evenly so; else a wave is what L2 keeps."""

    def first_tiles(it: FwdSm90) -> set[int]:
        return {int(rows[0][0]) for rows in rows_of_blocks(it.schedule(), it._blocks)}

    assert first_tiles(plan(32, 16, 16, 512, 512, right=0)) == set(range(3))
    assert first_tiles(plan(16, 8, 8, 1024, 1024, 256, right=0)) == set(range(8))
    assert min(first_tiles(plan(4, 16, 16, 4096, 4096, right=0))) > 22 / 2
    # Of six tiles a head, 22 heads would be two waves of a round and one of less.
    uneven = plan(5, 10, 10, 700, 700, 256, right=0)
    shape = uneven.problem, uneven.geometry
    costs = tile_costs(*uneven.visited())
    assert pairs_at_work(*shape, costs, TileHeads(), 132) == pairs_per_wave(*shape, 32 * 2**20) > 22
