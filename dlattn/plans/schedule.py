"""Which persistent block takes which query tiles, decided before the launch.

A table, not a counter in device memory: it is only read, so that calls may overlap on any streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.problem import Geometry

Array = NDArray[Any]

#: What a tile costs beside its key tiles, in key tiles: loading q, the first scores, the store.
FIXED_COST = 1.5


def tile_costs(geometry: Geometry, tile_q: int, tile_k: int) -> Array:
    """The cost of each query tile of one head, in key tiles, if every sequence is full."""
    seq_q, seq_kv = geometry.seq_q, geometry.seq_kv
    first = np.arange(0, seq_q, tile_q)
    last = np.minimum(first + tile_q, seq_q) - 1
    shift = seq_kv - seq_q if geometry.bottom_right else 0
    low, high = np.zeros_like(first), np.full_like(first, seq_kv)
    if geometry.band_left is not None:
        low = np.maximum(low, first + shift - geometry.band_left + 1)
    if geometry.band_right is not None:
        high = np.minimum(high, last + shift + geometry.band_right + 1)
    tiles = -(-high // tile_k) - low // tile_k
    return np.where(high > low, tiles, 0) + FIXED_COST


def balance(costs: Array, pairs: int, pairs_per_wave: int, blocks: int) -> Array:
    """Divides the query tiles of all (batch, head) pairs among blocks.

    Pairs are taken some at a time, so that the keys and values at work stay in L2. Of those, the
    longest tiles come first, each round of them to the blocks in order of what they have so far.

    Args:
        costs: of the tiles of one pair.
        pairs: (batch, head) pairs.
        pairs_per_wave: how many are taken at a time.
        blocks: at most as many as there are tiles in all.

    Returns:
        int32: ``blocks + 1`` offsets, then at them the tiles of each block, each as
        ``pair * len(costs) + tile``, in order.
    """
    load = np.zeros(blocks)
    owners, items = [], []
    for first in range(0, pairs, pairs_per_wave):
        wave = np.arange(first, min(first + pairs_per_wave, pairs))
        index = (wave[:, None] * len(costs) + np.arange(len(costs))).reshape(-1)
        cost = np.tile(costs, len(wave))
        longest_first = np.argsort(-cost, kind="stable")
        index, cost = index[longest_first], cost[longest_first]
        for begin in range(0, len(index), blocks):
            taken = slice(begin, begin + blocks)
            owner = np.argsort(load, kind="stable")[: len(index[taken])]
            load[owner] += cost[taken]
            owners.append(owner)
            items.append(index[taken])
    owner, item = np.concatenate(owners), np.concatenate(items)
    counts = np.bincount(owner, minlength=blocks)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    by_block = np.argsort(owner, kind="stable")
    return np.concatenate([offsets + blocks + 1, item[by_block]]).astype(np.int32)
