"""What a query tile of the Hopper forward is: of which heads, with which keys, and whether blocks
share these."""

from __future__ import annotations

import numpy as np

from dlattn.plans.fwd_sm90_tiling import Sm90FwdTiling
from dlattn.plans.kernels import query_tiles, round_up
from dlattn.plans.schedule import Array, visited_keys
from dlattn.problem import Geometry, Padding, Problem
from dlattn.records import dataclass


def has_lengths(problem: Problem, geometry: Geometry) -> bool:
    """Whether sequences are as long as the device knows."""
    return problem.ragged or geometry.has_lengths


def asks_for_tiles(problem: Problem, geometry: Geometry) -> bool:
    """Whether what is on the device says how long tiles take, and blocks ask for them."""
    return has_lengths(problem, geometry) or problem.has_blocks


@dataclass(frozen=True)
class TileHeads:
    """Which query heads share a query tile, of those that share keys.

    Attributes:
        tile: how many a tile is of, at the most.
        consumer: of how many a consumer has rows. If of all, consumers have other queries each;
            else the same queries, of other heads.
    """

    tile: int = 1
    consumer: int = 1

    @property
    def rows(self) -> int:
        """Of a head that a consumer has."""
        return 64 // self.consumer

    def parts(self, tiling: Sm90FwdTiling) -> int:
        """Consumers of a tile that have other queries each."""
        return 1 if self.tile > self.consumer else tiling.consumers

    def tile_rows(self, tiling: Sm90FwdTiling) -> int:
        """Of a head that a tile has."""
        return self.rows * self.parts(tiling)

    def first(self, geometry: Geometry) -> Array:
        """The first head of each tile of a batch entry."""
        together = geometry.heads_together if self.tile > 1 else 1
        every = np.arange(geometry.heads_q)
        return every[every % together % self.tile == 0]


def rows_missing(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads
) -> int:
    """By how many rows the first tile of full sequences is smaller than others, in parts of a
    consumer's (``rows_missing`` in the kernel)."""
    if geometry.band_right is None or problem.has_blocks or tiling.tile_q <= tiling.tile_k:
        return 0
    whole = round_up(geometry.seq_q, heads.tile_rows(tiling))
    return whole - round_up(geometry.seq_q, heads.rows)


def visited(
    problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads
) -> tuple[Array, Array]:
    """See :func:`dlattn.plans.schedule.visited_keys`; of tiles of these heads."""
    missing = rows_missing(problem, geometry, tiling, heads)
    return visited_keys(geometry, heads.tile_rows(tiling), tiling.tile_k, missing)


def tiles_of_heads(geometry: Geometry, tiling: Sm90FwdTiling, heads: TileHeads) -> int:
    """Query tiles of these heads."""
    of_each = query_tiles(geometry, heads.tile_rows(tiling)) // geometry.heads_q
    return of_each * len(heads.first(geometry))


def has_same_keys(problem: Problem) -> bool:
    """Whether all queries attend to the same keys."""
    return all(isinstance(mask, Padding) for mask in problem.masks)


def power_of_two(number: int) -> int:
    """The least one that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def heads_of_tiles(problem: Problem, geometry: Geometry, tiling: Sm90FwdTiling) -> list[TileHeads]:
    """Which heads may share a tile (``packs_heads`` in the kernel)."""
    together = geometry.heads_together
    choices = [TileHeads()]
    if problem.has_blocks or tiling.stages_bias or together == 1:
        return choices
    packs = tiling.consumers == 2 or not problem.has_bias
    # Of packed sequences many may have one query.
    fewest = 1 if geometry.most_tokens_q is not None else geometry.seq_q
    packed = [n * tiling.consumers for n in (2, 4) if packs and n * fewest <= 64]
    for most in (tiling.consumers, *packed):
        # Tiles of the same keys go on at one pace, and find them in L2, if none has much less to
        # do: as many tiles, of nearly as many heads each.
        heads = -(-together // -(-together // most))
        if not problem.ragged or together % heads == 0:
            choices.append(TileHeads(heads, power_of_two(-(-heads // tiling.consumers))))
    alike = [2, 4] if packs else []
    return choices + [TileHeads(heads, heads) for heads in alike if together % heads == 0]


def may_share_more(problem: Problem, tiling: Sm90FwdTiling) -> bool:
    """Whether there is a kernel for it: four consumers have no registers."""
    return tiling.consumers == 2 and not problem.has_blocks


@dataclass(frozen=True)
class Sharing:
    """Which blocks share the keys of query tiles.

    Attributes:
        blocks: how many do, 0 if each tile is one block's, or the device alone knows.
        beside: how many tiles with nearly the same keys have as many of them each.
        apart: a kernel of its own puts the parts of tiles together, which are many.
    """

    blocks: int
    beside: int = 1
    apart: bool = False
