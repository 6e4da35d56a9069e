"""The portable backward: delta, main and dQ kernels, for compute capability 8.0 and up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dlattn.plans.backward import BackwardPlan, backward_refusal
from dlattn.plans.kernels import KernelLaunch, round_up, tile_bytes
from dlattn.plans.source import kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass
from dlattn.runtime.target import Target


@dataclass(frozen=True)
class BwdTiling:
    """How a backward block divides its work (``BwdTiling`` in ``bwd_tile.cuh``).

    Attributes:
        tile_q, tile_k: queries and keys per tile.
        warps: warps per block.
        warps_s: of those, along queries in the score products.
        warps_kv: of those, along keys in dK and dV.
        warps_dq: of those, along queries in dQ.
        stages_q, stages_do: tiles of Q and of dO held in shared memory, 1 or 2.
        min_blocks: resident blocks per multiprocessor that the registers must allow.
    """

    tile_q: int
    tile_k: int
    warps: int
    warps_s: int
    warps_kv: int
    warps_dq: int
    stages_q: int
    stages_do: int
    min_blocks: int = 1

    #: What head dimensions are rounded up to.
    columns: ClassVar[int] = 32
    stats_words: ClassVar[int] = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return (
            f"BwdTiling<{self.tile_q}, {self.tile_k}, {self.warps}, {self.warps_s}, "
            f"{self.warps_kv}, {self.warps_dq}, {self.stages_q}, {self.stages_do}>"
        )

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the main kernel's ``SharedMemory``."""
        dim_qk, dim_v = padded_dims(problem)
        return (
            self.stages_q * tile_bytes(self.tile_q, dim_qk)
            + self.stages_do * tile_bytes(self.tile_q, dim_v)
            + tile_bytes(self.tile_k, dim_qk)
            + tile_bytes(self.tile_k, dim_v)
            + 2 * tile_bytes(self.tile_q, self.tile_k)
            + 2 * 2 * 4 * self.tile_q
            + HEAD_ROWS_BYTES
        )


#: ``HeadRows`` in the kernel: four addresses.
HEAD_ROWS_BYTES = 32


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Columns of the kernel's tiles for q and k, and for v (``BwdShapes``)."""
    columns = BwdTiling.columns
    return round_up(problem.head_dim_qk, columns), round_up(problem.head_dim_v, columns)


#: Largest head dimension -> tilings, fastest first; the first that fits in shared memory is taken.
#: Measured on Hopper by ``bench/tune_sm80.py`` among tilings that spill no register there
#: (``bench/NOTES.md``).
HOPPER_TILINGS: dict[int, tuple[BwdTiling, ...]] = {
    64: (BwdTiling(64, 128, 4, 2, 4, 2, 2, 2),),
    96: (BwdTiling(64, 64, 4, 2, 2, 2, 2, 1),),
    128: (BwdTiling(64, 128, 8, 2, 4, 2, 2, 2),),
    192: (BwdTiling(64, 64, 8, 2, 2, 2, 2, 2),),
    256: (BwdTiling(64, 64, 8, 2, 2, 2, 2, 1),),
}
#: For every other device and for element-wise access: none of these spills anywhere.
TILINGS: dict[int, tuple[BwdTiling, ...]] = {
    64: (BwdTiling(64, 128, 8, 2, 4, 2, 2, 2), BwdTiling(64, 64, 8, 2, 2, 2, 2, 1)),
    96: (BwdTiling(64, 64, 8, 2, 2, 2, 2, 2),),
    128: (BwdTiling(64, 64, 8, 4, 4, 4, 2, 2), BwdTiling(64, 64, 8, 4, 4, 4, 1, 1)),
    192: (BwdTiling(64, 64, 8, 2, 2, 2, 2, 2), BwdTiling(32, 64, 8, 2, 4, 2, 1, 1)),
    256: (BwdTiling(32, 64, 8, 2, 2, 2, 2, 2), BwdTiling(32, 32, 8, 2, 2, 2, 1, 1)),
}


#: With registers for elements of a bias on their way.
BIASED_TILINGS: dict[int, tuple[BwdTiling, ...]] = {
    96: TILINGS[96],
    128: TILINGS[128],
    192: TILINGS[192][1:],
    256: TILINGS[256][1:],
}


#: Above 256, not measured; the last for 99 KB of shared memory.
WIDE_TILINGS = (
    BwdTiling(64, 32, 8, 4, 2, 2, 1, 1),
    BwdTiling(32, 32, 8, 2, 2, 2, 1, 1),
    BwdTiling(32, 16, 4, 2, 1, 2, 1, 1),
)


def wide_tilings(problem: Problem, target: Target) -> tuple[BwdTiling, ...]:
    """Those of the above that spill no register, of a head dimension above 256."""
    if target.capability >= (10, 0) and problem.is_edited:
        return WIDE_TILINGS[2:]
    plain = problem.access_bytes == 16 and not (problem.is_edited or problem.has_blocks)
    fits = plain and max(problem.head_dim_qk, problem.head_dim_v) <= 384
    return WIDE_TILINGS if target.capability == (9, 0) and fits else WIDE_TILINGS[1:]


def fitting_tilings(problem: Problem, target: Target) -> list[BwdTiling]:
    """Those that fit the device's shared memory, the fastest, as measured, first."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    measured = target.capability == (9, 0) and problem.access_bytes == 16
    if largest <= 64 and len(set(padded_dims(problem))) == 2:
        measured = False  # the fastest tiling for equal head dimensions spills for others
    if problem.is_edited or problem.dropout:
        measured = False  # and for edits and dropout, too
    if problem.paged_k or problem.paged_v:
        measured = False  # and for addresses out of tables
    if problem.ragged and largest > 192:
        measured = False  # and for offsets
    table = HOPPER_TILINGS if measured else TILINGS
    if problem.has_bias:
        table = BIASED_TILINGS
    tilings = next(
        (row for limit, row in table.items() if largest <= limit), wide_tilings(problem, target)
    )
    return [t for t in tilings if t.shared_memory(problem) <= target.shared_memory]


class BwdSm80(BackwardPlan):
    """FlashAttention-2's backward with mma.sync, cp.async and ldmatrix."""

    name = "bwd_sm80"

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: BwdTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or fitting_tilings(problem, target)[0]
        self.set_waves()

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        if problem.deterministic:
            return "use_deterministic_algorithm: its sums of dQ depend on the order of blocks."
        reason = backward_refusal(problem, geometry, target, cls.name)
        if reason is None and WIDE_TILINGS[-1].shared_memory(problem) > target.shared_memory:
            return (
                f"head dimensions of {problem.head_dim_qk} and {problem.head_dim_v} take more "
                f"shared memory than {target} has; on it, one of them must be at most 480."
            )
        return reason

    @classmethod
    def choices(cls, problem: Problem, geometry: Geometry, target: Target) -> Sequence[BwdTiling]:
        return fitting_tilings(problem, target)

    def main_kernel(self, items: int) -> KernelLaunch:
        shared = self.tiling.shared_memory(self.problem)
        source = kernel_source(self.name, self.problem, self.tiling, shared)
        return KernelLaunch(source, (items, 1, 1), self.tiling.threads, shared)
