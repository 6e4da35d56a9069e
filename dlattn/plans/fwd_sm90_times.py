"""How long query tiles of the Hopper forward take, as estimated: what tilings are compared by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dlattn.plans.fwd_sm90_tiles import (
    Sharing,
    TileHeads,
    has_lengths,
    has_same_keys,
    may_share_more,
    visited,
)
from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.plans.schedule import (
    KEYS_BESIDE,
    MOST_SHARED,
    PARTS_COST,
    Array,
    longest_load,
    visited_keys,
)
from dlattn.problem import Geometry, Problem

#: Under a band, consumers of a tile have keys that others have not, and may have no rows. A block
#: with one tile takes what the consumer with the most does. One with more, whose consumers take
#: turns at the rows with the most, takes what they have in the mean, and of the rest its part by
#: tiles; in windows, where each passes keys of the others', this at the least.
PASSED_IN_WINDOWS = 0.3

#: Rounds of query tiles up to which it is counted how evenly blocks share them.
COUNTED_ROUNDS = 8

#: Parts of a tile that one of its blocks adds at the most, if a kernel of its own may.
MOST_PARTS_OF_ONE = 3
#: Where the device alone knows lengths: parts of a tile at the most unless a kernel of its own adds
#: them, what they cost a block more, in keys, and what of the time that whole tiles take may be
#: left, whatever L2 keeps (``KeyDivision`` in the kernel).
MOST_PARTS_ASKED, PARTS_COST_ASKED, LEAST_GAIN_ASKED = 16, 800, 0.8
#: Queries of a sequence of which mostly all are there.
FEW_QUERIES = 64
#: A key that L2 brings a tile takes as long as its products with so many queries.
ROWS_OF_A_LOAD = 100


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
    if has_lengths(problem, geometry):
        return _time_of_lengths(problem, geometry, tiling, heads, shared, multiprocessors)
    pairs = geometry.batch * len(heads.first(geometry))
    takes_turns = 0 if shared.blocks else multiprocessors
    costs = tile_times(problem, geometry, tiling, heads, pairs, takes_turns)
    tiles, total = pairs * len(costs), pairs * float(costs.sum())
    if shared.blocks:
        parts = 1 if shared.apart else shared.blocks / tiles / MOST_PARTS_OF_ONE
        adding = PARTS_COST * tiling.tile_q * tiling.slower * max(1, parts)
        return total / shared.blocks + adding
    if np.ptp(costs) == 0:
        return float(costs[0]) * -(-tiles // multiprocessors)
    return _time_of_whole(costs, pairs, multiprocessors)


def _time_of_whole(costs: Array, pairs: int, multiprocessors: int) -> float:
    tiles = pairs * len(costs)
    blocks = min(tiles, multiprocessors)
    if tiles > COUNTED_ROUNDS * blocks:
        return pairs * float(costs.sum()) / blocks
    return longest_load(costs, pairs, pairs, blocks)


def _time_of_lengths(
    problem: Problem,
    geometry: Geometry,
    tiling: Sm90FwdTiling,
    heads: TileHeads,
    shared: Sharing,
    multiprocessors: int,
) -> float:
    """The same where the device alone knows lengths, and may find that blocks had better share
    keys (``KeyDivision`` in the kernel): if not even their sum is known, of full ones; else of one
    sequence as long as they may be, and others as long as is left for each."""
    groups, knows_sum = len(heads.first(geometry)), geometry.most_tokens_q is not None
    tiles, total, longest, shortest = 0, 0.0, 0.0, np.inf
    for its in sequences(geometry) if knows_sum else [geometry]:
        pairs = its.batch * groups
        costs = tile_times(problem, its, tiling, heads, pairs, multiprocessors)
        if knows_sum:
            begin, end = visited(problem, its, tiling, heads)
            costs = np.maximum(costs, ROWS_OF_A_LOAD * tiling.tile_k * (end - begin))
        tiles += pairs * len(costs)
        total += pairs * float(costs.sum())
        longest, shortest = max(longest, float(costs.max())), min(shortest, float(costs.min()))
    if knows_sum:
        whole = max(longest, total / multiprocessors + shortest)
    elif longest == shortest:
        # They fill no rounds of blocks; the last to end has another tile.
        filled = _filled(problem, geometry, len(costs), heads.tile_rows(tiling))
        whole = filled * total / multiprocessors + longest
    else:
        whole = _time_of_whole(costs, geometry.batch * groups, multiprocessors)
    if not may_share_more(problem, tiling) or tiles > MOST_SHARED * multiprocessors:
        return whole
    blocks = multiprocessors if shared.apart else min(multiprocessors, MOST_PARTS_ASKED * tiles)
    parts = total / blocks + PARTS_COST_ASKED * tiling.tile_q * tiling.slower
    return parts if parts < LEAST_GAIN_ASKED * whole else whole


def _filled(problem: Problem, geometry: Geometry, tiles: int, rows: int) -> float:
    """What part of the tiles of a full sequence, of so many rows each, one takes on average. Those
    of queries whose number only the device knows fill tiles of no one height; of few queries mostly
    all are there, and any take a tile."""
    varies = problem.ragged or "seq_len_q" in geometry.tensors
    if not varies or tiles == 1 or geometry.seq_q <= FEW_QUERIES:
        return 1
    return geometry.seq_q / (tiles * rows)


def sequences(geometry: Geometry) -> list[Geometry]:
    """The longest sequence that there may be, and all others, of equal lengths, which together
    have what is left of ``most_tokens_q`` and ``most_tokens_kv``."""

    def of_lengths(batch: int, seq_q: int, seq_kv: int) -> Geometry:
        q = geometry.tensors["q"]
        dim = (batch, q.dim[1], seq_q, q.dim[3])
        tensors = {**geometry.tensors, "q": replace(q, dim=dim)}
        return replace(geometry, tensors=tensors, max_seq_kv=seq_kv)

    others = geometry.batch - 1

    def of_others(tokens: int | None, longest: int) -> int:
        left = others * longest if tokens is None else tokens - longest
        return min(longest, max(1, left // others))

    found = [of_lengths(1, geometry.seq_q, geometry.seq_kv)]
    if others:
        seq_q = of_others(geometry.most_tokens_q, geometry.seq_q)
        seq_kv = of_others(geometry.most_tokens_kv, geometry.seq_kv)
        found.append(of_lengths(others, seq_q, seq_kv))
    return found


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
