"""The portable forward: ``cuda_src/kernels/fwd_sm80.cuh``, for compute capability 8.0 and up."""

from __future__ import annotations

from collections.abc import Sequence

from dlattn.plans.argument import ItemsRef
from dlattn.plans.cuda import CudaPlan, refusal
from dlattn.plans.kernels import (
    MOST_BLOCKS,
    KernelLaunch,
    pairs_per_wave,
    query_tiles,
    round_up,
    tile_bytes,
)
from dlattn.plans.source import kernel_source
from dlattn.problem import BLOCK, Direction, Geometry, Problem
from dlattn.records import dataclass
from dlattn.runtime.target import Target


@dataclass(frozen=True)
class FwdTiling:
    """How a forward block divides its work (``FwdTiling`` in the kernel).

    Attributes:
        tile_q, tile_k: queries and keys per tile.
        warps: warps per block; each owns ``tile_q / warps`` rows.
        stages: key and value tiles held in shared memory, 1 or 2.
        min_blocks: resident blocks per multiprocessor that the registers must allow.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return f"FwdTiling<{self.tile_q}, {self.tile_k}, {self.warps}, {self.stages}>"

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dim_qk, dim_v = round_up(problem.head_dim_qk, 16), round_up(value_columns(problem), 16)
        q_or_o = max(tile_bytes(self.tile_q, dim_qk), tile_bytes(self.tile_q, dim_v))
        k_and_v = tile_bytes(self.tile_k, dim_qk) + tile_bytes(self.tile_k, dim_v)
        return q_or_o + self.stages * k_and_v


#: Columns of the output that a block has registers for.
MOST_COLUMNS = 256


def value_slices(problem: Problem) -> int:
    """How many blocks divide the columns of the output, each of which computes the scores anew."""
    return -(-problem.head_dim_v // MOST_COLUMNS)


def value_columns(problem: Problem) -> int:
    """Columns of the output that a block computes (``columns_v`` in the kernel)."""
    return round_up(-(-problem.head_dim_v // value_slices(problem)), 8)


#: Not measured.
WIDE_TILINGS = {
    384: (FwdTiling(128, 64, 8, 1, 1), FwdTiling(128, 32, 8, 1, 1), FwdTiling(64, 32, 4, 1, 1)),
    512: (FwdTiling(128, 32, 8, 1, 1), FwdTiling(64, 64, 4, 1, 1), FwdTiling(64, 16, 4, 1, 1)),
}
#: Largest head dimension -> tilings, fastest first; the first that fits in shared memory is taken.
#: Measured by ``bench/tune_sm80.py`` among tilings that spill no register (``bench/NOTES.md``).
TILINGS: dict[int, tuple[FwdTiling, ...]] = {
    64: (FwdTiling(128, 64, 4, 2, 2),),
    96: (FwdTiling(128, 64, 4, 1, 2),),
    128: (FwdTiling(128, 32, 4, 2, 2),),
    192: (FwdTiling(128, 64, 8, 2, 1), FwdTiling(64, 32, 4, 1, 2)),
    256: (FwdTiling(128, 64, 8, 1, 1), FwdTiling(64, 32, 4, 1, 2)),
    **WIDE_TILINGS,
}


#: For Blackwell, where ptxas spills what it fits elsewhere, and for element-wise access.
SMALLER_TILINGS = {
    **TILINGS,
    96: (FwdTiling(128, 48, 4, 2, 2),),
    128: (FwdTiling(64, 64, 4, 2, 2),),
}


#: For elements of a bias on their way.
BIASED_TILINGS: dict[int, tuple[FwdTiling, ...]] = {
    128: (FwdTiling(64, 64, 4, 2, 2),),
    256: (FwdTiling(64, 16, 4, 1, 2),),
    512: (FwdTiling(64, 16, 4, 1, 1),),
}


#: For what a user's function reads and computes, too.
PROGRAM_TILINGS = {**BIASED_TILINGS, 128: (FwdTiling(64, 32, 4, 2, 2),)}


def fitting_tilings(problem: Problem, target: Target) -> list[FwdTiling]:
    """Those that fit the device's shared memory, the fastest, as measured, first."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    measured = target.capability < (10, 0) and problem.access_bytes == 16
    table = TILINGS if measured else SMALLER_TILINGS
    if problem.has_bias:
        table = PROGRAM_TILINGS if problem.has_program else BIASED_TILINGS
    tilings = next(
        row
        for limit, row in table.items()
        if largest <= limit and not (problem.has_blocks and any(BLOCK % t.tile_k for t in row))
    )
    return [t for t in tilings if t.shared_memory(problem) <= target.shared_memory]


class FwdSm80(CudaPlan):
    """FlashAttention-2's forward with mma.sync, cp.async and ldmatrix."""

    name = "fwd_sm80"

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: FwdTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or fitting_tilings(problem, target)[0]
        self._params.items = ItemsRef.of(
            tiles=-(-geometry.seq_q // self.tiling.tile_q),
            heads=geometry.heads_q,
            pairs=geometry.batch * geometry.heads_q,
            wave=pairs_per_wave(problem, geometry),
        )

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = refusal(problem, geometry, target, Direction.FORWARD, cls.name)
        if reason is None and value_slices(problem) * query_tiles(geometry, 64) > MOST_BLOCKS:
            return "batch x heads x (queries / 64) x (columns of v / 256) must be below 2**31."
        return reason

    @classmethod
    def choices(cls, problem: Problem, geometry: Geometry, target: Target) -> Sequence[FwdTiling]:
        return fitting_tilings(problem, target)

    def kernels(self) -> list[KernelLaunch]:
        shared = self.tiling.shared_memory(self.problem)
        source = kernel_source(self.name, self.problem, self.tiling, shared)
        blocks = query_tiles(self.geometry, self.tiling.tile_q) * value_slices(self.problem)
        return [KernelLaunch(source, (blocks, 1, 1), self.tiling.threads, shared)]
