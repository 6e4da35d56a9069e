"""How blocks of the Hopper backward divide their work (``kernels/bwd_tile.cuh``)."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import ClassVar

from dlattn.plans.bwd_division import may_divide
from dlattn.plans.bwd_relay import may_relay
from dlattn.plans.kernels import round_up
from dlattn.plans.mapped import bias_tile_bytes, slab_bytes
from dlattn.problem import GivenMask, Problem, Scale
from dlattn.records import dataclass


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
        stages_bias: tiles of a bias come with those of q.
        stats_in_products: log-sum-exps and deltas are a step of the products S and dP.
        keys_in_registers: key workers hold the left operand of S.
        adds_keys: some items have a part of what attends to their keys
            (:mod:`dlattn.plans.bwd_division`), so that their dK and dV are added up.
        shares_last: key workers store an earlier item's dQ, after their dK and dV.
        relays: dQ goes from item to item, or is one item's (:mod:`dlattn.plans.bwd_relay`), instead
            of to sums.
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
    adds_keys: bool = False
    shares_last: bool = False
    relays: bool = False

    threads: ClassVar[int] = 512
    min_blocks: ClassVar[int] = 1

    @property
    def spares_registers(self) -> bool:
        """Whether key workers have some for what they do for few problems alone."""
        return self.stats_in_products or self.cluster > 1

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
        by_product = str(self.by_product).lower()
        flags = (
            self.stats_in_products, self.keys_in_registers,
            self.adds_keys, self.shares_last, self.relays,
        )  # fmt: skip
        others = ", ".join(str(flag).lower() for flag in flags)
        return (
            f"Sm90BwdTiling<{self.tile_q}, {self.tile_k}, {by_product}, {self.stages}, "
            f"{self.ds_stages}, {self.piece_columns}, {self.dq_slots}, {self.share_slots}, "
            f"{self.do_stages}, {self.cluster}, "
            f"{self.query_registers}, {others}>"
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
        ring_stages = 8 + self.stages + self.do_stages + self.dq_slots
        ring_stages += (1 + self.block_k // 64) * self.ds_stages + (self.cluster > 1)
        ring_stages += self.share_slots * self.relays
        barriers = 8 * (2 * ring_stages + 2 + 2 + 4 * max(1, self.share_slots))
        item = 36 + 4 * problem.corner_as_given
        items, sums_added, shares = (4 if self.cluster > 1 else item) * 2, 4 * 2, 24 * 3
        if problem.ragged:
            items, shares = (112 + 8 * self.relays + 8 * self.adds_keys) * 2, 56 * 3
        told = items + sums_added + shares + 8
        bias = bias_tile_bytes(problem, self.tile_q, self.tile_k) if self.stages_bias else 0
        stages = self.stages * (q + row_stats + step + bias) + self.do_stages * dO
        return round_up(k_and_v + stages + ds + weights + dq + barriers + told, 1024)


@dataclass(frozen=True)
class RowTiling:
    """The same tiling for the kernel before, whose blocks have no producer."""

    cpp: str
    threads: int = 256
    min_blocks: int = 1


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
    return replace(tiling, ds_stages=3, share_slots=64 // tiling.piece_columns)


#: Steps of an item beside which the query worker has no time to store an earlier one's dQ; in a
#: cluster, where that goes through its registers, twice as many.
FEW_STEPS = 8
#: The same under a full mask, in queries.
FEW_QUERIES = 512


def with_few_steps(tiling: Sm90BwdTiling, problem: Problem, steps: int) -> Sm90BwdTiling:
    """The tiling of items that have at most so many steps."""
    apart = problem.ragged or problem.paged_k or problem.paged_v or problem.deterministic
    if problem.bands:
        few = steps <= FEW_STEPS * tiling.cluster
    else:
        few = tiling.cluster == 1 and steps * tiling.tile_q <= FEW_QUERIES
    if apart or not few or not tiling.spares_registers:
        return tiling
    return replace(tiling, shares_last=True, share_slots=0)


def relaying(tiling: Sm90BwdTiling) -> Sm90BwdTiling | None:
    """The tiling of items that relay dQ, if there is room for it."""
    if tiling.share_slots == 0 or tiling.cluster > 1:
        return None
    # The next item needs a piece a step at the most, and an earlier one's come two at a time.
    if tiling.tile_q > 64:
        tiling = replace(tiling, dq_slots=1, share_slots=2)
    return replace(tiling, relays=True)


def may_add_keys(problem: Problem, tiling: Sm90BwdTiling) -> bool:
    """Whether items of some sizes are divided. Without registers for it, none are; in clusters and
    beside few steps, it was not tried."""
    return tiling.stats_in_products and not tiling.shares_last and may_divide(problem)


def tilings(problem: Problem) -> list[Sm90BwdTiling]:
    """Those that sizes of a problem choose among, each with a kernel of its own."""
    whole = choose_tiling(problem)
    its = [whole, with_few_steps(whole, problem, steps=1)]
    if may_relay(problem) and (tiling := relaying(whole)) is not None:
        its.append(tiling)
    its += [replace(it, adds_keys=True) for it in its if may_add_keys(problem, it)]
    return list(dict.fromkeys(its))


def choose_tiles(problem: Problem) -> Sm90BwdTiling:
    """By what fits registers: dK and dV of 64 keys take half of both head dimensions a thread; and
    shared memory, where both have whole slabs of 64 columns."""
    dims = problem.head_dim_qk, problem.head_dim_v
    dim_qk, dim_v = (round_up(dim, 64) for dim in dims)
    if problem.has_aligned_bias and max(dim_qk, dim_v) <= 128 and not problem.keeps_scores:
        return _walking(problem, Sm90BwdTiling(stages_bias=True))
    reads_to_drop = isinstance(problem.dropout, GivenMask)
    looks = problem.reads_tables or problem.dropout and (reads_to_drop or problem.adds_to_scores)
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
        # Nor of packed sequences, where a bias and dropout take theirs.
        if problem.ragged and problem.has_bias and problem.dropout:
            return replace(by_product, piece_columns=32, dq_slots=2, share_slots=0)
        return replace(by_product, dq_slots=2 if dim_qk > 192 else dim_qk // 64, share_slots=0)
    if max(dim_qk, dim_v) > 128:
        return Sm90BwdTiling()
    if 64 < problem.head_dim_qk <= 96:
        return _walking(problem, Sm90BwdTiling(piece_columns=32, dq_slots=3, share_slots=2))
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
