"""The decode: ``cuda_src/kernels/decode.cuh``, of few queries to many keys, for compute capability
8.0 and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from dlattn.plans.argument import MappedDecodeParams
from dlattn.plans.cuda import refusal
from dlattn.plans.kernels import KernelLaunch, round_up, tile_bytes
from dlattn.plans.mapped import MappedPlan, slab_bytes
from dlattn.plans.params import Place, drawn_mark, places_of
from dlattn.plans.source import kernel_source
from dlattn.problem import PAGE_TABLES, Direction, Geometry, Problem, TensorSpec
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target
from dlattn.runtime.tensormap import L2_PROMOTION_128B


@dataclass(frozen=True)
class DecodeTiling:
    """How a block divides its work (``DecodeTiling`` in the kernel).

    Attributes:
        warps: warps per block, each of which loads 16 keys and values of a tile.
        row_groups: warps that share keys, for 16 rows each.
        stages: tiles of keys and values in shared memory.
        warpgroups: four warps multiply together, with Hopper's instructions.
        boxes: the copy engine brings keys and values.
        cluster: blocks of a cluster, which have an item together; 0 where all share all items.
    """

    warps: int
    row_groups: int
    stages: int
    warpgroups: bool = False
    boxes: bool = False
    cluster: int = 0

    @property
    def min_blocks(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        flags = (self.warpgroups, self.boxes, self.cluster > 0)
        cpp = ", ".join(str(flag).lower() for flag in flags)
        return f"DecodeTiling<{self.warps}, {self.row_groups}, {self.stages}, {cpp}>"

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
        dim_qk, dim_v = round_up(problem.head_dim_qk, 16), self.columns_v(problem)
        teams, part = self.warps // self.row_groups, 4 * self.rows * (dim_v + 8)
        if not self.boxes:
            alignment, bytes_of = (1024, slab_bytes) if self.warpgroups else (16, tile_bytes)
            keys = bytes_of(self.rows, dim_qk) + bytes_of(self.rows, dim_v)
            stage = round_up(max(keys, part), alignment)
            shared = round_up(teams * (self.stages * stage + 8 * self.rows), alignment)
        else:
            alignment = 1024
            ring = self.stages * (slab_bytes(self.rows, dim_qk) + slab_bytes(self.rows, dim_v))
            team = round_up(max(ring, part) if self.cluster else ring + part, alignment)
            shared = round_up(teams * (team + 16 * self.stages + 8 * self.rows), alignment)
        if self.cluster:
            shared += 48 * (self.rows * (problem.head_dim_v // 8) + MOST_BLOCKS) + 16
        return round_up(shared, alignment)

    def part_bytes(self, problem: Problem) -> int:
        """Bytes of what a block leaves to another one (``Left`` in the kernel)."""
        return 4 * self.rows * (self.columns_v(problem) + 2)


#: Warps of a block to which the copy engine brings keys and values.
_BOX_WARPS = 8

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


#: More of them fill tiles of their own.
MOST_QUERIES = 16

#: For which a warp has the registers.
MOST_HEAD_DIM_QK, MOST_HEAD_DIM_V = 192, 128

#: Warps and stages, the best first.
_SIZES = ((8, 6), (8, 5), (8, 4), (8, 3), (4, 6), (4, 5), (4, 4), (4, 3), (8, 2), (4, 2))

#: Bytes of a block's rings, for items of so many keys, for shorter ones, and in a cluster. Little
#: on its way is best for memory, more for ends of items; blocks of clusters must be so large that
#: no multiprocessor has room for two, which would share what one can read.
_LONG_KEYS = 4096
_LONG, _SHORT, _ALONE = 64 * 1024, 128 * 1024, 128 * 1024

#: Blocks of a cluster at most, and what part of the multiprocessors clusters of each size can have
#: at once: pairs all, more leave some out that have too few neighbours.
MOST_BLOCKS = 8
_ROOM = {2: 1.0, 4: 0.85, 8: 0.85}

#: Keys of a cluster's block at most, and where lengths may differ, which only shares even out; and
#: tiles of each, of 16 rows, where clusters leave multiprocessors out.
_MOST_KEYS, _MOST_UNEVEN_KEYS, _FEW_TILES = 4096, 1024, 4


def cluster_of(geometry: Geometry, target: Target) -> int:
    """Blocks of a cluster, if it is best that one has each item; else 0.

    It is where all clusters run at once, and either have hardly any block less than there could be
    or few tiles for each of theirs.
    """
    items = geometry.batch * geometry.heads_q // geometry.heads_together
    tiles, room = -(-geometry.seq_kv // (16 * _BOX_WARPS)), target.multiprocessors
    fitting = (n for n, part in _ROOM.items() if items * n <= part * room and n <= tiles)
    blocks = max(fitting, default=0)
    few = _FEW_TILES if geometry.seq_q * geometry.heads_together <= 16 else 0
    if items * blocks < 0.9 * room and tiles > few * blocks:
        return 0
    differ = geometry.batch > 1 and "seq_len_kv" in geometry.tensors
    most_keys = _MOST_UNEVEN_KEYS if differ else _MOST_KEYS
    return blocks if geometry.seq_kv <= most_keys * blocks else 0


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


#: Rows of an item that clusters take, beside 16 or fewer: a mailbox has no room for more, others
#: have not been measured.
_CLUSTER_ROWS = range(33, 65)


def cluster_tiling(
    problem: Problem, target: Target, rows: int, cluster: int
) -> DecodeTiling | None:
    """For so many rows, more than 16, in clusters, if these take them."""
    if problem.ragged or target.capability != (9, 0) or rows not in _CLUSTER_ROWS:
        return None
    best = next((tiling for tiling in tilings(problem, target) if tiling.rows >= rows), None)
    if best is None:
        return None
    each = (replace(best, cluster=cluster, stages=n) for n in range(best.stages, 1, -1))
    return next((t for t in each if t.shared_memory(problem) <= target.shared_memory), None)


def box_tiling(problem: Problem, ring: int, cluster: int = 0) -> DecodeTiling:
    """For at most 16 rows: the copy engine fills so many bytes, for a cluster or for shares."""
    stage = slab_bytes(16, problem.head_dim_qk) + slab_bytes(16, problem.head_dim_v)
    stages = max(1, ring // (_BOX_WARPS * stage))
    return DecodeTiling(_BOX_WARPS, 1, stages, boxes=True, cluster=cluster)


class Decode(MappedPlan):
    """Keys split among all blocks, and heads that share keys packed into the rows of products."""

    name = "decode"
    argument_type = MappedDecodeParams

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: DecodeTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or self.choices(problem, geometry, target)[0]
        self._params.heads_per_block = geometry.heads_together
        self._params.heads_per_wave = (
            geometry.heads_q // geometry.heads_together
            if self.tiling.cluster
            else items_side_by_side(geometry, target.multiprocessors)
        )
        self._params.parts.mark = drawn_mark()

    def l2_promotion(self, spec: TensorSpec) -> int:
        return L2_PROMOTION_128B  # each byte is read once

    def box_rows(self) -> Mapping[str, int]:
        return {"k": 16, "v": 16} if self.tiling.boxes else {}

    @classmethod
    def skipping(cls, problem: Problem) -> Problem:
        return problem.without_score_blocks

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = refusal(problem, geometry, target, Direction.FORWARD, cls.name)
        if reason is not None:
            return reason
        for name, dim, most in (
            ("q and k", problem.head_dim_qk, MOST_HEAD_DIM_QK),
            ("v", problem.head_dim_v, MOST_HEAD_DIM_V),
        ):
            if dim > most:
                return f"the head dimension of {name} must be at most {most}; got {dim}."
        if geometry.seq_q > MOST_QUERIES:
            return f"it takes at most {MOST_QUERIES} queries; the graph has {geometry.seq_q}."
        rows = geometry.seq_q * geometry.heads_together
        most_rows = max((tiling.rows for tiling in tilings(problem, target)), default=0)
        if rows > most_rows:
            return (
                f"it takes at most {most_rows} rows, queries times heads that share keys; the "
                f"graph has {rows}."
            )
        if problem.access_bytes != 16:
            return "it needs 16-byte aligned tensors and strides."
        if problem.dropout is not None:
            return "it has no dropout, which decoding never has."
        whole = cls.skipping(problem)
        widest = 96 if whole.reads_tables else 128 if whole.gathers else MOST_HEAD_DIM_QK
        if max(problem.head_dim_qk, problem.head_dim_v) > widest:
            return (
                "a score_mod that reads elements of tensors leaves too few registers for head "
                f"dimensions above {widest}."
            )
        if whole.has_blocks:
            return "its few queries are in one block of a block mask, which skips nothing else."
        if geometry.batch * geometry.heads_q * -(-geometry.seq_kv // 64) >= 2**31:
            return "batch x heads x (keys / 64) must be below 2**31."
        return None

    @classmethod
    def choices(
        cls, problem: Problem, geometry: Geometry, target: Target
    ) -> Sequence[DecodeTiling]:
        rows = geometry.seq_q * geometry.heads_together
        portable = [tiling for tiling in tilings(problem, target) if tiling.rows >= rows]
        cluster = cluster_of(geometry, target)
        if rows > 16 and cluster:
            clustered = cluster_tiling(problem, target, rows, cluster)
            return [clustered, *portable] if clustered else portable
        if rows > 16 or not cls._has_boxes(problem, geometry, target):
            return portable
        ring = _LONG if geometry.seq_kv >= _LONG_KEYS else _SHORT
        boxes = [box_tiling(problem, ring)]
        if cluster:
            boxes.insert(0, box_tiling(problem, _ALONE, cluster))
        return [*boxes, *portable]

    @classmethod
    def _has_boxes(cls, problem: Problem, geometry: Geometry, target: Target) -> bool:
        """Whether the copy engine can bring 16 rows at a time."""
        pages = (geometry.page_size(role) for role in PAGE_TABLES)
        if problem.ragged or any(page is not None and page % 16 for page in pages):
            return False
        return cls.mapping_refusal(problem, geometry, target) is None

    @property
    def _items(self) -> int:
        return self.geometry.batch * self.geometry.heads_q // self.geometry.heads_together

    @cached_property
    def _blocks(self) -> int:
        """Blocks of a cluster for each item; or as many as run at a time: none waits for one that
        has not begun."""
        if self.tiling.cluster:
            return self._items * self.tiling.cluster
        geometry, keys, width = self.geometry, 16 * self.tiling.warps, self._params.heads_per_wave
        tiles = self._items // width * (1 + -(-geometry.seq_kv // keys))
        return width * min(tiles, self.target.multiprocessors // width)

    @cached_property
    def scratch_bytes(self) -> int:
        if self.tiling.cluster:
            return 0
        return round_up(self._blocks * (self.tiling.part_bytes(self.problem) + 8), 256)

    def scratch_places(self) -> list[Place]:
        if self.tiling.cluster:
            return []
        parts, nbytes = self._params.parts, self._blocks * self.tiling.part_bytes(self.problem)
        return places_of([(parts, "data", nbytes), (parts, "marks", 8 * self._blocks)])

    def kernels(self) -> list[KernelLaunch]:
        source, shared = self._source(self.tiling), self.tiling.shared_memory(self.problem)
        return [
            KernelLaunch(
                source,
                (self._blocks, 1, 1),
                self.tiling.threads,
                shared,
                cluster=max(1, self.tiling.cluster),
                programmatic=self.target.capability >= (9, 0),
            )
        ]

    def companions(self) -> list[KernelSource]:
        found = {tiling.cpp: tiling for tiling in tilings(self.problem, self.target)}
        clustered = cluster_tiling(self.problem, self.target, _CLUSTER_ROWS[-1], MOST_BLOCKS)
        if clustered:
            found[clustered.cpp] = clustered
        if self._has_boxes(self.problem, self.geometry, self.target):
            rings = ((_LONG, 0), (_SHORT, 0), (_ALONE, MOST_BLOCKS))
            boxes = [box_tiling(self.problem, *ring) for ring in rings]
            found |= {tiling.cpp: tiling for tiling in boxes}
        return [self._source(it) for cpp, it in found.items() if cpp != self.tiling.cpp]

    def _source(self, tiling: DecodeTiling) -> KernelSource:
        return kernel_source(
            self.name,
            self.problem,
            tiling,
            tiling.shared_memory(self.problem),
            argument=MappedDecodeParams,
            constants={"part_bytes": tiling.part_bytes(self.problem)},
        )
