"""The Hopper forward: ``cuda_src/kernels/fwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from dlattn.plans.argument import MappedFwdParams
from dlattn.plans.cuda import MOST_HOPPER_HEAD_DIM, refusal
from dlattn.plans.fwd_sm90_shares import (
    WAVE_BYTES,
    asks_for_tiles,
    choose_tiling,
    may_share_more,
    shared_by_heads,
    shared_out,
    tile_heads,
    tiles_of_heads,
    visited,
)
from dlattn.plans.kernels import (
    MOST_BLOCKS,
    FirstScratch,
    KernelLaunch,
    pairs_per_wave,
    query_tiles,
    round_up,
)
from dlattn.plans.mapped import MappedPlan, bias_rows, bias_tile_bytes, slab_bytes, staged
from dlattn.plans.params import Place, drawn_mark, places_of
from dlattn.plans.ragged import Items, RaggedScratch
from dlattn.plans.schedule import Array, shared_tiles, table, tile_costs
from dlattn.plans.source import kernel_source
from dlattn.problem import Direction, Geometry, GivenMask, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.plans.tile_order import TileOrderScratch

#: Rows of zeros that one copy stores (``zero_rows`` in the kernel).
ZERO_ROWS = 16

#: Widths of the output product; the next one at or above head_dim_v is computed.
VALUE_COLUMNS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Sm90FwdTiling:
    """How a Hopper forward block divides its work (``Sm90FwdTiling`` in the kernel).

    Attributes:
        consumers: warpgroups of 64 query rows each, 2 to 4.
        tile_k: keys per tile.
        stages: key tiles, and value tiles, in shared memory.
        q_stages: query tiles in shared memory.
        ping_pong: consumers take turns at the tensor cores.
        exponentials_first: before the wait for the output of the tile before, or after it.
        stages_bias: a bias comes through shared memory, too.
        shares_more: blocks share the keys of query tiles under a band, too, which gives each its
            own; where the parts of a tile are many, they leave them to a kernel of its own; and
            two heads may share a consumer.
    """

    consumers: int
    tile_k: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = False
    exponentials_first: bool = True
    stages_bias: bool = False
    shares_more: bool = False

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def min_blocks(self) -> int:
        return 1

    @property
    def cpp(self) -> str:
        ping_pong, first = str(self.ping_pong).lower(), str(self.exponentials_first).lower()
        cpp = (
            f"Sm90FwdTiling<{self.consumers}, {self.tile_k}, {self.stages}, {self.q_stages}, "
            f"{ping_pong}, {first}>"
        )
        return f"SharesMore<{cpp}>" if self.shares_more else cpp

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dim_qk, dim_v = problem.head_dim_qk, value_columns(problem)
        q, o = slab_bytes(self.tile_q, dim_qk), slab_bytes(self.tile_q + ZERO_ROWS, 64)
        k_and_v = slab_bytes(self.tile_k, dim_qk) + slab_bytes(self.tile_k, dim_v)
        items = 3 * (64 * (1 + self.consumers) + 2 * 8)
        rings = self.q_stages * self.consumers + 2 * self.stages + self.consumers
        barriers = 8 * 4 + 2 * 8 * rings
        asking = 2 * 4
        visits = 4 * self.stages if problem.has_blocks else self.stages
        bias = self.consumers
        if self.stages_bias:
            bias *= bias_tile_bytes(problem, 64, self.tile_k)
        tiles = self.q_stages * q + o + self.stages * k_and_v + bias
        return round_up(tiles + items + visits + barriers + asking, 1024)


@dataclass(frozen=True)
class PartsTiling:
    """How the kernel that puts parts together divides its work (``FwdParts`` in the kernel).

    Attributes:
        of: the tiling that has left them.
        threads: of a block, at the most.
        columns: of the 16 rows that a block has.
        at_a_time: parts that a warp loads.
    """

    of: Sm90FwdTiling
    threads: int = 256
    min_blocks: int = 2
    columns: int = 32
    at_a_time: int = 4

    @property
    def cpp(self) -> str:
        return self.of.cpp

    @property
    def sum_bytes(self) -> int:
        """Of shared memory, for each warp but the first."""
        return 32 * 16 * (1 + self.columns // 8)


def value_columns(problem: Problem) -> int:
    """Columns of the output product: a width of wgmma, not below head_dim_v."""
    return next(width for width in VALUE_COLUMNS if width >= problem.head_dim_v)


def is_positive(problem: Problem) -> bool:
    """Whether the scale is known to be."""
    return any(isinstance(edit, Scale) and edit.positive for edit in problem.edits)


def tilings(problem: Problem) -> tuple[Sm90FwdTiling, ...]:
    """The fastest tilings (``bench/NOTES.md``): for many query tiles, then for fewer than there are
    multiprocessors."""
    dim_qk, dim_v = problem.head_dim_qk, problem.head_dim_v
    largest = max(dim_qk, dim_v)
    if problem.has_aligned_bias and largest <= 128:
        tiling = Sm90FwdTiling(2, 128, stages_bias=True, ping_pong=True)
        if largest <= 64:
            # A scale of either sign takes a register more.
            keys = 128 if is_positive(problem) else 64
            tiling = replace(tiling, tile_k=keys, stages=3, q_stages=2)
        return (tiling,)
    crowded = problem.keeps_scores and problem.has_bias and largest > 64
    crowded |= problem.has_program and largest > (64 if problem.has_blocks else 128)
    if crowded and problem.has_program and problem.ragged and largest > 128:
        return (Sm90FwdTiling(2, 32, stages=4),)
    if problem.gathers and problem.dropout and largest <= 64:
        return (Sm90FwdTiling(2, 64, stages=3, q_stages=2, ping_pong=True),)
    if crowded and largest <= 192:
        return (Sm90FwdTiling(2, 64, ping_pong=True),)
    # Four consumers have no registers for edits or dropout, and do not divide blocks.
    if largest <= 64 and (problem.is_edited or problem.dropout or problem.has_blocks):
        return (Sm90FwdTiling(2, 128, stages=3, q_stages=2, ping_pong=True),)
    if largest <= 64:
        short = Sm90FwdTiling(2, 128, stages=3, q_stages=2, ping_pong=True)
        # Their scheduler has no registers to divide by other numbers, nor beside other results.
        more = problem.sink or problem.score_max or problem.score_sum_exp
        more |= (problem.paged_k or problem.paged_v) and not is_positive(problem)
        if dim_v & (dim_v - 1) or largest <= 32 or more:
            return (short,)
        return Sm90FwdTiling(4, 64, stages=6, q_stages=2), short
    if largest <= 128:
        # A soft cap takes longer than the other's products: consumers would wait for their turns.
        caps = problem.keeps_scores and not problem.has_program
        return (Sm90FwdTiling(2, 128, q_stages=2, ping_pong=not caps),)
    if dim_qk <= 192 and dim_v <= 128:
        return (Sm90FwdTiling(2, 128, ping_pong=True),)
    if largest <= 192 and problem.has_blocks:
        return (Sm90FwdTiling(2, 64, stages=3, ping_pong=True),)
    if largest <= 192 and problem.adds_to_scores and problem.ragged:
        return (Sm90FwdTiling(2, 64, ping_pong=True),)
    if largest <= 192:
        return (Sm90FwdTiling(2, 96, ping_pong=True),)
    given_mask = isinstance(problem.dropout, GivenMask)
    if problem.adds_to_scores or problem.has_blocks or given_mask:
        return (Sm90FwdTiling(2, 32, stages=4),)
    return (Sm90FwdTiling(2, 64),)


class FwdSm90(MappedPlan):
    """FlashAttention-3's forward with wgmma, TMA and warp specialisation."""

    name = "fwd_sm90"
    argument_type = MappedFwdParams

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: Sm90FwdTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        tiling = tiling or self.choices(self.problem, geometry, target)[0]
        self.tiling = shared_out(self.problem, geometry, tiling, target.multiprocessors)
        shape = self.problem, geometry, self.tiling
        self._heads_per_tile, self._sharing = shared_by_heads(*shape, target.multiprocessors)
        self._params.heads_per_block = self._heads_per_tile
        self._params.parts.mark = drawn_mark()
        if problem.ragged:
            self._params.heads_per_wave = pairs_per_wave(problem, geometry, WAVE_BYTES)
        if self._tile_order is not None:
            self._tile_order.describe(self._params)
        if "debug_softmax" not in geometry.tensors:
            # The copy engine has maps of them; only the kernel of debug_softmax reads by address.
            self._slots = [it for it in self._slots if it[0] not in ("q", "k", "v")]

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = refusal(
            problem, geometry, target, Direction.FORWARD, cls.name, MOST_HOPPER_HEAD_DIM
        )
        if reason is not None:
            return reason
        if query_tiles(geometry, 128) > MOST_BLOCKS:
            return "batch x heads x (queries / 128) must be below 2**31."
        return cls.mapping_refusal(problem, geometry, target)

    @classmethod
    def choices(
        cls, problem: Problem, geometry: Geometry, target: Target
    ) -> Sequence[Sm90FwdTiling]:
        problem = cls.skipping(problem)
        known, multiprocessors = tilings(problem), target.multiprocessors
        best = choose_tiling(problem, geometry, known, multiprocessors)
        ordered = (best, *(tiling for tiling in known if tiling != best))
        return [shared_out(problem, geometry, it, multiprocessors) for it in ordered]

    def box_rows(self) -> Mapping[str, int]:
        tiling = self.tiling
        keys = {role: self.paged_rows(role, tiling.tile_k) for role in "kv"}
        heads_per_consumer = -(-self._heads_per_tile // tiling.consumers)
        rows = {"q": 64 // heads_per_consumer, **keys, "o": ZERO_ROWS}
        return rows | {"bias": bias_rows(self.problem, 64)} if tiling.stages_bias else rows

    def schedule(self) -> Array:
        """See :func:`dlattn.plans.schedule.table`."""
        keys = visited(self.problem, self.geometry, self.tiling)
        return table(
            tile_costs(*keys),
            tile_heads(self.geometry, self._heads_per_tile),
            self.geometry.batch,
            max(1, pairs_per_wave(self.problem, self.geometry, WAVE_BYTES) // self._heads_per_tile),
            self._blocks,
            keys if self._sharing.blocks else None,
            self._sharing.beside,
        )

    @cached_property
    def _asks_for_tiles(self) -> bool:
        return asks_for_tiles(self.problem, self.geometry)

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        if not self.problem.ragged:
            return None
        tile_q = self.tiling.tile_q
        items = Items(tile_q, query_tiles(self.geometry, tile_q), of_keys=False, last_first=True)
        return RaggedScratch(self.geometry, items=items)

    @property
    def _may_order_tiles(self) -> bool:
        """Whether there is an order: packed batches have theirs, the longest sequences first."""
        return self.problem.has_blocks and not self.problem.ragged

    @cached_property
    def _tile_order(self) -> TileOrderScratch | None:
        if not self._may_order_tiles:
            return None
        from dlattn.plans.tile_order import TileOrderScratch, orders_tiles

        if not orders_tiles(self.geometry, self.target.multiprocessors):
            return None
        if self.score_blocks is not None:
            return TileOrderScratch(self.problem, self.geometry, self.score_blocks.entries)
        batch, heads, *_ = self.geometry.tensors["block_mask"].dim
        return TileOrderScratch(self.problem, self.geometry, (batch, heads))

    def first_scratch(self) -> list[FirstScratch]:
        order = [] if self._tile_order is None else [self._tile_order]
        return [*super().first_scratch(), *order]

    @cached_property
    def scratch_bytes(self) -> int:
        if self._asks_for_tiles:
            return 256  # the counter of tiles asked for, and its mark
        return self._marks_bytes + self._parts_bytes

    def scratch_places(self) -> list[Place]:
        parts = self._params.parts
        if self._asks_for_tiles:
            return places_of([(parts, "marks", 8), (self._params, "items_taken", 248)])
        if not self._sharing.blocks:
            return []
        return places_of([(parts, "marks", self._marks_bytes), (parts, "data", self._parts_bytes)])

    @property
    def _marks_bytes(self) -> int:
        """Of a mark for each warp that leaves a part of its rows."""
        return round_up(8 * self._sharing.blocks * self.tiling.tile_q // 16, 256)

    @property
    def _parts_bytes(self) -> int:
        """Of fp32 outputs, a maximum and a sum of each lane's rows (``KeyParts`` in the kernel)."""
        lanes = 2 * self.tiling.tile_q
        parts = self._sharing.blocks * (1 + self._sharing.apart)
        return parts * 16 * (value_columns(self.problem) // 8 + 1) * lanes

    @property
    def _tiles(self) -> int:
        return tiles_of_heads(self.geometry, self.tiling.tile_q, self._heads_per_tile)

    @cached_property
    def _shared_tiles(self) -> Array:
        return shared_tiles(self.schedule(), self._blocks)

    @property
    def _blocks(self) -> int:
        return self._sharing.blocks or min(self._tiles, self.target.multiprocessors)

    def build(self) -> None:
        if self._operations is not None:
            return
        if not self._asks_for_tiles:
            self._params.schedule = self._tables.place(self.schedule())
            if self._sharing.apart:
                self._params.parts.tiles = self._tables.place(self._shared_tiles)
        super().build()  # last: from then on another thread may execute

    def kernels(self) -> list[KernelLaunch]:
        source = self._source(self.tiling)
        shared = self.tiling.shared_memory(self.problem)
        grid, is_later = (self._blocks, 1, 1), bool(self.first_scratch())
        main = KernelLaunch(source, grid, self.tiling.threads, shared, programmatic=is_later)
        return [main, self._parts_kernel()] if self._sharing.apart else [main]

    def _parts_kernel(self) -> KernelLaunch:
        """The kernel that puts the parts of shared tiles together."""
        tiles, tiling = self._shared_tiles.reshape(-1, 8), PartsTiling(self.tiling)
        slices = value_columns(self.problem) // tiling.columns
        grid = len(tiles) * self.tiling.tile_q // 16 * slices
        warps = min(-(-int(tiles[:, 6].max()) // tiling.at_a_time), tiling.threads // 32)
        source, shared = self._parts_source(self.tiling), (warps - 1) * tiling.sum_bytes
        return KernelLaunch(source, (grid, 1, 1), 32 * warps, shared, True, programmatic=True)

    def companions(self) -> list[KernelSource]:
        return self._of_others(tilings(self.problem))

    def elsewhere(self) -> list[KernelSource]:
        return self._of_others([replace(self.tiling, shares_more=False)])

    def _of_others(self, its: Sequence[Sm90FwdTiling]) -> list[KernelSource]:
        """What other numbers of tiles and blocks take of these tilings, which share no more."""
        more = [replace(it, shares_more=True) for it in its if may_share_more(self.problem, it)]
        sources = [self._source(tiling) for tiling in (*its, *more) if tiling != self.tiling]
        if self._may_order_tiles and self._tile_order is None:
            from dlattn.plans.tile_order import tile_order_source

            sources.append(tile_order_source(self.problem))
        return sources + [self._parts_source(tiling) for tiling in more]

    def _parts_source(self, tiling: Sm90FwdTiling) -> KernelSource:
        its = PartsTiling(tiling)
        constants = {"value_columns": value_columns(self.problem)}
        return kernel_source("fwd_parts", self.problem, its, its.sum_bytes, constants=constants)

    def _source(self, tiling: Sm90FwdTiling) -> KernelSource:
        return kernel_source(
            self.name,
            staged(self.problem) if tiling.stages_bias else self.problem,
            tiling,
            tiling.shared_memory(self.problem),
            argument=MappedFwdParams,
            constants={"value_columns": value_columns(self.problem)},
        )
