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

#: ``KEYS_BESIDE`` is the same with all tilings; but in windows, where each consumer has keys that
#: others have not, more with three above 64 columns.
KEYS_BESIDE_WINDOWS = 350
#: Rounds of query tiles up to which it is counted how evenly blocks share them.
COUNTED_ROUNDS = 8

#: Parts of a tile that one of its blocks adds at the most, if a kernel of its own may.
MOST_PARTS_OF_ONE = 3
#: Of multiprocessors, how many may have nothing to do where query tiles with nearly the same keys
#: have as many blocks each. These tiles have at least so much of the most keys of one.
MOST_IDLE, LEAST_ALIKE = 0.1, 0.9


def asks_for_tiles(problem: Problem, geometry: Geometry) -> bool:
    """Whether what is on the device says how long tiles take, and blocks ask for them."""
    lengths = {"seq_len_q", "seq_len_kv"}
    told = not lengths.isdisjoint(geometry.tensors) or problem.has_blocks
    return told or problem.ragged


def rows_missing(problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling) -> int:
    """By how many rows the first tile of full sequences is smaller than others, in parts of a
    consumer's (``rows_missing`` in the kernel)."""
    if geometry.band_right is None or problem.has_blocks or tiling.tile_q <= tiling.tile_k:
        return 0
    return round_up(geometry.seq_q, tiling.tile_q) - round_up(geometry.seq_q, 64)


def visited(problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling) -> tuple[Array, Array]:
    """See :func:`dlattn.plans.schedule.visited_keys`."""
    missing = rows_missing(problem, geometry, tiling)
    return visited_keys(geometry, tiling.tile_q, tiling.tile_k, missing)


def tile_heads(geometry: Geometry, heads: int) -> Array:
    """The first head of each tile of so many, at the most, of a batch entry. Those of a tile share
    keys."""
    together = geometry.heads_together if heads > 1 else 1
    every = np.arange(geometry.heads_q)
    return every[every % together % heads == 0]


def tiles_of_heads(geometry: Geometry, tile_q: int, heads: int) -> int:
    """Query tiles of so many heads, at the most."""
    return query_tiles(geometry, tile_q) // geometry.heads_q * len(tile_heads(geometry, heads))


def pairs_at_work(
    problem: Problem, geometry: Geometry, costs: Array, heads: int, blocks: int
) -> int:
    """(batch, head) pairs of a wave, of so many heads a tile: as many as L2 keeps; or of short
    sequences whose tiles differ, as many as have a tile for each block, if that is as even. Then
    all rounds have long and short tiles, and read as many keys.

    Args:
        costs: of the tiles of one pair.
    """
    most = max(1, pairs_per_wave(problem, geometry, WAVE_BYTES) // heads)
    one_round = max(1, blocks // len(costs))
    if geometry.seq_q > SHORT_ROWS or np.ptp(costs) == 0 or one_round >= most:
        return most
    pairs = geometry.batch * len(tile_heads(geometry, heads))
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
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: int, multiprocessors: int
) -> Sharing:
    """Which blocks share the keys of query tiles of so many heads."""
    blocks = _sharing_blocks(problem, geometry, tiling, heads, multiprocessors)
    if blocks == 0:
        return Sharing(0)
    tiles = tiles_of_heads(geometry, tiling.tile_q, heads)
    # Of tiles with the same keys, those that fill blocks are whole.
    begin, end = visited(problem, geometry, tiling)
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
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: int, multiprocessors: int
) -> int:
    if asks_for_tiles(problem, geometry):
        return 0
    pairs = geometry.batch * len(tile_heads(geometry, heads))
    begin, end = visited(problem, geometry, tiling)
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
) -> tuple[int, Sharing]:
    """Query heads that share a tile, at the most, and which blocks share its keys.

    Queries so few that one consumer has those of a head, or of two, leave the others to heads with
    the same keys, if multiprocessors then have less to do."""
    more, together = may_share_more(problem, tiling), geometry.heads_together
    choices = [1]
    if not (problem.has_blocks or tiling.stages_bias or together == 1 or geometry.seq_q > 64):
        if more or together % tiling.consumers == 0:
            choices.append(tiling.consumers)
        if geometry.seq_q <= 32 and more:
            choices.append(2 * tiling.consumers)
    shared = {it: sharing(problem, geometry, tiling, it, multiprocessors) for it in choices}

    def tiles_of_one(heads: int) -> float:
        """Tiles that a multiprocessor has, one after the other."""
        tiles, blocks = tiles_of_heads(geometry, tiling.tile_q, heads), shared[heads].blocks
        return tiles / blocks if blocks else -(-tiles // multiprocessors)

    heads = min(choices, key=tiles_of_one)
    # Tiles of the same keys go on at one pace, and find them in L2, if none has much less to do: as
    # many tiles, of nearly as many heads each.
    return -(-together // -(-together // heads)), shared[heads]


def choose_tiling(
    problem: Problem,
    geometry: Geometry,
    tilings: Sequence[Sm90FwdTiling],
    multiprocessors: int,
) -> Sm90FwdTiling:
    """The tiling that takes the least time.

    Args:
        tilings: the fastest for many tiles, then others.
    """
    if len(tilings) == 1:
        return tilings[0]
    windows = geometry.band_left is not None and problem.head_dim_v > 64

    def cost(tiling: Sm90FwdTiling) -> float:
        """In products of a query and a key."""
        begin, end = visited(problem, geometry, tiling)
        beside = KEYS_BESIDE_WINDOWS if windows and tiling.consumers == 3 else KEYS_BESIDE
        of_key = tiling.tile_q * tiling.slower
        costs = (beside + (end - begin) * tiling.tile_k) * of_key
        heads, shared = shared_by_heads(problem, geometry, tiling, multiprocessors)
        pairs = geometry.batch * len(tile_heads(geometry, heads))
        tiles, total = pairs * len(costs), pairs * float(costs.sum())
        if shared.blocks:
            of_one = 1 if shared.apart else shared.blocks / tiles / MOST_PARTS_OF_ONE
            return total / shared.blocks + PARTS_COST * of_key * max(1, of_one)
        if np.ptp(costs) == 0:
            return float(costs[0]) * -(-tiles // multiprocessors)
        blocks = min(tiles, multiprocessors)
        if tiles > COUNTED_ROUNDS * blocks:
            return total / blocks
        return longest_load(costs, pairs, pairs, blocks)

    return min(tilings, key=cost)


def shared_out(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, multiprocessors: int
) -> Sm90FwdTiling:
    """The tiling, with what it needs if blocks share keys."""
    if not may_share_more(problem, tiling):
        return tiling
    heads, shared = shared_by_heads(problem, geometry, tiling, multiprocessors)
    bands = shared.blocks > 0 and not has_same_keys(problem)
    more = shared.apart or bands or heads > tiling.consumers
    return replace(tiling, shares_more=more)
