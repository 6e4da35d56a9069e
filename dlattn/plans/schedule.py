"""Which persistent block takes which query tiles, decided before the launch.

A table that is only read, so that calls may overlap on any streams. Where lengths are known on the
device only there is none: blocks ask for tiles, and the workspace has a counter, or each finds out
which keys of which tiles are its own.
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
LEAST_PART, PARTS_COST = 256, 480
#: What a query tile takes a block beside its products, as measured, in keys.
KEYS_BESIDE = 250
#: Where tiles differ in keys: how many rounds of them blocks share at the most, and how much of the
#: time that whole tiles take is left at the most.
MOST_SHARED, LEAST_GAIN = 4, 0.95

#: What a tile costs beside its key tiles, in key tiles: loading q, the first scores, the store.
FIXED_COST = 0.7
#: What a tile without keys costs: only the store.
EMPTY_COST = 0.2


def visited_keys(
    geometry: Geometry, tile_q: int, tile_k: int, missing: int = 0
) -> tuple[Array, Array]:
    """The first key tile of each query tile of one head, and the one after its last, if every
    sequence is full; the same where it has no keys.

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
    begin = low // tile_k
    return begin, np.where(high > low, -(-high // tile_k), begin)


def tile_costs(begin: Array, end: Array) -> Array:
    """The cost, in key tiles, of query tiles that visit the key tiles from ``begin`` to ``end``."""
    return np.where(end > begin, end - begin + FIXED_COST, EMPTY_COST)


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


def neighbours(owner: Array, pair: Array) -> Array:
    """The owners of tiles that are taken in this order, numbered so that blocks whose first tiles
    are of one (batch, head) pair are neighbours: what one reads, others then find in L2.

    Args:
        owner, pair: of each tile.
    """
    blocks, first = np.unique(owner, return_index=True)
    number = np.empty_like(blocks)
    number[np.argsort(pair[first], kind="stable")] = blocks
    return number[owner]


def sharing_blocks(tiles: int, keys: int, multiprocessors: int) -> int:
    """How many blocks had best share the keys of the query tiles that are left after whole rounds,
    or 0 where it is best that each tile has one block. Of tiles with the same keys."""
    last, blocks = tiles % multiprocessors, multiprocessors
    if tiles < multiprocessors:
        blocks = min(blocks, tiles * keys // LEAST_PART)
        whole = blocks - blocks % tiles  # each has a part of one tile
        if whole > tiles and tiles * keys / whole < tiles * keys / blocks + KEYS_BESIDE:
            blocks = whole
    if blocks <= last or last * keys < LEAST_PART * blocks:
        return 0
    return blocks if last * keys / blocks + PARTS_COST < keys else 0


def longest_load(costs: Array, pairs: int, pairs_per_wave: int, blocks: int) -> float:
    """What the block with the most has, by :func:`balance`."""
    owner, _ = balance(costs, pairs, pairs_per_wave, blocks)
    return float(np.bincount(owner, np.tile(costs, pairs)).max())


def same_keys(begin: Array, end: Array) -> bool:
    """Whether query tiles that visit the key tiles from ``begin`` to ``end`` visit the same."""
    return bool(np.ptp(begin) == 0 and np.ptp(end) == 0)


def band_sharing_blocks(costs: Array, pairs: int, tile_k: int, multiprocessors: int) -> int:
    """The same of all tiles, where their keys differ.

    Args:
        costs: of the tiles of one pair.
        pairs: (batch, head) pairs.
    """
    tiles = pairs * len(costs)
    if tiles > MOST_SHARED * multiprocessors or costs.min() < 1:
        return 0
    key_tiles = pairs * float(np.sum(costs - FIXED_COST))
    blocks = min(multiprocessors, int(key_tiles) * tile_k // LEAST_PART)
    if blocks == 0:
        return 0
    apart = min(tiles, multiprocessors)
    longest = longest_load(costs, pairs, pairs, apart)
    shared = key_tiles / blocks + FIXED_COST * -(-tiles // blocks) + PARTS_COST / tile_k
    return blocks if shared < LEAST_GAIN * longest else 0


def share(last: Array, begin: Array, end: Array, blocks: int) -> tuple[Array, Array, Array]:
    """Divides the keys of query tiles evenly among blocks.

    A block waits for parts of smaller numbers only, after it has left its own: these have begun.

    Args:
        last: query tiles.
        begin, end: the key tiles of each, of which there is one at least.

    Returns:
        Of each part: its query tile; its block; and its key tiles, as :func:`table` has them.
    """
    tile_ends = np.cumsum(end - begin)
    tile_begins = tile_ends - (end - begin)
    ends = np.arange(1, blocks + 1) * tile_ends[-1] // blocks
    cuts = np.union1d(ends, np.append(0, tile_ends))
    first, after = cuts[:-1], cuts[1:]
    number = np.searchsorted(tile_ends, first, "right")
    block = np.searchsorted(ends, first, "right")
    first_block = np.searchsorted(ends, tile_begins[number], "right")
    before = block - first_block
    parts = np.where(after == tile_ends[number], before, -1)
    of_tile = begin[number] - tile_begins[number]
    keys = np.stack([first + of_tile, after + of_tile, parts], axis=1)
    in_turn = np.lexsort((np.sign(parts), block))
    return last[number][in_turn], block[in_turn], keys[in_turn]


def shared_tiles(table: Array, blocks: int) -> Array:
    """What a kernel that puts parts together is told of each query tile that has some.

    Args:
        table: of :func:`table`.
        blocks: that it is for.

    Returns:
        int32, in rows of eight: (tile, head, batch, 0; the place of its first part, that of its
        last, how many there are, 0). A block leaves what it has of a tile that goes on with the
        next block in the place of its own number, of one that ends with it as many blocks later.
    """
    rows = table.reshape(-1, 8)
    others = np.repeat(np.arange(blocks), np.diff(rows[: blocks + 1, 3]))
    owner = np.concatenate([np.arange(blocks), [0], others])
    is_last = rows[:, 6] > 0
    place, before, block = rows[is_last, :3], rows[is_last, 6], owner[is_last]
    zeros = np.zeros_like(block)
    columns = [*place.T, zeros, block - before, blocks + block, before + 1, zeros]
    return np.stack(columns, axis=1).astype(np.int32).reshape(-1)


def share_side_by_side(
    last: Array, begin: Array, end: Array, blocks: int, beside: int
) -> tuple[Array, Array, Array]:
    """:func:`share`, where so many neighbouring query tiles have nearly the same keys: each has as
    many blocks, which come to a key at about the same time, so that memory brings it once."""
    each = blocks // beside
    shares = [share(last[i::beside], begin[i::beside], end[i::beside], each) for i in range(beside)]
    tiles, their_blocks, keys = (np.concatenate(of_all) for of_all in zip(*shares, strict=True))
    before = np.repeat(np.arange(beside) * each, [len(tiles) for tiles, *_ in shares])
    return tiles, their_blocks + before, keys


def table(
    costs: Array,
    heads: Array,
    batch: int,
    pairs_per_wave: int,
    blocks: int,
    shared_keys: tuple[Array, Array] | None = None,
    beside: int = 1,
    alternates: bool = False,
) -> Array:
    """The schedule as the kernel reads it (``cuda_src/kernels/fwd_sm90_loads.cuh``): the first tile
    of a block after one access to memory.

    Args:
        heads: the first of each tile, of those that share one, of a batch entry.
        shared_keys: of each query tile of a pair the first key tile and the one after its last, if
            blocks share them: those of the last query tiles, or where they differ, of all.
        beside: see :func:`share_side_by_side`; 1 unless blocks share the keys of all query tiles.
        alternates: of the tiles of a block every other one, from its first on, ascends, if blocks
            do not share keys. A long tile and the short one after it have as many keys together as
            any other two: blocks that take the one upwards and the other downwards come to a key
            at the same time.

    Returns:
        int32, in rows of eight: of each block, its first tile as (tile, head, batch, the row of its
        second; its first key tile, the one after its last, parts, whether it ascends); (0, 0, 0,
        the number of rows; zeros); the other tiles of each block, with 0 in place of a row, in
        order. Parts are 0 of a tile whose keys are all one block's; else of the last part how many
        there are before it, and -1 of these. Key tiles are visited from the last to the first, or
        if it ascends, from the first to the last.
    """
    pairs = len(heads) * batch
    if shared_keys:
        begin, end = shared_keys
        order = balance(costs, pairs, pairs_per_wave, min(blocks, pairs * len(costs)))[1]
        whole = len(order) - len(order) % blocks
        if not same_keys(begin, end):
            order, whole = np.arange(len(order)), 0
        last = order[whole:]
        its = last % len(costs)
        keys_of = begin[its], end[its]
        parts, their_blocks, their_keys = share_side_by_side(last, *keys_of, blocks, beside)
        order = np.concatenate([order[:whole], parts])
        owner = np.concatenate([np.arange(whole) % blocks, their_blocks])
        keys = np.concatenate([np.tile(ALL_KEYS, (whole, 1)), their_keys])
    else:
        owners, order = balance(costs, pairs, pairs_per_wave, blocks)
        owner = neighbours(owners[order], order // len(costs))
        keys = np.tile(ALL_KEYS, (len(order), 1))
    by_block = np.argsort(owner, kind="stable")
    pair, tile = order[by_block] // len(costs), order[by_block] % len(costs)
    zeros = np.zeros_like(tile)
    place = [tile, heads[pair % len(heads)], pair // len(heads), zeros]
    counts = np.bincount(owner, minlength=blocks)
    assert counts.min() > 0, "every block has a tile"
    firsts = np.cumsum(counts) - counts
    turn = np.arange(len(order)) - np.repeat(firsts, counts)
    ascends = (turn + 1) % 2 if alternates and not shared_keys else zeros
    rows = np.stack([*place, *keys[by_block].T, ascends], axis=1)
    header = np.zeros((blocks + 1, 8), np.int64)
    header[:blocks] = rows[firsts]
    header[:, 3] = blocks + 1 + np.append(0, np.cumsum(counts - 1))
    return np.concatenate([header, np.delete(rows, firsts, axis=0)]).astype(np.int32).reshape(-1)
