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


def table(
    costs: Array, heads: int, batch: int, pairs_per_wave: int, blocks: int, heads_per_tile: int = 1
) -> Array:
    """The schedule as the kernel reads it (``cuda_src/kernels/fwd_sm90_loads.cuh``): the first tile
    of a block after one access to memory.

    Args:
        heads_per_tile: neighbouring heads that share a tile, which is scheduled as of the first.

    Returns:
        int32, in rows of four: of each block, its first tile as (tile, head, batch, the row of its
        second); (0, 0, 0, the number of rows); the other tiles of each block as (tile, head, batch,
        0), in order.
    """
    heads //= heads_per_tile
    owner, order = balance(costs, heads * batch, pairs_per_wave, blocks)
    by_block = order[np.argsort(owner[order], kind="stable")]
    pair, tile = by_block // len(costs), by_block % len(costs)
    head = pair % heads * heads_per_tile
    rows = np.stack([tile, head, pair // heads, np.zeros_like(tile)], axis=1)
    counts = np.bincount(owner, minlength=blocks)
    firsts = np.cumsum(counts) - counts
    header = np.zeros((blocks + 1, 4), np.int64)
    header[:blocks] = rows[firsts]
    header[:, 3] = blocks + 1 + np.append(0, np.cumsum(counts - 1))
    return np.concatenate([header, np.delete(rows, firsts, axis=0)]).astype(np.int32).reshape(-1)
