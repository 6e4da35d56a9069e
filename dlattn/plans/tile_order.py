"""In which order the Hopper forward hands out the query tiles of a block mask:
``kernels/tile_order.cuh``, before it."""

from __future__ import annotations

from functools import cached_property

from dlattn.dtypes import data_type
from dlattn.plans.argument import Params, TileOrderRef
from dlattn.plans.kernels import KernelLaunch, query_tiles
from dlattn.plans.params import Place, places_of
from dlattn.plans.source import kernel_source
from dlattn.problem import BLOCK, BlockMask, Direction, Geometry, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource

#: Query tiles of a (batch, head) pair that fit a thread block's shared memory.
MOST_TILES = 12 * 1024


@dataclass(frozen=True)
class TileOrderTiling:
    """How a thread block divides its work (``TileOrderTiling`` in the kernel)."""

    warps: int = 32
    at_once: int = 4
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return f"TileOrderTiling<{self.warps}, {self.at_once}>"


@dataclass(frozen=True)
class TileOrderScratch:
    """The order, of each (batch, head) pair whose tiles may visit other keys than another's.

    Attributes:
        problem: with a block mask.
        geometry: its sizes.
        masks: batch entries and heads that have a mask of their own; 1 if all share one.
    """

    problem: Problem
    geometry: Geometry
    masks: tuple[int, int]

    @property
    def _tiles(self) -> int:
        return -(-self.geometry.seq_q // BLOCK)

    @cached_property
    def _entries(self) -> tuple[int, int]:
        batch, heads = self.masks
        lengths = {"seq_len_q", "seq_len_kv"}
        return batch if lengths.isdisjoint(self.geometry.tensors) else self.geometry.batch, heads

    @property
    def nbytes(self) -> int:
        batch, heads = self._entries
        return -(-4 * batch * heads * self._tiles // 256) * 256

    def describe(self, params: Params) -> None:
        """Writes where entries begin."""
        batch, heads = self._entries
        params.tile_order = TileOrderRef(
            0, heads * self._tiles * (batch > 1), self._tiles * (heads > 1)
        )

    def places(self, params: Params) -> list[Place]:
        """Where addresses go."""
        return places_of([(params.tile_order, "data", self.nbytes)])

    def kernel(self) -> KernelLaunch:
        """The kernel that finds it, after the one that writes the block mask, if one does."""
        (batch, heads), threads = self._entries, TileOrderTiling().threads
        source, shared = tile_order_source(self.problem), 4 * self._tiles
        grid = heads, batch, 1
        is_later = self.problem.score_blocks is not None
        return KernelLaunch(source, grid, threads, shared, plain=True, programmatic=is_later)


def tile_order_source(problem: Problem) -> KernelSource:
    """Of a problem with a block mask."""
    masks = (mask for mask in problem.masks if not isinstance(mask, BlockMask))
    alone = Problem(
        Direction.FORWARD, data_type.HALF, 8, 8, (Scale(),), (*masks, BlockMask())
    )  # fmt: skip
    return kernel_source("tile_order", alone, TileOrderTiling(), 0)


def orders_tiles(geometry: Geometry, multiprocessors: int) -> bool:
    """Whether the order of a block mask's tiles matters, and is found: blocks ask for some."""
    tiles = -(-geometry.seq_q // BLOCK)
    asked = query_tiles(geometry, BLOCK) - multiprocessors
    return asked > 0 and 1 < tiles <= MOST_TILES
