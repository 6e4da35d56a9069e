"""How query tiles of the Hopper forward are shared out: of how many heads a tile is, whether blocks
share its keys, and which tiling that is best for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlattn.plans.fwd_sm90_tiles import (
    Sharing,
    TileHeads,
    asks_for_tiles,
    has_lengths,
    has_same_keys,
    heads_of_tiles,
    may_share_more,
    tiles_of_heads,
    visited,
)
from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.plans.fwd_sm90_times import MOST_PARTS_OF_ONE, time_of
from dlattn.plans.kernels import pairs_per_wave
from dlattn.plans.schedule import (
    Array,
    band_sharing_blocks,
    longest_load,
    same_keys,
    sharing_blocks,
    tile_costs,
)
from dlattn.problem import Geometry, Problem

#: What one wave of blocks may re-read from L2, of 50 MB.
WAVE_BYTES = 32 * 2**20

#: Rows up to which a wave is one round of blocks; what the block with the most may then have, of
#: what it has in waves of as many pairs as L2 keeps; and from how many rounds on it is taken to
#: have no more (1.027 in 300 random problems), because to count takes as long as the table.
SHORT_ROWS, MOST_UNEVEN, EVEN_ROUNDS = 1024, 1.02, 16

#: Where the device alone knows lengths: parts of a tile that there may be before a kernel of its
#: own adds them, which then runs whether tiles have any or not.
MOST_PARTS_TOLD = 24

#: Of multiprocessors, how many may have nothing to do where query tiles with nearly the same keys
#: have as many blocks each. These tiles have at least so much of the most keys of one.
MOST_IDLE, LEAST_ALIKE = 0.1, 0.9


def pairs_at_work(
    problem: Problem, geometry: Geometry, costs: Array, heads: TileHeads, blocks: int
) -> int:
    """(batch, head) pairs of a wave, of the first heads of tiles: as many as L2 keeps; or of short
    sequences whose tiles differ, as many as have a tile for each block, if that is as even. Then
    all rounds have long and short tiles, and read as many keys.

    Args:
        costs: of the tiles of one pair.
    """
    most = max(1, pairs_per_wave(problem, geometry, WAVE_BYTES) // heads.tile)
    one_round = max(1, blocks // len(costs))
    if geometry.seq_q > SHORT_ROWS or np.ptp(costs) == 0 or one_round >= most:
        return most
    pairs = geometry.batch * len(heads.first(geometry))
    if pairs >= EVEN_ROUNDS * one_round:
        return one_round
    load = longest_load(costs, pairs, one_round, blocks)
    return one_round if load <= MOST_UNEVEN * longest_load(costs, pairs, most, blocks) else most


def sharing(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    multiprocessors: int,
) -> Sharing:
    """Which blocks share the keys of query tiles of these heads."""
    tiles = tiles_of_heads(geometry, tiling, heads)
    if asks_for_tiles(problem, geometry):
        return _sharing_asked(problem, geometry, tiling, heads, tiles, multiprocessors)
    blocks = _sharing_blocks(problem, geometry, tiling, heads, multiprocessors)
    if blocks == 0:
        return Sharing(0)
    # Of tiles with the same keys, those that fill blocks are whole.
    begin, end = visited(problem, geometry, tiling, heads)
    same = has_same_keys(problem) or same_keys(begin, end)
    shared = tiles % multiprocessors if same else tiles
    apart = blocks > MOST_PARTS_OF_ONE * shared and may_share_more(problem, tiling)
    differ = (end - begin).min() < LEAST_ALIKE * (end - begin).max()
    beside = tiles // (geometry.batch * max(geometry.heads_k, geometry.heads_v))
    idle = blocks % beside
    whole = same and tiles >= blocks - idle
    if (
        _stay_in_l2(problem, geometry)
        or differ
        or whole
        or idle > MOST_IDLE * blocks
        or idle == blocks
    ):
        beside, idle = 1, 0
    return Sharing(blocks - idle, beside, apart)


def _stay_in_l2(problem: Problem, geometry: Geometry) -> bool:
    """Whether L2 has room for all keys and values."""
    return pairs_per_wave(problem, geometry, WAVE_BYTES) >= geometry.batch * geometry.heads_q


def _sharing_asked(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    tiles: int,
    multiprocessors: int,
) -> Sharing:
    """Where the device alone knows lengths, and finds which blocks share (``KeyDivision`` in the
    kernel): few tiles of other heads with the same keys stand side by side."""
    if not may_share_more(problem, tiling):
        return Sharing(0)
    beside = -(-geometry.heads_together // heads.tile)
    idle = multiprocessors % beside
    whole = tiles >= multiprocessors
    if _stay_in_l2(problem, geometry) or whole or idle > MOST_IDLE * multiprocessors:
        beside = 1
    return Sharing(0, beside, apart=tiles * MOST_PARTS_TOLD < multiprocessors)


def _sharing_blocks(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    multiprocessors: int,
) -> int:
    pairs = geometry.batch * len(heads.first(geometry))
    begin, end = visited(problem, geometry, tiling, heads)
    if has_same_keys(problem):
        return sharing_blocks(pairs * len(begin), geometry.seq_kv, multiprocessors)
    if not may_share_more(problem, tiling):
        return 0
    if same_keys(begin, end):
        keys = int(end[0] - begin[0]) * tiling.tile_k
        return sharing_blocks(pairs * len(begin), keys, multiprocessors)
    return band_sharing_blocks(tile_costs(begin, end), pairs, tiling.tile_k, multiprocessors)


def shared_by_heads(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, multiprocessors: int
) -> tuple[TileHeads, Sharing, float]:
    """Query heads that share a tile, which blocks share its keys, and what the block with the most
    takes.

    A tile of one head has that many keys fewer for its first rows than for its last under a causal
    mask, and in a window as many more than a query; all rows of one of several heads are nearly
    the same queries. Those may also be few, and leave other consumers nothing to do."""

    def taken(heads: TileHeads) -> tuple[TileHeads, Sharing, float]:
        its = sharing(problem, geometry, tiling, heads, multiprocessors)
        time = time_of(problem, geometry, tiling, heads, its, multiprocessors)
        return heads, its, time

    return min(map(taken, heads_of_tiles(problem, geometry, tiling)), key=lambda it: it[2])


class Shares:
    """What is best for a problem: each tiling is looked at once, which takes a millisecond."""

    def __init__(self, problem: Problem, geometry: Geometry, multiprocessors: int) -> None:
        self._problem, self._geometry = problem, geometry
        self._multiprocessors = multiprocessors
        self._known: dict[Sm90FwdTiling, tuple[TileHeads, Sharing, float]] = {}

    def by_heads(self, tiling: Sm90FwdTiling) -> tuple[TileHeads, Sharing, float]:
        """See :func:`shared_by_heads`."""
        plain = replace(tiling, shares_more=False)
        if plain not in self._known:
            shape = self._problem, self._geometry, plain, self._multiprocessors
            self._known[plain] = shared_by_heads(*shape)
        return self._known[plain]

    def best(self, tilings: Sequence[Sm90FwdTiling]) -> Sm90FwdTiling:
        """The tiling that takes the least time.

        Args:
            tilings: the fastest for many tiles, then others.
        """
        if len(tilings) == 1:
            return tilings[0]
        return min(tilings, key=lambda it: self.by_heads(it)[2])

    def shared_out(self, tiling: Sm90FwdTiling) -> Sm90FwdTiling:
        """The tiling, with what it needs if blocks share keys."""
        if not may_share_more(self._problem, tiling):
            return tiling
        if has_lengths(self._problem, self._geometry):
            return replace(tiling, shares_more=True)
        _, shared, _ = self.by_heads(tiling)
        bands = shared.blocks > 0 and not has_same_keys(self._problem)
        return replace(tiling, shares_more=shared.apart or bands)
