"""The Hopper forward: ``cuda_src/kernels/fwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dlattn.plans.argument import Divisor, MappedFwdParams, TileHeadsRef
from dlattn.plans.cuda import MOST_HOPPER_HEAD_DIM, refusal
from dlattn.plans.few_queries import kernels_of_other
from dlattn.plans.fwd_sm90_shares import WAVE_BYTES, Shares, pairs_at_work
from dlattn.plans.fwd_sm90_tiles import asks_for_tiles, may_share_more, tiles_of_heads, visited
from dlattn.plans.fwd_sm90_tiling import (
    OUTPUT_ROWS,
    PartsTiling,
    Sm90FwdTiling,
    tilings,
    value_columns,
)
from dlattn.plans.kernels import (
    MOST_BLOCKS,
    FirstScratch,
    KernelLaunch,
    pairs_per_wave,
    query_tiles,
    round_up,
)
from dlattn.plans.mapped import MappedPlan, bias_rows, staged
from dlattn.plans.params import Place, drawn_mark, places_of
from dlattn.plans.ragged import Items, RaggedScratch
from dlattn.plans.schedule import Array, shared_tiles, table, tile_costs
from dlattn.plans.source import kernel_source
from dlattn.problem import Direction, Geometry, Problem
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.plans.tile_order import TileOrderScratch


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
        shares = Shares(self.problem, geometry, target.multiprocessors)
        self.tiling = shares.shared_out(tiling or shares.best(tilings(self.problem)))
        self._heads, self._sharing, _ = shares.by_heads(self.tiling)
        self._params.heads_per_block = Divisor.of(self._heads.tile)
        self._params.tile_heads = self._tile_heads()
        self._params.log2_head_rows = self._heads.rows.bit_length() - 1
        self._params.parts_per_tile = self._heads.parts(self.tiling)
        self._params.parts.mark = drawn_mark()
        if problem.ragged:
            self._params.items.pairs = Divisor.of(pairs_per_wave(problem, geometry, WAVE_BYTES))
        if self._tile_order is not None:
            self._tile_order.describe(self._params)
        if "debug_softmax" not in geometry.tensors:
            # The copy engine has maps of them; only the kernel of debug_softmax reads by address.
            self._slots = [it for it in self._slots if it[0] not in ("q", "k", "v")]

    def _tile_heads(self) -> TileHeadsRef:
        geometry, of_keys = self.geometry, -(-self.geometry.heads_together // self._heads.tile)
        numbers = (
            len(self._heads.first(geometry)),
            of_keys,
            geometry.heads_together,
            self._sharing.beside,
        )
        return TileHeadsRef(*map(Divisor.of, numbers))

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
        known, shares = tilings(problem), Shares(problem, geometry, target.multiprocessors)
        best = shares.best(known)
        return [shares.shared_out(it) for it in (best, *(it for it in known if it != best))]

    def box_rows(self) -> Mapping[str, int]:
        tiling = self.tiling
        keys = {role: self.paged_rows(role, tiling.tile_k) for role in "kv"}
        rows = {"q": self._heads.rows, **keys, "o": OUTPUT_ROWS}
        return rows | {"bias": bias_rows(self.problem, 64)} if tiling.stages_bias else rows

    def visited(self) -> tuple[Array, Array]:
        """See :func:`dlattn.plans.schedule.visited_keys`."""
        return visited(self.problem, self.geometry, self.tiling, self._heads)

    def schedule(self) -> Array:
        """See :func:`dlattn.plans.schedule.table`."""
        keys, heads = self.visited(), self._heads
        costs = tile_costs(*keys)
        return table(
            costs,
            heads.first(self.geometry),
            self.geometry.batch,
            pairs_at_work(self.problem, self.geometry, costs, heads, self._blocks),
            self._blocks,
            keys if self._sharing.blocks else None,
            self._sharing.beside,
            self.tiling.alternates,
        )

    @cached_property
    def _asks_for_tiles(self) -> bool:
        return asks_for_tiles(self.problem, self.geometry)

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        if not self.problem.ragged:
            return None
        rows = self._heads.tile_rows(self.tiling)
        # Blocks read the first of theirs before they know how many there are.
        most = max(self._tiles, self.target.multiprocessors)
        items = Items(rows, most, of_keys=False, last_first=True)
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
        return self._marks_bytes + self._parts_bytes + self._told_bytes

    def scratch_places(self) -> list[Place]:
        parts, marks = self._params.parts, 8 * self._marks
        places: list[tuple[Any, str, int]] = [(parts, "marks", self._marks_bytes)]
        if self._asks_for_tiles:
            left = self._marks_bytes - marks
            places = [(parts, "marks", marks), (self._params, "items_taken", left)]
        if self._sharers:
            places.append((parts, "data", self._parts_bytes))
        if self._tells_parts:
            places.append((parts, "tiles", self._told_bytes))
        return places_of(places if self._marks else [])

    @cached_property
    def _sharers(self) -> int:
        """Blocks that share the keys of query tiles, or do if the device finds that they had
        better."""
        if self._asks_for_tiles:
            most, beside = self.target.multiprocessors, self._sharing.beside
            return most // beside * beside if self.tiling.shares_more else 0
        return self._sharing.blocks

    @property
    def _marks(self) -> int:
        """One of each warp that leaves a part of its rows; one beside the counter of tiles asked
        for, where no part is left."""
        return max(self._sharers * self.tiling.tile_q // 16, int(self._asks_for_tiles))

    @property
    def _marks_bytes(self) -> int:
        """Of the marks, and of that counter."""
        return round_up(8 * (self._marks + self._asks_for_tiles), 256)

    @property
    def _parts_bytes(self) -> int:
        """Of fp32 outputs, a maximum and a sum of each lane's rows (``KeyParts`` in the kernel)."""
        lanes = 2 * self.tiling.tile_q
        parts = self._sharers * (1 + self._sharing.apart)
        return parts * 16 * (value_columns(self.problem) // 8 + 1) * lanes

    @property
    def _tells_parts(self) -> bool:
        """Whether the device finds out which parts of query tiles there are."""
        return self._asks_for_tiles and self._sharing.apart

    @property
    def _told_bytes(self) -> int:
        """What it tells of them, like :func:`~dlattn.plans.schedule.shared_tiles`."""
        return round_up(32 * self._tiles, 256) if self._tells_parts else 0

    @property
    def _tiles(self) -> int:
        return tiles_of_heads(self.geometry, self.tiling, self._heads)

    @cached_property
    def _shared_tiles(self) -> Array:
        return shared_tiles(self.schedule(), self._blocks)

    @property
    def _blocks(self) -> int:
        return self._sharers or min(self._tiles, self.target.multiprocessors)

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
        beside = self._sharing.beside
        grid = (beside, self._blocks // beside, 1)
        early = bool(self.first_scratch()) or self._sharing.apart
        main = KernelLaunch(source, grid, self.tiling.threads, shared, programmatic=early)
        return [main, self._parts_kernel()] if self._sharing.apart else [main]

    def _parts_kernel(self) -> KernelLaunch:
        """The kernel that puts the parts of shared tiles together."""
        tiling = PartsTiling(self.tiling)
        if self._tells_parts:  # of each as many, or one more
            tiles, most_parts = self._tiles, -(-self._blocks // self._tiles) + 1
        else:
            told = self._shared_tiles.reshape(-1, 8)
            tiles, most_parts = len(told), int(told[:, 6].max())
        slices = -(-value_columns(self.problem) // tiling.columns)
        grid = tiles * self.tiling.tile_q // 16 * slices
        warps = min(-(-most_parts // tiling.at_a_time), tiling.threads // 32)
        source, shared = self._parts_source(self.tiling), (warps - 1) * tiling.sum_bytes
        return KernelLaunch(source, (grid, 1, 1), 32 * warps, shared, True, programmatic=True)

    def companions(self) -> list[KernelSource]:
        return [*self.other_tilings(), *kernels_of_other(self, "decode")]

    def other_tilings(self) -> list[KernelSource]:
        """The same of other tilings."""
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
        constants = self._constants(tiling)
        return kernel_source("fwd_parts", self.problem, its, its.sum_bytes, constants=constants)

    def _source(self, tiling: Sm90FwdTiling) -> KernelSource:
        return kernel_source(
            self.name,
            staged(self.problem) if tiling.stages_bias else self.problem,
            tiling,
            tiling.shared_memory(self.problem),
            argument=MappedFwdParams,
            constants=self._constants(tiling),
        )

    def _constants(self, tiling: Sm90FwdTiling) -> dict[str, int]:
        return {
            "value_columns": value_columns(self.problem),
            "output_slabs": tiling.output_slabs(self.problem),
        }
