"""The Hopper backward: ``cuda_src/kernels/bwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dlattn.plans.backward import BackwardPlan, backward_refusal
from dlattn.plans.cuda import KernelLaunch, round_up
from dlattn.plans.mapped import MappedPlan, slab_bytes
from dlattn.plans.params import MappedBwdParams
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.runtime.target import Target


@dataclass(frozen=True)
class Sm90BwdTiling:
    """How a Hopper backward block divides its work (``Sm90BwdTiling`` in the kernel).

    Attributes:
        tile_q: queries of a tile: 64, or 128 where the head dimensions leave registers for them.
        tile_k: keys of a block: 128, or 64 by product.
        by_product: one key worker has dV and the other dK; else each has both, of half the keys.
        stages: tiles of q, of dO and of dS in shared memory.
        dq_columns: columns of dQ that are computed at a time, for each 64 queries.
    """

    tile_q: int = 64
    tile_k: int = 128
    by_product: bool = False
    stages: int = 2
    dq_columns: int = 64

    columns: ClassVar[int] = 64
    threads: ClassVar[int] = 384
    min_blocks: ClassVar[int] = 1

    @property
    def query_registers(self) -> int:
        """Of a thread that computes dQ, as few as it can do with; the others share what is left."""
        return 72 if self.dq_columns == 64 else 104

    @property
    def cpp(self) -> str:
        by_product = str(self.by_product).lower()
        return (
            f"Sm90BwdTiling<{self.tile_q}, {self.tile_k}, {by_product}, {self.stages}, "
            f"{self.dq_columns}, {self.query_registers}>"
        )

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dims = problem.head_dim_qk, problem.head_dim_v
        k_and_v = sum(slab_bytes(self.tile_k, dim) for dim in dims)
        tiles = sum(slab_bytes(self.tile_q, dim) for dim in (*dims, self.tile_k))
        weights = 2 * self.tile_q * self.tile_k if self.by_product else 0
        row_stats, step, loading = 4 * 2 * self.tile_q, 16, 16
        rings = 3 + self.tile_k // 64
        barriers = 8 * (2 * 2 + rings * 2 * self.stages + 4)
        stages = self.stages * (tiles + weights + row_stats + step)
        return round_up(k_and_v + stages + 2 * loading + barriers, 1024)


def choose_tiling(problem: Problem) -> Sm90BwdTiling:
    """By what fits registers: dK and dV of 64 keys take half of both head dimensions a thread."""
    dim_qk, dim_v = (round_up(dim, 64) for dim in (problem.head_dim_qk, problem.head_dim_v))
    if max(dim_qk, dim_v) == 64:
        return Sm90BwdTiling(tile_q=128)
    if dim_qk + dim_v > 320:
        columns = 128 if dim_qk % 128 == 0 else 64
        return Sm90BwdTiling(tile_k=64, by_product=True, dq_columns=columns)
    if max(dim_qk, dim_v) > 128:
        return Sm90BwdTiling()
    return Sm90BwdTiling(stages=3, dq_columns=dim_qk)


@dataclass(frozen=True)
class RowTiling:
    """The same tiling for the kernels before and after, whose blocks have no producer."""

    cpp: str
    threads: int = 256
    min_blocks: int = 1


class BwdSm90(MappedPlan, BackwardPlan):
    """wgmma, TMA and specialised warpgroups: two compute dK and dV, the third one dQ."""

    name = "bwd_sm90"
    argument_type = MappedBwdParams

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: Sm90BwdTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or choose_tiling(problem)
        self.set_waves()

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = backward_refusal(problem, geometry, target, cls.name)
        return reason or cls.mapping_refusal(problem, geometry, target)

    def box_rows(self) -> Mapping[str, int]:
        queries, keys = self.tiling.tile_q, self.tiling.tile_k
        # A warpgroup stores its half of the keys.
        return {"q": queries, "k": keys, "v": keys, "dO": queries, "dK": 64, "dV": 64}

    @property
    def row_tiling(self) -> Tiling:
        return RowTiling(self.tiling.cpp)

    def main_kernel(self, blocks: int) -> KernelLaunch:
        shared = self.tiling.shared_memory(self.problem)
        source = kernel_source(
            self.name, self.problem, self.tiling, shared, argument=MappedBwdParams
        )
        return KernelLaunch(source, (blocks, 1, 1), self.tiling.threads, shared)
