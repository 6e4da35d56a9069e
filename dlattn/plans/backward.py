"""What the backward plans share: the kernels in a row, and the scratch between them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import ClassVar, Protocol

from dlattn.plans.argument import Divisor, ItemsRef
from dlattn.plans.bwd_dbias import (
    GradientScratch,
    dbias_kernel,
    gradient_scratch,
    gradients_refusal,
    score_gradient_kernel,
)
from dlattn.plans.cuda import MOST_HEAD_DIM, CudaPlan, refusal
from dlattn.plans.kernels import MOST_BLOCKS, WAVE_BYTES, KernelLaunch, round_up, tile_bytes
from dlattn.plans.params import Place, places_of
from dlattn.plans.ragged import RaggedScratch
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import BlockMask, Direction, Geometry, Mask, Padding, Philox, Problem
from dlattn.runtime.target import Target

#: Keys of the smallest item of any tiling.
LEAST_KEYS = 16


class BackwardTiling(Tiling, Protocol):
    """What the kernels before and after the main one need of its tiling (``bwd_tile.cuh``)."""

    @property
    def tile_q(self) -> int: ...

    @property
    def tile_k(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def stats_words(self) -> int: ...

    def shared_memory(self, problem: Problem) -> int: ...


class BackwardPlan(CudaPlan):
    """Delta and main kernel, a dQ kernel unless the main one stores dQ, one for each gradient of a
    bias or of what a user's function reads, one for a sink's.

    The workspace holds fp32 sums of dQ and two fp32 values per query row: linear in the length.
    """

    #: Whether the main kernel stores dQ, and not one after it.
    stores_dq: ClassVar[bool] = False

    tiling: BackwardTiling

    @abstractmethod
    def main_kernel(self, items: int) -> KernelLaunch:
        """The kernel that computes dK, dV and the sums of dQ."""

    def set_waves(self) -> None:
        """Decides how many query heads an item has, and how many pairs share L2."""
        self._params.heads_per_block = Divisor.of(self._heads_per_block)
        self._params.dq_lag = self._dq_lag
        self._params.dq_places = self._dq_places
        self._params.items = ItemsRef.of(
            tiles=self._key_tiles,
            heads=self.geometry.heads_q // self._heads_per_block,
            pairs=self._pairs,
            wave=self._wave_pairs,
        )
        self._params.shares.places = Divisor.of(max(1, self._dq_places))
        self._params.shares.query_tiles = Divisor.of(self._query_tiles)

    @cached_property
    def _wave_pairs(self) -> int:
        """Pairs whose items are taken side by side."""
        return min(self._pairs, self.heads_per_wave)

    @property
    def heads_per_wave(self) -> int:
        """The same, if there are so many: as many as L2 holds."""
        problem = self.problem
        # What the items of a pair read and add to at a time: one head, as all walk them in order.
        bytes_per_pair = (6 * problem.head_dim_qk + 2 * problem.head_dim_v) * self.geometry.seq_q
        return max(1, WAVE_BYTES // bytes_per_pair)

    @property
    def _items_at_once(self) -> int:
        """How many items run beside each other."""
        return self.target.multiprocessors

    @property
    def _wave_items(self) -> int:
        return self._wave_pairs * self._key_tiles

    @property
    def _dq_lag(self) -> int:
        """How many items later dQ is stored: those of a wave, and those that run at once."""
        return self._wave_items + self._items_at_once

    @property
    def _dq_places(self) -> int:
        """Pairs of batch entry and group of heads that have sums of dQ at a time.

        A pair gets the place of one whose dQ was stored when the wave before its own began.
        """
        stored = self._dq_lag + self._items_at_once
        waves = 1 + -(-stored // self._wave_items)
        most = waves * self._wave_pairs
        if self.stores_dq:
            return min(self._pairs, most)
        return 0 if self.problem.ragged else self._pairs

    @property
    def _key_tiles(self) -> int:
        return -(-self.geometry.rows_kv // self.tiling.tile_k)

    @property
    def _pairs(self) -> int:
        return self.geometry.batch * self.geometry.heads_q // self._heads_per_block

    @property
    def _heads_per_block(self) -> int:
        geometry = self.geometry
        return lcm(geometry.heads_q // geometry.heads_k, geometry.heads_q // geometry.heads_v)

    @property
    def _query_tiles(self) -> int:
        return -(-self.geometry.seq_q // self.tiling.tile_q)

    @property
    def _tiles_of_head(self) -> int:
        """Query tiles of a head, of all batch entries: of ragged tensors no more than there can be
        if every sequence ends in a tile of its own."""
        batch, most_tokens = self.geometry.batch, self.geometry.most_tokens_q
        tiles = batch * self._query_tiles
        if self.problem.ragged and most_tokens is not None:
            return min(tiles, batch + most_tokens // self.tiling.tile_q)
        return tiles

    @property
    def _row_tiles(self) -> int:
        return self.geometry.heads_q * self._tiles_of_head

    @property
    def _dq_columns(self) -> int:
        return round_up(self.problem.head_dim_qk, self.tiling.columns)

    @property
    def _sums(self) -> int:
        if not self._dq_places:
            return self._row_tiles
        return self._dq_places * self._heads_per_block * self._query_tiles

    @property
    def _dq_sum_bytes(self) -> int:
        return 4 * self._sums * self.tiling.tile_q * self._dq_columns

    @cached_property
    def _arrays(self) -> dict[str, int]:
        """What is in the workspace: bytes, in order, by the field that has the address."""
        tiles = self.geometry.batch * self.geometry.heads_q * self._query_tiles
        arrays = {
            "key_sums": self._key_sums,
            "dbias_arrivals": self._gradient_scratch.arrivals,
            "dbias_parts": self._gradient_scratch.parts,
            "dq_accum": self._dq_sum_bytes,
            "row_stats": 4 * self._row_tiles * self.tiling.stats_words * self.tiling.tile_q,
            "sink_parts": 4 * tiles if self.problem.sink else 0,
        }
        if self.stores_dq:
            counts = {"dq_arrivals": self._sums, "dq_stored": self._dq_places}
            counts |= {"items_taken": 1, "shares_taken": 1}
            if self._counts_additions:
                counts["dq_additions"] = self._row_tiles
            arrays |= {name: 4 * count for name, count in counts.items()}
        return arrays

    @cached_property
    def ragged(self) -> RaggedScratch | None:
        if not self.problem.ragged:
            return None
        return RaggedScratch(self.geometry, self.tiling.tile_q, self._tiles_of_head)

    @cached_property
    def scratch_bytes(self) -> int:
        return round_up(sum(self._arrays.values()), 256)

    @cached_property
    def _gradient_scratch(self) -> GradientScratch:
        # Of the problem that its kernels have: without what a function masks, others are chosen.
        return gradient_scratch(self.problem.masked_by_edits, self.geometry, self.target)

    @property
    def _key_sums(self) -> int:
        """Bytes of the fp32 sums of dK and dV that several items add to."""
        return 0

    @cached_property
    def cleared_bytes(self) -> int:
        # Those of a ragged problem bwd_delta clears, as many as there are.
        key_sums = 0 if self.problem.ragged else self._key_sums
        return key_sums + self._gradient_scratch.arrivals

    @property
    def _counts_additions(self) -> bool:
        """Whether blocks know from the kernel before how many key tiles add to each sum: a block
        mask drops others (``counts_additions`` in ``bwd_tile.cuh``)."""
        return self.stores_dq and self.problem.has_blocks and not self.problem.deterministic

    def scratch_places(self) -> list[Place]:
        return places_of((self._params, name, nbytes) for name, nbytes in self._arrays.items())

    def kernels(self) -> list[KernelLaunch]:
        items = self._pairs * self._key_tiles
        grid = (self._query_tiles, self.geometry.heads_q, self.geometry.batch)
        # Behind the kernel that tells of a ragged problem's entries.
        early = self.problem.ragged and self.target.capability >= (9, 0)
        delta = replace(self._small_kernel("bwd_delta", grid), programmatic=early)
        kernels = [delta, self.main_kernel(items)]
        if not self.stores_dq:
            dq_shared = tile_bytes(self.tiling.tile_q, self._dq_columns)
            kernels.append(self._small_kernel("bwd_dq", grid, dq_shared))
        if self.problem.d_bias is not None:
            kernels.append(self.dbias_kernel())
        whole = self.problem.masked_by_edits
        for of in self.problem.score_gradients:
            its = score_gradient_kernel(of, whole, self.geometry, self.target, self.tiling)
            kernels.append(its)
        if self.problem.sink:
            kernels.append(self._small_kernel("bwd_sink", (self.geometry.heads_q, 1, 1)))
        return kernels

    def dbias_kernel(self) -> KernelLaunch:
        """The kernel that computes the gradient of a bias."""
        whole = self.problem.masked_by_edits
        return dbias_kernel(whole, self.geometry, self.target, self.tiling)

    def _small_kernel(
        self, kernel: str, grid: tuple[int, int, int], shared: int = 0
    ) -> KernelLaunch:
        """A kernel before or after the main one. Of edits and dropout it reads scales alone, of
        masks at most the tiles that they keep, of keys and values nothing, so problems share it."""
        masks: tuple[Mask, ...] = (Padding(),)
        if kernel == "bwd_delta" and self._counts_additions:
            given = self.problem.without_score_blocks.masks
            masks = tuple(dict.fromkeys((*given, BlockMask())))
        plain = replace(
            self.problem,
            edits=self.problem.edits[:1],
            masks=masks,
            dropout=self.problem.dropout and Philox(),
            paged_k=False,
            paged_v=False,
        )
        asked = {"delta": int(self.problem.delta), "d_stats": int(self.problem.d_stats)}
        constants = asked if kernel == "bwd_delta" else {}
        source = kernel_source(kernel, plain, self.row_tiling, shared, constants=constants)
        return KernelLaunch(source, grid, self.row_tiling.threads, shared, plain=True)

    @property
    def row_tiling(self) -> Tiling:
        """The tiling as the kernels before and after the main one see it."""
        return self.tiling


def backward_refusal(
    problem: Problem,
    geometry: Geometry,
    target: Target,
    kernel: str,
    most_head_dim: int = MOST_HEAD_DIM,
) -> str | None:
    """Why no backward kernel up to a head dimension can run a problem, or ``None``."""
    reason = refusal(problem, geometry, target, Direction.BACKWARD, kernel, most_head_dim)
    blocks = geometry.batch * geometry.heads_q * -(-geometry.rows_kv // LEAST_KEYS)
    if reason is None and blocks > MOST_BLOCKS:
        return f"batch x heads x (keys / {LEAST_KEYS}) must be below 2**31."
    return reason or gradients_refusal(problem, geometry, target)
