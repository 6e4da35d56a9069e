"""The Hopper backward: ``cuda_src/kernels/bwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil, gcd
from typing import ClassVar

from dlattn.plans import bwd_dbias_sm90
from dlattn.plans.argument import MappedBwdParams
from dlattn.plans.backward import BackwardPlan, backward_refusal
from dlattn.plans.bwd_relay import relays
from dlattn.plans.bwd_sm90_refusal import register_refusal
from dlattn.plans.cuda import MOST_HOPPER_HEAD_DIM, KernelLaunch, round_up
from dlattn.plans.mapped import MappedPlan, slab_bytes, staged
from dlattn.plans.ragged import Items, RaggedScratch
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, GivenMask, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.target import Target


@dataclass(frozen=True)
class Sm90BwdTiling:
    """How a Hopper backward block divides its work (``Sm90BwdTiling`` in the kernel).

    Attributes:
        tile_q: queries of a tile: 64, or 128 where the head dimensions leave registers for them.
        tile_k: keys of an item: 128, or 64 by product and block.
        by_product: one key worker has dV and the other dK; else each has both, of half the keys.
        stages: tiles of q in shared memory.
        ds_stages: tiles of dS.
        piece_columns: columns of 64 queries' dQ that are added at a time: 64, or 32, or all that
            a block of a cluster computes.
        dq_slots: such pieces on their way to memory.
        share_slots: pieces of an earlier item's dQ on their way from memory; without any, they go
            through registers.
        do_stages: tiles of dO in shared memory: as many as of q, or one beside two.
        cluster: blocks that share an item, by product: each has 64 of its keys, and half of dQ's
            columns.
        query_registers: of a thread that computes dQ, 64 columns at a time; with 40 and half of
            a block's columns, all of these. Key workers share what is left.
        stages_bias: tiles of a bias come with those of q; of 16-bit elements.
        stats_in_products: log-sum-exps and deltas are a step of the products S and dP.
        keys_in_registers: key workers hold the left operand of S.
        relays: dQ goes from item to item (:mod:`dlattn.plans.bwd_relay`), instead of to sums.
    """

    tile_q: int = 64
    tile_k: int = 128
    by_product: bool = False
    stages: int = 2
    ds_stages: int = 2
    piece_columns: int = 64
    dq_slots: int = 1
    share_slots: int = 1
    do_stages: int = 2
    cluster: int = 1
    query_registers: int = 72
    stages_bias: bool = False
    stats_in_products: bool = False
    keys_in_registers: bool = False
    relays: bool = False

    threads: ClassVar[int] = 512
    min_blocks: ClassVar[int] = 1

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return self.tile_k // self.cluster

    @property
    def columns(self) -> int:
        """dQ has a multiple of them, so that a step's pieces fill all slots equally often."""
        slots = self.dq_slots // gcd(self.dq_slots, self.tile_q // 64)
        return self.piece_columns * slots * self.cluster

    @property
    def cpp(self) -> str:
        last = self.stats_in_products, self.keys_in_registers, self.relays
        by_product, *flags = (str(flag).lower() for flag in (self.by_product, *last))
        return (
            f"Sm90BwdTiling<{self.tile_q}, {self.tile_k}, {by_product}, {self.stages}, "
            f"{self.ds_stages}, {self.piece_columns}, {self.dq_slots}, {self.share_slots}, "
            f"{self.do_stages}, {self.cluster}, "
            f"{self.query_registers}, {', '.join(flags)}>"
        )

    @property
    def stats_words(self) -> int:
        """Words of a query row's statistics (``kernels/bwd_stats.cuh``)."""
        return 4 if self.stats_in_products else 2

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dims = problem.head_dim_qk, problem.head_dim_v
        k_and_v = sum(slab_bytes(self.block_k, dim) for dim in dims)
        if self.cluster > 1:
            own_columns = round_up(problem.head_dim_qk, self.columns) // self.cluster
            k_and_v += slab_bytes(self.block_k, own_columns)
        q, dO = (slab_bytes(self.tile_q, dim) for dim in dims)
        row_stats, step = 4 * self.stats_words * self.tile_q, 16
        ds = self.ds_stages * slab_bytes(self.tile_q, self.tile_k)
        sent = self.ds_stages * slab_bytes(self.tile_q, self.block_k)
        weights = 16 + sent if self.by_product else 16
        piece = 4 * 64 * self.piece_columns
        dq = self.dq_slots * piece + (self.share_slots * piece or 128)
        ring_stages = 6 + self.stages + self.do_stages + self.dq_slots
        ring_stages += (1 + self.block_k // 64) * self.ds_stages + (self.cluster > 1)
        ring_stages += self.share_slots * self.relays
        barriers = 8 * (2 * ring_stages + 2 + 2 + 4 * max(1, self.share_slots))
        items, sums_added, shares = 4 * 2, 4 * 2, 24 * 2
        told = items + sums_added + shares
        bias = self.stages * slab_bytes(self.tile_q, self.tile_k) if self.stages_bias else 0
        stages = self.stages * (q + row_stats + step) + self.do_stages * dO
        return round_up(k_and_v + stages + ds + bias + weights + dq + barriers + told, 1024)


#: Sums of dQ that wider waves of a fixed order may add to at a time: L2 has room for more, but
#: others are in it, too.
MOST_WAVE_SUM_BYTES = 16 << 20
#: Pairs of a wave of a ragged problem.
MOST_PAIRS = 8


def even_wave(pairs: int, wanted: float, most: int | None = None) -> int:
    """The number of pairs a wave nearest to the wanted one that leaves no smaller wave at the end:
    its long items would be fewer than blocks."""
    near = range(max(1, ceil(wanted / 2)), min(int(2 * wanted), most or pairs) + 1)
    even = [n for n in near if pairs % n == 0]
    few = min(pairs, max(1, round(wanted)), most or pairs)
    return min(even, key=lambda n: abs(n - wanted), default=few)


def result_width(dim: int) -> int:
    """Columns of dK or dV (``width`` in the kernel): a width of wgmma, not below the dimension."""
    return 256 if dim > 192 else round_up(dim, 32)


def choose_tiling(problem: Problem) -> Sm90BwdTiling:
    """:func:`choose_tiles`, and what scores that are only scaled leave registers for."""
    tiling = choose_tiles(problem)
    only_scales = problem.edits == (Scale(positive=True),) and not problem.dropout
    wide = max(problem.head_dim_qk, problem.head_dim_v) > 128
    if wide or not only_scales or problem.has_blocks:
        return tiling
    tiling = replace(tiling, stats_in_products=True)
    if tiling.tile_q == 128:
        tiling = replace(tiling, keys_in_registers=True)
        return tiling if problem.head_dim_qk <= 32 else replace(tiling, dq_slots=2)
    return replace(tiling, ds_stages=3, share_slots=1)


def choose_tiles(problem: Problem) -> Sm90BwdTiling:
    """By what fits registers: dK and dV of 64 keys take half of both head dimensions a thread; and
    shared memory, where both have whole slabs of 64 columns."""
    dims = problem.head_dim_qk, problem.head_dim_v
    dim_qk, dim_v = (round_up(dim, 64) for dim in dims)
    if problem.has_aligned_bias and max(dim_qk, dim_v) <= 128 and not problem.keeps_scores:
        return _walking(problem, Sm90BwdTiling(stages_bias=True))
    reads_to_drop = isinstance(problem.dropout, GivenMask)
    looks = problem.dropout and (reads_to_drop or problem.adds_to_scores)
    walks = problem.has_blocks and problem.deterministic and not problem.adds_to_scores
    if max(dim_qk, dim_v) == 64 and not (problem.keeps_scores or walks or looks):
        if problem.head_dim_qk <= 32:
            return Sm90BwdTiling(tile_q=128, piece_columns=32, dq_slots=2, share_slots=2)
        return Sm90BwdTiling(tile_q=128)
    # What else takes as many registers as 64 columns of a head do.
    adds = problem.has_bias or (problem.adds_to_scores and problem.ragged)
    others = int(problem.keeps_scores or bool(problem.dropout and adds))
    others += problem.has_blocks * (3 if problem.ragged else 1)
    others += problem.keeps_scores and reads_to_drop
    others += problem.has_blocks and problem.has_bias
    # What a function masks of elements: loaders would spill beside wide dK and dV.
    masks_elements = problem.score_blocks is not None and problem.score_blocks.elements
    others += 2 * (masks_elements and max(dims) > 128)
    others += problem.bends_scores * (2 if problem.has_blocks else 1)
    if not others and sum(map(result_width, dims)) <= 320 < dim_qk + dim_v:
        return Sm90BwdTiling(do_stages=1, share_slots=0)
    plain = not (others or problem.dropout or problem.adds_to_scores or problem.ragged)
    if min(dim_qk, dim_v) > 128 and plain and not (problem.paged_k or problem.paged_v):
        return _clustered(dim_qk, dim_v)
    # With block_mask, there are no registers for 64 columns of an earlier item's dQ.
    by_product = Sm90BwdTiling(tile_k=64, by_product=True)
    if dim_qk + dim_v > 384:
        columns = 32 if problem.has_blocks else 64
        return replace(by_product, do_stages=1, piece_columns=columns, dq_slots=2, share_slots=0)
    if dim_qk + dim_v + 64 * others > 320 or max(dim_qk, dim_v) > 192:
        if problem.has_blocks:
            return _walking(problem, by_product)
        return replace(by_product, dq_slots=2 if dim_qk > 192 else dim_qk // 64, share_slots=0)
    if max(dim_qk, dim_v) > 128:
        return Sm90BwdTiling()
    return _walking(problem, Sm90BwdTiling(dq_slots=dim_qk // 64, share_slots=2))


def _clustered(dim_qk: int, dim_v: int) -> Sm90BwdTiling:
    """Two blocks share an item: half the additions to dQ, and half the loads of query tiles."""
    shared = Sm90BwdTiling(
        by_product=True, share_slots=0, do_stages=1, cluster=2, query_registers=88
    )
    if dim_qk > 192:
        return replace(shared, ds_stages=1)
    return replace(shared, ds_stages=2 if dim_v <= 192 else 1, piece_columns=96)


def _walking(problem: Problem, tiling: Sm90BwdTiling) -> Sm90BwdTiling:
    """The same with smaller pieces where a row of dQ would be one, and loaders pass over blocks:
    ptxas then has registers for both."""
    one_piece = problem.has_blocks and problem.head_dim_qk <= 64
    return replace(tiling, piece_columns=32, dq_slots=2) if one_piece else tiling


def pairs_of_causal_waves(pairs: int, tiles: int, blocks: int, wanted: float) -> int:
    """How many pairs are taken at a time, whose key tiles are the shorter the later they come."""
    width = even_wave(pairs, wanted)
    if pairs * tiles > 4 * blocks:
        return width
    # There are so few items that it matters where each ends.
    divisors = (n for n in range(max(1, int(wanted / 2)), pairs + 1) if pairs % n == 0)
    ends = {n: _end_of_items(pairs, tiles, blocks, n) for n in (width, *divisors)}
    return min(n for n, end in ends.items() if end <= 1.02 * min(ends.values()))


def _end_of_items(pairs: int, tiles: int, blocks: int, pairs_per_wave: int) -> int:
    """When the last item ends, in steps of a tile of queries; an item also begins and ends."""
    ends = [0] * blocks
    for first in range(0, pairs, pairs_per_wave):
        for tile in range(tiles):
            for _ in range(min(pairs_per_wave, pairs - first)):
                heapq.heapreplace(ends, ends[0] + tiles - tile + 1)
    return max(ends)


@dataclass(frozen=True)
class RowTiling:
    """The same tiling for the kernel before, whose blocks have no producer."""

    cpp: str
    threads: int = 256
    min_blocks: int = 1


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
        self.tiling = tiling or self._relaying(choose_tiling(self.problem))
        self.set_waves()

    def _relaying(self, tiling: Sm90BwdTiling) -> Sm90BwdTiling:
        fits = tiling.share_slots > 0 and tiling.cluster == 1
        if not (fits and relays(self.problem, self.geometry, tiling.tile_q, tiling.tile_k)):
            return tiling
        # The next item needs a piece a step at the most, and an earlier one's come two at a time.
        if tiling.tile_q > 64:
            tiling = replace(tiling, dq_slots=1, share_slots=2)
        return replace(tiling, relays=True)

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
        # A warpgroup stores its half of the keys.
        gradients = {f"d{role.upper()}": self.paged_rows(role, 64) for role in "kv"}
        rows = {"q": queries, **keys, "dO": queries, **gradients}
        return rows | {"bias": self.tiling.tile_q} if self.tiling.stages_bias else rows

    @property
    def _items_at_once(self) -> int:
        return self.target.multiprocessors // self.tiling.cluster

    @property
    def heads_per_wave(self) -> int:
        """One pair, so that few sums of dQ are at work and stay in L2; but under a causal mask a
        pair's first tiles take much longer than its last, and other pairs must fill the time. In a
        narrow window, no tile takes longer; where blocks are dropped, some do."""
        geometry, blocks, tiles = self.geometry, self._items_at_once, self._key_tiles
        if self.tiling.relays:
            return 1
        if self.problem.ragged:  # of one batch entry
            groups = geometry.heads_q // self._heads_per_block
            some = min(MOST_PAIRS, max(1, 3 * blocks // (2 * tiles)))
            return even_wave(groups, some, MOST_PAIRS)
        if geometry.band_right is None:
            return min(4, self._pairs) if self.problem.has_blocks else 1
        if geometry.band_left is not None and 16 * geometry.band_left <= geometry.seq_q:
            return 1
        wanted = blocks / tiles
        # In a fixed order, more items wait for each other.
        if self.problem.deterministic and 2 * wanted * self._pair_sum_bytes <= MOST_WAVE_SUM_BYTES:
            wanted *= 2
        return pairs_of_causal_waves(self._pairs, tiles, blocks, wanted)

    @property
    def _pair_sum_bytes(self) -> int:
        return 4 * self._heads_per_block * self.geometry.seq_q * self._dq_columns

    @property
    def row_tiling(self) -> Tiling:
        return RowTiling(self.tiling.cpp)

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        if not self.problem.ragged:
            return None
        most = self._pairs * self._key_tiles
        last_first = self.problem.deterministic and self.geometry.band_right is not None
        items = Items(self.tiling.tile_k, most, of_keys=True, last_first=last_first)
        return RaggedScratch(self.geometry, self.tiling.tile_q, self._tiles_of_head, items)

    @property
    def _pairs_at_once(self) -> int:
        """Pairs of ragged problems that blocks work on at a time, if most are half as long as the
        longest."""
        return -(-2 * self._items_at_once // self._key_tiles)

    @property
    def _dq_lag(self) -> int:
        """In ragged problems, counted in pairs, because pairs differ in items."""
        if self.tiling.relays:
            return 0
        if not self.problem.ragged:
            if not self.problem.deterministic or self.geometry.band_right is None:
                return super()._dq_lag
            # The longest items end a wave, and many short ones of the next pass by meanwhile.
            return 2 * max(self._wave_items, self._items_at_once) + self._items_at_once
        return self._params.heads_per_wave + self._pairs_at_once

    @property
    def _dq_places(self) -> int:
        """A pair gets a place only after the last item that stores what was there before."""
        if not self.problem.ragged:
            return super()._dq_places
        return min(self._pairs, self._dq_lag + self._params.heads_per_wave + self._pairs_at_once)

    def dbias_kernel(self) -> KernelLaunch:
        whole = self.problem.masked_by_edits
        if not self.tiling.stages_bias or not bwd_dbias_sm90.fits(whole, self.geometry):
            return super().dbias_kernel()
        return bwd_dbias_sm90.dbias_kernel(whole, self.geometry, self.target, self.tiling)

    def main_kernel(self, items: int) -> KernelLaunch:
        cluster = self.tiling.cluster
        grid = min(items, self._items_at_once) * cluster
        shared = self.tiling.shared_memory(self.problem)
        problem = staged(self.problem) if self.tiling.stages_bias else self.problem
        source = kernel_source(
            self.name, problem, self.tiling, shared, argument=MappedBwdParams, cluster=cluster
        )
        return KernelLaunch(source, (grid, 1, 1), self.tiling.threads, shared)
