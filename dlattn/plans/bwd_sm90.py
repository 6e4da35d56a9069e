"""The Hopper backward: ``cuda_src/kernels/bwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from dlattn.plans import bwd_dbias_sm90
from dlattn.plans.argument import Divisor, MappedBwdParams
from dlattn.plans.backward import BackwardPlan, backward_refusal
from dlattn.plans.bwd_division import (
    Division,
    divided_causal,
    divided_end,
    divided_group,
    divided_ragged_group,
)
from dlattn.plans.bwd_relay import relays
from dlattn.plans.bwd_sm90_refusal import register_refusal
from dlattn.plans.bwd_sm90_tiling import (
    RowTiling,
    Sm90BwdTiling,
    choose_tiling,
    may_add_keys,
    relaying,
    result_width,
    tilings,
    with_few_steps,
)
from dlattn.plans.bwd_waves import pairs_of_causal_waves, ragged_wave
from dlattn.plans.cuda import MOST_HOPPER_HEAD_DIM
from dlattn.plans.kernels import KernelLaunch
from dlattn.plans.mapped import MappedPlan, bias_rows, staged
from dlattn.plans.ragged import Items, RaggedScratch
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target

#: Sums of dQ that wider waves of a fixed order may add to at a time: L2 has room for more, but
#: others are in it, too.
MOST_WAVE_SUM_BYTES = 16 << 20
#: Sums that full waves may add to whose pairs have at most so many key tiles; else so many pairs,
#: and at the most where pairs have lengths.
FEW_TILES, MOST_SHORT_SUM_BYTES, MOST_SHORT_PAIRS = 4, 6 << 20, 8


class BwdSm90(MappedPlan, BackwardPlan):
    """wgmma, TMA and specialised warpgroups: two compute dK and dV, one dQ, one loads and adds."""

    name = "bwd_sm90"
    argument_type = MappedBwdParams
    stores_dq = True
    tiling: Sm90BwdTiling

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: Sm90BwdTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or self._choose_tiling()
        self._division: Division | None = None
        if tiling is None and (self._key_tiles == 1 or not self.tiling.relays):
            self._division = self._divide()
            self.tiling = replace(self.tiling, adds_keys=self._division is not None)
        elif self.tiling.adds_keys:
            self._division = self._divide() or Division(super()._heads_per_block, whole_items=0)
        self.set_waves()
        items, division = self._pairs * self._key_tiles, self._division
        # KeySums numbers tiles pair by pair.
        assert division is None or not division.whole_items or self._wave_pairs == 1
        self._params.whole_items = items if division is None else division.whole_items
        self._params.items.parts = Divisor.of(self._parts)
        self._params.lone_shares = self._lone_shares
        tiles = self._heads_per_block * self._query_tiles
        self._params.shares.tiles = -(-tiles // (self._key_tiles * self.tiling.cluster))
        # In parts, where they are fewer than blocks.
        lone_parts = self._blocks(items) // max(1, items - self._params.lone_shares)
        self._params.shares.lone_parts = Divisor.of(max(1, lone_parts))

    def _divide(self) -> Division | None:
        """Items in parts, if that is better."""
        if not may_add_keys(self.problem, self.tiling):
            return None
        group = super()._heads_per_block
        items = self.geometry.batch * self.geometry.heads_q // group * self._key_tiles
        steps = group * self._query_tiles
        given, at_once = (self.problem, self.geometry, group), self._items_at_once
        tiles = self.tiling.tile_q, self.tiling.tile_k
        sum_bytes = 4 * self.geometry.seq_q * self._dq_columns
        if self.problem.ragged:
            return divided_ragged_group(*given, tiles, at_once, sum_bytes)
        by_heads = divided_group(*given, tiles, at_once, sum_bytes)
        heads = group if by_heads is None else by_heads.heads
        few = divided_causal(*given, heads, tiles, at_once)
        return few or by_heads or divided_end(*given, items, at_once, steps)

    @property
    def _parts(self) -> int:
        """Of the queries of items that are not whole."""
        return 1 if self._division is None else self._division.parts

    def _part_count(self, items: int) -> int:
        whole = self._params.whole_items
        return whole + (items - whole) * self._parts

    def _blocks(self, items: int) -> int:
        """How many blocks, or clusters of them, the main kernel has."""
        return min(self._part_count(items), self._items_at_once)

    @property
    def _lone_shares(self) -> int:
        """The first item whose share of dQ goes with no item. Those of the last waves, where that
        would be a part, do not: others of their pairs may be parts that are taken later."""
        items, lag = self._pairs * self._key_tiles, self._params.dq_lag
        whole = self._params.whole_items
        first = max(0, self._part_count(items) - lag)
        if self._parts == 1:
            return first
        return min(first, whole // self._wave_items * self._wave_items)

    def _choose_tiling(self) -> Sm90BwdTiling:
        tiling = choose_tiling(self.problem)
        if relays(self.problem, self.geometry, tiling.tile_q, tiling.tile_k):
            return relaying(tiling) or self._with_few_steps(tiling)
        return self._with_few_steps(tiling)

    def _with_few_steps(self, tiling: Sm90BwdTiling) -> Sm90BwdTiling:
        steps = super()._heads_per_block * -(-self.geometry.seq_q // tiling.tile_q)
        return with_few_steps(tiling, self.problem, steps)

    @classmethod
    def skipping(cls, problem: Problem) -> Problem:
        apart = problem.masked_apart
        return problem.without_score_blocks if register_refusal(apart) else apart

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = backward_refusal(problem, geometry, target, cls.name, MOST_HOPPER_HEAD_DIM)
        if problem.ragged and not all(map(geometry.is_ragged, ("dQ", "dK", "dV"))):
            reason = reason or "beside ragged tensors, it takes ragged dQ, dK and dV only."
        reason = reason or cls.mapping_refusal(problem, geometry, target)
        return reason or register_refusal(cls.skipping(problem))

    def box_rows(self) -> Mapping[str, int]:
        queries = self.tiling.tile_q // self.tiling.cluster
        keys = {role: self.paged_rows(role, self.tiling.block_k) for role in "kv"}
        rows = {"q": queries, **keys, "dO": queries}
        if not self.tiling.stages_bias:
            return rows
        return rows | {"bias": bias_rows(self.problem, self.tiling.tile_q)}

    @property
    def _heads_per_block(self) -> int:
        return super()._heads_per_block if self._division is None else self._division.heads

    @property
    def _summed_tiles(self) -> int:
        """Tiles of dK and dV that several items add to."""
        if self._division is None:
            return 0
        tiles = self.geometry.batch * self._key_tiles
        most_tokens = self.geometry.most_tokens_kv
        if self.problem.ragged and most_tokens is not None:
            tiles = min(tiles, self.geometry.batch + most_tokens // self.tiling.tile_k)
        return tiles * self.geometry.heads_k - self._division.whole_items

    @property
    def _key_sums(self) -> int:
        widths = map(result_width, (self.problem.head_dim_qk, self.problem.head_dim_v))
        turns = 32 if self.problem.deterministic else 0
        return 4 * self._summed_tiles * (self.tiling.tile_k * sum(widths) + turns)

    @property
    def _items_at_once(self) -> int:
        # Where one cluster has no room, a launch of it fails; one of none would say nothing.
        return max(1, self.target.multiprocessors // self.tiling.cluster)

    @property
    def heads_per_wave(self) -> int:
        """One pair, so that few sums of dQ are at work and stay in L2; but under a causal mask a
        pair's first tiles take much longer than its last, and other pairs must fill the time. In a
        narrow window, no tile takes longer; where blocks are dropped, some do."""
        geometry, blocks, tiles = self.geometry, self._items_at_once, self._key_tiles
        if self.tiling.relays:
            return 1
        if self.problem.ragged:  # of one batch entry
            return ragged_wave(geometry.heads_q // self._heads_per_block, blocks, tiles)
        if geometry.band_right is None:
            some_empty = self.problem.has_blocks or geometry.has_lengths
            return min(4, self._pairs) if some_empty else 1
        if geometry.band_left is not None and 16 * geometry.band_left <= geometry.seq_q:
            return 1
        wanted = blocks / tiles
        if geometry.has_lengths:
            # A third of the tiles may have no keys.
            wanted = min(1.5 * wanted, MOST_SHORT_PAIRS)
        sums = wanted * self._pair_sum_bytes
        if self.problem.deterministic:
            # More items wait for each other.
            wanted *= 2 if 2 * sums <= MOST_WAVE_SUM_BYTES else 1
        elif tiles <= FEW_TILES and sums > MOST_SHORT_SUM_BYTES:
            # So few hardly wait, but those of several waves have their sums at work.
            wanted = min(wanted, MOST_SHORT_PAIRS)
        return pairs_of_causal_waves(self._pairs, tiles, blocks, wanted)

    @property
    def _pair_sum_bytes(self) -> int:
        return 4 * self._heads_per_block * self.geometry.seq_q * self._dq_columns

    @property
    def row_tiling(self) -> Tiling:
        # Without what the main kernel alone is told: so its tilings share the others.
        adds_keys = self.tiling.adds_keys and self.problem.ragged
        its = replace(self.tiling, share_slots=0, shares_last=False, adds_keys=adds_keys)
        return RowTiling(its.cpp)

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        if not self.problem.ragged:
            return None
        most = self._pairs * self._key_tiles
        last_first = self.problem.deterministic and self.geometry.band_right is not None
        bundles = 0 if self.tiling.relays else self._pairs
        items = Items(self.tiling.tile_k, most, True, last_first, bundles)
        scratch = RaggedScratch(self.geometry, self.tiling.tile_q, self._tiles_of_head, items)
        if self._division is None:
            return scratch
        return replace(scratch, key_tiles=self._summed_tiles // self.geometry.heads_k)

    @property
    def _places_at_once(self) -> int:
        """Places that blocks of a ragged problem work on at a time, if half full: bundles fill more
        where there are heads enough."""
        return -(-2 * self._items_at_once // self._key_tiles)

    @property
    def _dq_sum_bytes(self) -> int:
        # Nobody leaves a part to another item.
        return 0 if self.tiling.relays and self._key_tiles == 1 else super()._dq_sum_bytes

    @property
    def _dq_lag(self) -> int:
        """In ragged problems, counted in bundles, because those differ in items."""
        if self.tiling.relays:
            return 0
        if not self.problem.ragged:
            if not self.problem.deterministic or self.geometry.band_right is None:
                return super()._dq_lag
            # The longest items end a wave, and many short ones of the next pass by meanwhile.
            return 2 * max(self._wave_items, self._items_at_once) + self._items_at_once
        if self._own_sums:  # with no item goes any share
            return self._pairs
        return self._wave_pairs + self._places_at_once

    @property
    def _own_sums(self) -> bool:
        """Of a ragged problem, whether all query tiles have sums of dQ: no more than places would
        have room for."""
        return self._pairs <= self._most_places

    @property
    def _most_places(self) -> int:
        """A pair gets a place only after the last item that stores what was there before."""
        return 2 * (self._wave_pairs + self._places_at_once)

    @property
    def _dq_places(self) -> int:
        if not self.problem.ragged:
            return super()._dq_places
        return 0 if self._own_sums or self.tiling.relays else self._most_places

    def dbias_kernel(self) -> KernelLaunch:
        whole = self.problem.masked_by_edits
        if not self.tiling.stages_bias or not bwd_dbias_sm90.fits(whole, self.geometry):
            return super().dbias_kernel()
        return bwd_dbias_sm90.dbias_kernel(whole, self.geometry, self.target, self.tiling)

    def kernels(self) -> list[KernelLaunch]:
        kernels = super().kernels()
        if self._division is not None:
            grid = (self._summed_tiles, 1, 1)
            if self.problem.ragged:
                grid = (self._key_tiles, self.geometry.heads_k, self.geometry.batch)
            kernels.insert(2, self._small_kernel("bwd_key_rows", grid))
        return kernels

    def companions(self) -> list[KernelSource]:
        given = self.problem, self.geometry, self.target
        others = [BwdSm90(*given, it) for it in tilings(self.problem) if it != self.tiling]
        return list(dict.fromkeys(source for it in others for source in it.sources()))

    def main_kernel(self, items: int) -> KernelLaunch:
        cluster, parts = self.tiling.cluster, self._part_count(items)
        shared = self.tiling.shared_memory(self.problem)
        problem = staged(self.problem) if self.tiling.stages_bias else self.problem
        source = kernel_source(
            self.name, problem, self.tiling, shared, argument=MappedBwdParams, cluster=cluster
        )
        # Not where blocks take several items, which is no faster, nor in clusters, which is slower.
        early = cluster == 1 and parts <= self._items_at_once
        threads = self.tiling.threads
        grid = self._blocks(items) * cluster, 1, 1
        return KernelLaunch(source, grid, threads, shared, programmatic=early)
