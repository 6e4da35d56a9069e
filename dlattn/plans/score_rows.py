"""What a user's function of scores that masks leaves of each query, and of each tile of queries:
``kernels/score_rows.cuh``, between ``score_blocks`` and a Hopper forward."""

from __future__ import annotations

from dlattn.dtypes import data_type
from dlattn.plans.argument import KeptKeysRef, Params
from dlattn.plans.params import Place, places_of
from dlattn.plans.score_blocks import ScoreBlocksScratch
from dlattn.plans.source import kernel_source
from dlattn.problem import BLOCK, Direction, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource

#: Bytes of an ``Interval``, and of a number of items or a word of bits.
_INTERVAL, _WORD = 8, 4

#: Of items, by how long they take (``LongestFirstRef::classes``).
CLASSES = 96


@dataclass(frozen=True)
class ScoreRowsTiling:
    """How a thread block divides its work (``ScoreRowsTiling`` in the kernel)."""

    warps: int = 32
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return f"ScoreRowsTiling<{self.warps}>"


@dataclass(frozen=True)
class ScoreRowsScratch:
    """An interval for each query, and for each class of items which ones are in it, a bit each.
    Batch entries, and heads, that share a mask share them.

    Attributes:
        problem: the attention.
        mask: the blocks that the function keeps.
    """

    problem: Problem
    mask: ScoreBlocksScratch

    @property
    def _tiles(self) -> int:
        return -(-self.mask.geometry.seq_q // BLOCK)

    @property
    def _words(self) -> int:
        """Of the bits of a class."""
        _, heads = self.mask.entries
        return -(-self._tiles * heads // 32)

    @property
    def _orders_items(self) -> bool:
        return not self.problem.ragged  # which have an order of their own

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of intervals, of numbers of items, of bits."""
        batch, heads = self.mask.entries
        intervals = _INTERVAL * batch * heads * self.mask.geometry.seq_q
        if not self._orders_items:
            return intervals, 0, 0
        classes = batch * CLASSES
        return intervals, _WORD * classes, _WORD * classes * self._words

    @property
    def nbytes(self) -> int:
        return -(-sum(self._sizes) // 256) * 256

    @property
    def grid(self) -> tuple[int, int, int]:
        batch, heads = self.mask.entries
        return self._tiles, heads, batch

    def describe(self, params: Params) -> None:
        """Writes what is no address."""
        batch, heads = self.mask.entries
        queries = self.mask.geometry.seq_q
        params.kept_keys = KeptKeysRef(0, heads * queries * (batch > 1), queries * (heads > 1))
        params.longest_first.words = self._words

    def places(self, params: Params) -> list[Place]:
        """Where addresses go; the memory is aligned to 8 bytes."""
        intervals, counts, members = self._sizes
        arrays = [(params.kept_keys, "data", intervals)]
        if self._orders_items:
            order = params.longest_first
            return places_of([*arrays, (order, "counts", counts), (order, "members", members)])
        return places_of(arrays)

    def source(self) -> KernelSource:
        masks = self.problem.masks
        any_problem = Problem(Direction.FORWARD, data_type.HALF, 8, 8, (Scale(),), masks)
        return kernel_source("score_rows", any_problem, ScoreRowsTiling(), 0)
