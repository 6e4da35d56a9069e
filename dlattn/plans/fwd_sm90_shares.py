"""How query tiles of the Hopper forward are shared out: of how many heads a tile is, whether blocks
share its keys, and which tiling that is best for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.plans.kernels import pairs_per_wave, query_tiles, round_up
from dlattn.plans.schedule import (
    KEYS_BESIDE,
    PARTS_COST,
    Array,
    band_sharing_blocks,
    longest_load,
    same_keys,
    sharing_blocks,
    tile_costs,
    visited_keys,
)
from dlattn.problem import Geometry, Padding, Problem
from dlattn.records import dataclass

#: What one wave of blocks may re-read from L2, of 50 MB.
WAVE_BYTES = 32 * 2**20

#: Rows up to which a wave is one round of blocks; what the block with the most may then have, of
#: what it has in waves of as many pairs as L2 keeps; and from how many rounds on it is taken to
#: have no more (1.027 in 300 random problems), because to count takes as long as the table.
SHORT_ROWS, MOST_UNEVEN, EVEN_ROUNDS = 1024, 1.02, 16

#: Under a band, consumers of a tile have keys that others have not, and may have no rows. A block
#: with one tile takes what the consumer with the most does. One with more, whose consumers take
#: turns at the rows with the most, takes what they have in the mean, and of the rest its part by
#: tiles; in windows, where each passes keys of the others', this at the least.
PASSED_IN_WINDOWS = 0.3

#: Rounds of query tiles up to which it is counted how evenly blocks share them.
COUNTED_ROUNDS = 8

#: Parts of a tile that one of its blocks adds at the most, if a kernel of its own may.
MOST_PARTS_OF_ONE = 3
#: Of multiprocessors, how many may have nothing to do where query tiles with nearly the same keys
#: have as many blocks each. These tiles have at least so much of the most keys of one.
MOST_IDLE, LEAST_ALIKE = 0.1, 0.9


def has_lengths(problem: Problem, geometry: Geometry) -> bool:
    """Whether sequences are as long as the device knows."""
    return problem.ragged or geometry.has_lengths


def asks_for_tiles(problem: Problem, geometry: Geometry) -> bool:
    """Whether what is on the device says how long tiles take, and blocks ask for them."""
    return has_lengths(problem, geometry) or problem.has_blocks


@dataclass(frozen=True)
class TileHeads:
    """Which query heads share a query tile, of those that share keys.

    Attributes:
        tile: how many a tile is of, at the most.
        consumer: of how many a consumer has rows. If of all, consumers have other queries each;
            else the same queries, of other heads.
    """

    tile: int = 1
    consumer: int = 1

    @property
    def rows(self) -> int:
        """Of a head that a consumer has."""
        return 64 // self.consumer

    def parts(self, tiling: Sm90FwdTiling) -> int:
        """Consumers of a tile that have other queries each."""
        return 1 if self.tile > self.consumer else tiling.consumers

    def tile_rows(self, tiling: Sm90FwdTiling) -> int:
        """Of a head that a tile has."""
        return self.rows * self.parts(tiling)

    def first(self, geometry: Geometry) -> Array:
        """The first head of each tile of a batch entry."""
        together = geometry.heads_together if self.tile > 1 else 1
        every = np.arange(geometry.heads_q)
        return every[every % together % self.tile == 0]


def rows_missing(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads
) -> int:
    """By how many rows the first tile of full sequences is smaller than others, in parts of a
    consumer's (``rows_missing`` in the kernel)."""
    if geometry.band_right is None or problem.has_blocks or tiling.tile_q <= tiling.tile_k:
        return 0
    whole = round_up(geometry.seq_q, heads.tile_rows(tiling))
    return whole - round_up(geometry.seq_q, heads.rows)


def visited(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads
) -> tuple[Array, Array]:
    """See :func:`dlattn.plans.schedule.visited_keys`; of tiles of these heads."""
    missing = rows_missing(problem, geometry, tiling, heads)
    return visited_keys(geometry, heads.tile_rows(tiling), tiling.tile_k, missing)


def tiles_of_heads(geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads) -> int:
    """Query tiles of these heads."""
    of_each = query_tiles(geometry, heads.tile_rows(tiling)) // geometry.heads_q
    return of_each * len(heads.first(geometry))


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


def has_same_keys(problem: Problem) -> bool:
    """Whether all queries attend to the same keys."""
    return all(isinstance(mask, Padding) for mask in problem.masks)


def may_share_more(problem: Problem, tiling: Sm90FwdTiling) -> bool:
    """Whether there is a kernel for it: four consumers have no registers."""
    return tiling.consumers == 2 and not (problem.has_blocks or problem.ragged)


@dataclass(frozen=True)
class Sharing:
    """Which blocks share the keys of query tiles.

    Attributes:
        blocks: how many do, 0 if each tile is one block's.
        beside: how many tiles with nearly the same keys have as many of them each.
        apart: a kernel of its own puts the parts of tiles together, which are many.
    """

    blocks: int
    beside: int = 1
    apart: bool = False


def sharing(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    multiprocessors: int,
) -> Sharing:
    """Which blocks share the keys of query tiles of these heads."""
    blocks = _sharing_blocks(problem, geometry, tiling, heads, multiprocessors)
    if blocks == 0:
        return Sharing(0)
    tiles = tiles_of_heads(geometry, tiling, heads)
    # Of tiles with the same keys, those that fill blocks are whole.
    begin, end = visited(problem, geometry, tiling, heads)
    same = has_same_keys(problem) or same_keys(begin, end)
    shared = tiles % multiprocessors if same else tiles
    apart = blocks > MOST_PARTS_OF_ONE * shared and may_share_more(problem, tiling)
    stay = pairs_per_wave(problem, geometry, WAVE_BYTES) >= geometry.batch * geometry.heads_q
    differ = (end - begin).min() < LEAST_ALIKE * (end - begin).max()
    beside = tiles // (geometry.batch * max(geometry.heads_k, geometry.heads_v))
    idle = blocks % beside
    whole = same and tiles >= blocks - idle
    if stay or differ or whole or idle > MOST_IDLE * blocks or idle == blocks:
        beside, idle = 1, 0
    return Sharing(blocks - idle, beside, apart)


def _sharing_blocks(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    multiprocessors: int,
) -> int:
    if asks_for_tiles(problem, geometry):
        return 0
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


def time_of(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    shared: Sharing,
    multiprocessors: int,
) -> float:
    """What the block with the most takes, of tiles of these heads, in products of a query and a
    key."""
    pairs = geometry.batch * len(heads.first(geometry))
    takes_turns = 0 if shared.blocks else multiprocessors
    costs = tile_times(problem, geometry, tiling, heads, pairs, takes_turns)
    tiles, total = pairs * len(costs), pairs * float(costs.sum())
    if shared.blocks:
        parts = 1 if shared.apart else shared.blocks / tiles / MOST_PARTS_OF_ONE
        adding = PARTS_COST * tiling.tile_q * tiling.slower * max(1, parts)
        return total / shared.blocks + adding
    if np.ptp(costs) == 0:
        of_one = float(costs[0])
        if not has_lengths(problem, geometry):
            return of_one * -(-tiles // multiprocessors)
        # They fill tiles of no one height, nor rounds of blocks; the last to end has another tile.
        filled = geometry.seq_q / (len(costs) * heads.tile_rows(tiling))
        return filled * total / multiprocessors + of_one
    blocks = min(tiles, multiprocessors)
    if tiles > COUNTED_ROUNDS * blocks:
        return total / blocks
    return longest_load(costs, pairs, pairs, blocks)


def tile_times(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    pairs: int,
    blocks: int,
) -> Array:
    """What each tile of one of these pairs takes, in products of a query and a key.

    Args:
        blocks: that take turns at tiles of all pairs; 0 if they share the keys of each.
    """
    begin, end = visited(problem, geometry, tiling, heads)
    keys = KEYS_BESIDE + (end - begin) * tiling.tile_k
    if blocks and not has_same_keys(problem):
        own_begin, own_end = visited_keys(geometry, heads.rows, tiling.tile_k)
        own = KEYS_BESIDE + (own_end - own_begin) * tiling.tile_k
        mean = own.sum() / (len(keys) * heads.parts(tiling))
        least = 0 if geometry.band_left is None else PASSED_IN_WINDOWS
        part = max(least, min(1, blocks / (pairs * len(keys))))
        keys = keys - (1 - part) * (keys.mean() - mean)
    return keys * (tiling.tile_q * tiling.slower)


def heads_of_tiles(problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling) -> list[TileHeads]:
    """Which heads may share a tile (``packs_heads`` in the kernel)."""
    together = geometry.heads_together
    choices = [TileHeads()]
    if problem.has_blocks or tiling.stages_bias or together == 1:
        return choices
    packs = tiling.consumers == 2 or not problem.has_bias
    twice = [2 * tiling.consumers] if geometry.seq_q <= 32 and packs else []
    for most in (tiling.consumers, *twice):
        # Tiles of the same keys go on at one pace, and find them in L2, if none has much less to
        # do: as many tiles, of nearly as many heads each.
        heads = -(-together // -(-together // most))
        if not problem.ragged or together % heads == 0:
            choices.append(TileHeads(heads, -(-heads // tiling.consumers)))
    packed = [2, 4] if packs else []
    return choices + [TileHeads(heads, heads) for heads in packed if together % heads == 0]


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
        _, shared, _ = self.by_heads(tiling)
        bands = shared.blocks > 0 and not has_same_keys(self._problem)
        return replace(tiling, shares_more=shared.apart or bands)
