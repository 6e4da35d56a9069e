"""Which persistent block takes which query tiles, decided before the launch.

A table that is only read, so that calls may overlap on any streams. Where lengths are known on the
device only there is none: blocks ask for tiles, and the workspace has a counter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.problem import Geometry

Array = NDArray[Any]

#: The key tiles of a query tile that no other block has a part of, and that it has no parts.
ALL_KEYS = (0, 2**31 - 1, 0)
#: Keys of a part at the least, and what parts cost a block more than a whole query tile, in keys:
#: another load of q, another first product, and the way of outputs through memory.
LEAST_PART, PARTS_COST = 512, 480

#: What a tile costs beside its key tiles, in key tiles: loading q, the first scores, the store.
FIXED_COST = 0.7
#: What a tile without keys costs: only the store.
EMPTY_COST = 0.2


def tile_costs(geometry: Geometry, tile_q: int, tile_k: int, missing: int = 0) -> Array:
    """The cost of each query tile of one head, in key tiles, if every sequence is full.

    Args:
        missing: rows that the first tile has not (``rows_missing`` in the Hopper forward).
    """
    seq_q, seq_kv = geometry.seq_q, geometry.seq_kv
    first = np.arange(-missing, seq_q, tile_q)
    last = np.minimum(first + tile_q, seq_q) - 1
    first = np.maximum(first, 0)
    shift = seq_kv - seq_q if geometry.bottom_right else 0
    low, high = np.zeros_like(first), np.full_like(first, seq_kv)
    if geometry.band_left is not None:
        low = np.maximum(low, first + shift - geometry.band_left + 1)
    if geometry.band_right is not None:
        high = np.minimum(high, last + shift + geometry.band_right + 1)
    tiles = -(-high // tile_k) - low // tile_k
    return np.where(high > low, tiles + FIXED_COST, EMPTY_COST)


def balance(costs: Array, pairs: int, pairs_per_wave: int, blocks: int) -> tuple[Array, Array]:
    """Divides the query tiles of all (batch, head) pairs among blocks.

    Pairs are taken in waves, so that the keys and values at work stay in L2. Of a wave, the longest
    tiles are dealt first, each round of them to the blocks in order of what they have so far.

    Args:
        costs: of the tiles of one pair.
        pairs: (batch, head) pairs.
        pairs_per_wave: how many are at work at a time, at the most.
        blocks: at most as many as there are tiles in all.

    Returns:
        The owner of each tile (index ``pair * len(costs) + tile``), and an order of the tiles in
        which each owner takes its own.
    """
    # Waves of one size: a small last one would leave some blocks without work.
    waves = -(-pairs // pairs_per_wave)
    wave = np.arange(pairs) * waves // pairs
    order = np.lexsort((-np.tile(costs, pairs), np.repeat(wave, len(costs))))
    owner = np.empty(len(order), np.int64)
    load = np.zeros(blocks)
    begin = 0
    for size in np.bincount(wave) * len(costs):
        for first in range(begin, begin + size, blocks):
            dealt = order[first : min(first + blocks, begin + size)]
            least_loaded = np.argsort(load, kind="stable")[: len(dealt)]
            owner[dealt] = least_loaded
            load[least_loaded] += costs[dealt % len(costs)]
        begin += size
    return owner, order


def sharing_blocks(tiles: int, keys: int, multiprocessors: int) -> int:
    """How many blocks had best share the keys of the query tiles that are left after whole rounds,
    or 0 where it is best that each tile has one block."""
    last, blocks = tiles % multiprocessors, multiprocessors
    if tiles < multiprocessors:
        blocks = min(blocks, tiles * keys // LEAST_PART)
    if blocks <= last or last * keys < LEAST_PART * blocks:
        return 0
    return blocks if last * keys / blocks + PARTS_COST < keys else 0


def share(last: Array, key_tiles: int, blocks: int) -> tuple[Array, Array, Array]:
    """Divides the keys of query tiles, fewer than blocks, evenly among these.

    A block waits for parts of smaller numbers only, after it has left its own: these have begun.

    Returns:
        Of each part: its query tile; its block; and its key tiles, as :func:`table` has them.
    """
    ends = np.arange(1, blocks + 1) * len(last) * key_tiles // blocks
    cuts = np.union1d(ends, np.arange(len(last) + 1) * key_tiles)
    begin, end = cuts[:-1], cuts[1:]
    number = begin // key_tiles
    block = np.searchsorted(ends, begin, "right")
    first_block = np.searchsorted(ends, number * key_tiles, "right")
    adds = end % key_tiles == 0
    parts = np.where(adds, block - first_block, -1)
    keys = np.stack([begin - number * key_tiles, end - number * key_tiles, parts], axis=1)
    leaves_first = np.lexsort((adds, block))
    return last[number][leaves_first], block[leaves_first], keys[leaves_first]


def table(
    costs: Array,
    heads: int,
    batch: int,
    pairs_per_wave: int,
    blocks: int,
    heads_per_tile: int = 1,
    shared_keys: int = 0,
) -> Array:
    """The schedule as the kernel reads it (``cuda_src/kernels/fwd_sm90_loads.cuh``): the first tile
    of a block after one access to memory.

    Args:
        heads_per_tile: neighbouring heads that share a tile, which is scheduled as of the first.
        shared_keys: key tiles of every query tile, if blocks share those of the last; else 0.

    Returns:
        int32, in rows of eight: of each block, its first tile as (tile, head, batch, the row of its
        second; its first key tile, the one after its last, parts, 0); (0, 0, 0, the number of rows;
        zeros); the other tiles of each block, with 0 in place of a row, in order. Parts are 0 of a
        tile whose keys are all one block's, -1 of one that others add; of who adds, how many.
    """
    heads //= heads_per_tile
    pairs = heads * batch
    if shared_keys:
        order = balance(costs, pairs, pairs_per_wave, min(blocks, pairs * len(costs)))[1]
        whole = len(order) - len(order) % blocks
        parts, their_blocks, their_keys = share(order[whole:], shared_keys, blocks)
        order = np.concatenate([order[:whole], parts])
        owner = np.concatenate([np.arange(whole) % blocks, their_blocks])
        keys = np.concatenate([np.tile(ALL_KEYS, (whole, 1)), their_keys])
    else:
        owners, order = balance(costs, pairs, pairs_per_wave, blocks)
        owner, keys = owners[order], np.tile(ALL_KEYS, (len(order), 1))
    by_block = np.argsort(owner, kind="stable")
    pair, tile = order[by_block] // len(costs), order[by_block] % len(costs)
    zeros = np.zeros_like(tile)
    place = [tile, pair % heads * heads_per_tile, pair // heads, zeros]
    rows = np.stack([*place, *keys[by_block].T, zeros], axis=1)
    counts = np.bincount(owner, minlength=blocks)
    firsts = np.cumsum(counts) - counts
    header = np.zeros((blocks + 1, 8), np.int64)
    header[:blocks] = rows[firsts]
    header[:, 3] = blocks + 1 + np.append(0, np.cumsum(counts - 1))
    return np.concatenate([header, np.delete(rows, firsts, axis=0)]).astype(np.int32).reshape(-1)
