"""How blocks of the decode divide its work (``kernels/decode_block.cuh``), and what suits whom."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from dlattn.plans.kernels import round_up, tile_bytes
from dlattn.plans.mapped import slab_bytes
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass
from dlattn.runtime.target import Target

#: More of them fill tiles of their own.
MOST_QUERIES = 16


@dataclass(frozen=True)
class DecodeTiling:
    """How a block divides its work (``DecodeTiling`` in the kernel).

    Attributes:
        warps: warps per block, each of which loads 16 keys and values of a tile.
        row_groups: warps that share keys, for 16 rows each.
        stages: tiles of keys and values in shared memory.
        warpgroups: four warps multiply together, with Hopper's instructions.
        boxes: the copy engine brings keys and values.
        cluster: blocks of a cluster, which have an item together; 1 where each block has an item
            to itself, and 0 where all share all items.
        min_blocks: blocks of a multiprocessor: registers must allow so many, and they get so much
            shared memory that there is room for no more.
    """

    warps: int
    row_groups: int
    stages: int
    warpgroups: bool = False
    boxes: bool = False
    cluster: int = 0
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        flags = ", ".join(str(flag).lower() for flag in (self.warpgroups, self.boxes))
        item_of = ("all", "block", "cluster")[min(2, self.cluster)]
        counts = f"{self.warps}, {self.row_groups}, {self.stages}"
        return f"DecodeTiling<{counts}, {flags}, ItemOf::{item_of}>"

    @property
    def rows(self) -> int:
        return 16 * self.row_groups

    def columns_v(self, problem: Problem) -> int:
        """Columns of the output product (``dim_v`` in the kernel)."""
        if not self.warpgroups:
            return round_up(problem.head_dim_v, 16)
        return round_up(problem.head_dim_v, 32 if problem.head_dim_v <= 128 else 64)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dim_v = self.columns_v(problem)
        teams, part = self.warps // self.row_groups, 4 * self.rows * (dim_v + 8)
        if not self.boxes:
            alignment, bytes_of = (1024, slab_bytes) if self.warpgroups else (16, tile_bytes)
            dim_qk = round_up(problem.head_dim_qk, 16)
            keys = bytes_of(self.rows, dim_qk) + bytes_of(self.rows, dim_v)
            stage = round_up(max(keys, part), alignment)
            shared = round_up(teams * (self.stages * stage + 8 * self.rows), alignment)
        else:
            alignment = 1024
            ring = self.stages * self.row_groups * _stage_bytes(problem)
            team = round_up(max(ring, part) if self.cluster else ring + part, alignment)
            queries = tile_bytes(self.rows, round_up(problem.head_dim_qk, 16)) + 8
            shared = teams * (team + 16 * self.stages + 8 * self.rows)
            query_tiles = 1 if self.cluster else self.stages + 1
            shared = round_up(shared + query_tiles * queries, alignment)
        if self.cluster > 1:
            shared += 48 * (self.rows * (problem.head_dim_v // 8) + MOST_BLOCKS) + 16
        return round_up(shared, alignment)

    def part_bytes(self, problem: Problem) -> int:
        """Bytes of what a block leaves to another one (``Left`` in the kernel)."""
        return 4 * self.rows * (self.columns_v(problem) + 2)


#: Warps to which the copy engine brings keys and values, of a block that has a multiprocessor to
#: itself, and of each of two.
_BOX_WARPS, _HALF_WARPS = 8, 4

#: Tiles of each block, where a few blocks more are worth fewer neighbours.
_MANY_TILES = 128


def items_side_by_side(geometry: Geometry, blocks: int) -> int:
    """Items of one batch entry that blocks walk side by side, of so many blocks in all.

    As many as leave hardly any block out: side by side, blocks read rows that are neighbours. Where
    each has many tiles, half as many if that leaves fewer out.
    """
    groups = geometry.heads_q // geometry.heads_together
    widths = [w for w in range(1, min(groups, blocks) + 1) if groups % w == 0]
    used = {width: blocks // width * width for width in widths}
    enough = [width for width in widths if used[width] > 0.95 * blocks]
    widest = max(enough, default=max(widths, key=lambda width: used[width]))
    tiles = geometry.batch * groups * -(-geometry.seq_kv // (16 * _BOX_WARPS))
    has_many = tiles >= _MANY_TILES * used[widest]
    return widest // 2 if has_many and used.get(widest // 2, 0) > used[widest] else widest


#: Warps and stages, the best first.
_SIZES = ((8, 6), (8, 5), (8, 4), (8, 3), (4, 6), (4, 5), (4, 4), (4, 3), (8, 2), (4, 2))

#: Bytes of the rings of a block that has a multiprocessor to itself, for items of so many keys,
#: for shorter ones, and in a cluster; and of each of two blocks, which have two stages for shorter
#: items of their own. Little on its way is best for memory, more for ends of items; blocks of
#: clusters must be so large that no multiprocessor has room for two, which would share what one
#: can read.
LONG_KEYS = 4096
_LONG, _SHORT, _CLUSTERED, _HALF = 64 * 1024, 128 * 1024, 128 * 1024, 32 * 1024

#: Blocks of a cluster at most, and what part of the multiprocessors clusters of each size can have
#: at once: pairs all, more leave some out that have too few neighbours.
MOST_BLOCKS = 8
_ROOM = {2: 1.0, 4: 0.85, 8: 0.85}

#: Keys of a cluster's block at most, and where lengths may differ, which only shares even out.
_MOST_KEYS, _MOST_UNEVEN_KEYS = 4096, 1024

#: What part of the multiprocessors clusters must have, to have items of any length: nearly all; or
#: most, of wide heads, in clusters of eight or with more than 16 rows. Those make parts so large
#: that fewer clusters may still have some tiles for each block.
_NEARLY_ALL, _MOST, _ENOUGH_FOR_LARGE, _TILES_OF_LARGE = 0.9, 0.65, 0.4, 8
#: Tiles of each of a cluster's blocks otherwise, if they have this part, or less.
_SOME, _FEW_TILES, _FEWEST_TILES = 0.3, 4, 2
#: Columns from which on half of all blocks read as fast.
_FEWEST_WIDE = 65

#: Items of a multiprocessor from which on two blocks are better than one where lengths differ; and
#: a larger ring is better for more than 16 rows.
_ENOUGH_ITEMS, _ROUNDS_OF_WIDE = 0.95, 2

#: Items of a multiprocessor, that each have a block: so many that it matters little who is last, or
#: two at once, or nearly; their keys at most, and at least with so many columns.
_MANY_ITEMS, _TWO_ITEMS = 3.8, (1.6, 2.0)
_MOST_ALONE_KEYS, _FEWEST_NARROW_KEYS, _NARROW = 8192, 2048, range(33, 65)


def cluster_of(geometry: Geometry, target: Target) -> int:
    """Blocks of a cluster, if it is best that one has each item; else 0.

    It is where all clusters run at once, and either have hardly any block less than there could be,
    or few tiles for each of theirs.
    """
    items, room = items_of(geometry), target.multiprocessors
    tiles = -(-geometry.seq_kv // (16 * _BOX_WARPS))
    fitting = (n for n, part in _ROOM.items() if items * n <= part * room and n <= tiles)
    blocks = max(fitting, default=0)
    if tiles > blocks * _most_tiles(geometry, blocks, items * blocks / room):
        return 0
    most_keys = _MOST_UNEVEN_KEYS if _differ(geometry) else _MOST_KEYS
    return blocks if geometry.seq_kv <= most_keys * blocks else 0


def _most_tiles(geometry: Geometry, blocks: int, part: float) -> float:
    """Of each of so many blocks of a cluster, where clusters have that part of the multiprocessors:
    more take longer than parts of all blocks do to meet in the workspace."""
    large = rows_of(geometry) > 16
    wide = geometry.tensors["v"].dim[3] >= _FEWEST_WIDE
    if part >= _NEARLY_ALL:
        return math.inf
    if large and (rows_of(geometry) > MOST_BOX_ROWS or not wide):
        return 0
    if part >= _MOST and wide and (large or blocks == MOST_BLOCKS):
        return math.inf
    if part >= _ENOUGH_FOR_LARGE and large:
        return _TILES_OF_LARGE
    return _FEW_TILES if part >= _SOME else _FEWEST_TILES


def stand_alone(geometry: Geometry, target: Target) -> bool:
    """Whether it is best that each item, of 16 rows or fewer, has a block to itself, two of which a
    multiprocessor has at a time.

    A share ends where an item does, too, and all its warps wait for each other there; of two blocks
    one goes on. Where lengths differ, a multiprocessor gets another item as soon as it is through
    with a short one, if none is so long that all others are done before it.
    """
    each = items_of(geometry) / target.multiprocessors
    if _differ(geometry):
        many = max(1, each / _MANY_ITEMS)
        return each >= 1 and geometry.seq_kv <= _MOST_UNEVEN_KEYS * many
    fills = each >= _MANY_ITEMS or _TWO_ITEMS[0] <= each <= _TWO_ITEMS[1]
    fewest = _FEWEST_NARROW_KEYS if geometry.tensors["v"].dim[3] in _NARROW else 0
    return fills and fewest <= geometry.seq_kv <= _MOST_ALONE_KEYS


def rows_of(geometry: Geometry) -> int:
    """Of an item: queries of the heads that share keys."""
    return geometry.seq_q * geometry.heads_together


def items_of(geometry: Geometry) -> int:
    """Of all batch entries: a head of k and v, and the queries that share it."""
    return geometry.batch * geometry.heads_q // geometry.heads_together


def _differ(geometry: Geometry) -> bool:
    """Whether entries may have other lengths than each other."""
    return geometry.batch > 1 and "seq_len_kv" in geometry.tensors


def _tiling(problem: Problem, target: Target, row_groups: int) -> DecodeTiling | None:
    """The best for so many groups of rows, if shared memory has room for one."""
    warpgroups = row_groups % 4 == 0 and target.capability == (9, 0)
    sizes = [(warps, stages) for warps, stages in _SIZES if warps >= row_groups]
    each = (DecodeTiling(warps, row_groups, stages, warpgroups) for warps, stages in sizes)
    return next((t for t in each if t.shared_memory(problem) <= target.shared_memory), None)


def tilings(problem: Problem, target: Target) -> tuple[DecodeTiling, ...]:
    """For at most 16, 32, 64 and 128 rows, those for which shared memory has room."""
    found = (_tiling(problem, target, row_groups) for row_groups in (1, 2, 4, 8))
    return tuple(tiling for tiling in found if tiling)


#: Rows of an item to which the copy engine brings keys, and which clusters take besides: a mailbox
#: has no room for more.
MOST_BOX_ROWS, MOST_CLUSTER_ROWS = 32, 64


def cluster_tiling(
    problem: Problem, target: Target, rows: int, cluster: int
) -> DecodeTiling | None:
    """In clusters, if these take so many rows, for which the copy engine brings no keys."""
    if problem.ragged or target.capability != (9, 0) or rows > MOST_CLUSTER_ROWS:
        return None
    best = next((tiling for tiling in tilings(problem, target) if tiling.rows >= rows), None)
    if best is None:
        return None
    each = (replace(best, cluster=cluster, stages=n) for n in range(best.stages, 1, -1))
    return next((t for t in each if t.shared_memory(problem) <= target.shared_memory), None)


def box_tiling(problem: Problem, ring: int, cluster: int = 0, row_groups: int = 1) -> DecodeTiling:
    """The copy engine fills so many bytes, for a cluster or for shares."""
    stages = max(1, ring // (_BOX_WARPS * _stage_bytes(problem)))
    return DecodeTiling(_BOX_WARPS, row_groups, stages, boxes=True, cluster=cluster)


def half_tiling(problem: Problem) -> DecodeTiling:
    """The same for each of two blocks of a multiprocessor, that share all items."""
    stages = max(1, _HALF // (_HALF_WARPS * _stage_bytes(problem)))
    return DecodeTiling(_HALF_WARPS, 1, stages, boxes=True, min_blocks=2)


def alone_tiling(problem: Problem, seq_kv: int) -> DecodeTiling:
    """The same if each has an item of so many keys to itself."""
    half = replace(half_tiling(problem), cluster=1)
    return half if seq_kv >= LONG_KEYS else replace(half, stages=2)


def _stage_bytes(problem: Problem) -> int:
    """Of a warp to which the copy engine brings 16 keys and values."""
    return slab_bytes(16, problem.head_dim_qk) + slab_bytes(16, problem.head_dim_v)


def box_tilings(problem: Problem, geometry: Geometry, target: Target) -> list[DecodeTiling]:
    """Those that the copy engine brings keys for, the best first."""
    cluster, items = cluster_of(geometry, target), items_of(geometry) / target.multiprocessors
    few_keys = geometry.seq_kv < LONG_KEYS
    if rows_of(geometry) > 16:
        ring = _SHORT if few_keys and items >= _ROUNDS_OF_WIDE else _LONG
        whole = box_tiling(problem, ring, row_groups=2)
        return [box_tiling(problem, _CLUSTERED, cluster, 2), whole] if cluster else [whole]
    whole = box_tiling(problem, _SHORT if few_keys else _LONG)
    halves = half_tiling(problem), alone_tiling(problem, geometry.seq_kv)
    if cluster:
        return [box_tiling(problem, _CLUSTERED, cluster), whole]
    if stand_alone(geometry, target):
        return [*reversed(halves), whole]
    if items < _ENOUGH_ITEMS:
        return [whole]
    return [halves[0], whole, halves[1]] if _differ(geometry) else [whole, *halves]


def all_box_tilings(problem: Problem) -> list[DecodeTiling]:
    """Whatever the geometry: all that are the best of some."""
    rings = ((_LONG, 0), (_SHORT, 0), (_CLUSTERED, MOST_BLOCKS))
    return [
        *(box_tiling(problem, *ring, groups) for ring, groups in product(rings, (1, 2))),
        half_tiling(problem),
        *(alone_tiling(problem, keys) for keys in (1, LONG_KEYS)),
    ]
