"""The Hopper backward: ``cuda_src/kernels/bwd_sm90.cuh``, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dlattn.plans.backward import BackwardPlan, backward_refusal
from dlattn.plans.cuda import KernelLaunch, round_up
from dlattn.plans.fwd_sm90 import slab_bytes
from dlattn.plans.mapped import MappedPlan
from dlattn.plans.params import MappedBwdParams
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.runtime.target import Target


@dataclass(frozen=True)
class Sm90BwdTiling:
    """How a Hopper backward block divides its work (``Sm90BwdTiling`` in the kernel).

    Attributes:
        stages: query tiles, and dO tiles, in shared memory.
        ds_stages: tiles of dS in shared memory.
        late_dq: dQ of a query tile is computed in the step of the next one, so that no consumer
            waits for the other's half of dS.
    """

    stages: int = 2
    ds_stages: int = 2
    late_dq: bool = False

    tile_q: ClassVar[int] = 64
    tile_k: ClassVar[int] = 128
    columns: ClassVar[int] = 64
    threads: ClassVar[int] = 384
    min_blocks: ClassVar[int] = 1

    @property
    def cpp(self) -> str:
        return f"Sm90BwdTiling<{self.stages}, {self.ds_stages}, {str(self.late_dq).lower()}>"

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        dims = problem.head_dim_qk, problem.head_dim_v
        k_and_v = sum(slab_bytes(self.tile_k, dim) for dim in dims)
        q_and_do = sum(slab_bytes(self.tile_q, dim) for dim in dims) + 4 * 2 * self.tile_q
        ds = self.ds_stages * slab_bytes(self.tile_q, self.tile_k)
        barriers = 2 * 8 * (2 + 2 * self.stages + self.ds_stages)
        return round_up(k_and_v + self.stages * q_and_do + ds + barriers, 1024)


@dataclass(frozen=True)
class RowTiling:
    """The same tiling for the kernels before and after, whose blocks have no producer."""

    cpp: str
    threads: int = 256
    min_blocks: int = 1


class BwdSm90(MappedPlan, BackwardPlan):
    """FlashAttention-3's backward with wgmma, TMA and warp specialisation."""

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
        self.tiling = tiling or Sm90BwdTiling()
        self.set_waves()

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = backward_refusal(problem, geometry, target, cls.name)
        if reason is None and max(problem.head_dim_qk, problem.head_dim_v) > 128:
            reason = "head dimensions above 128 are not built yet."
        return reason or cls.mapping_refusal(problem, geometry, target)

    def box_rows(self) -> Mapping[str, int]:
        return {"q": 64, "k": 128, "v": 128, "dO": 64, "dK": 64, "dV": 64}

    @property
    def row_tiling(self) -> Tiling:
        return RowTiling(self.tiling.cpp)

    def main_kernel(self, blocks: int) -> KernelLaunch:
        shared = self.tiling.shared_memory(self.problem)
        source = kernel_source(
            self.name, self.problem, self.tiling, shared, argument=MappedBwdParams
        )
        return KernelLaunch(source, (blocks, 1, 1), self.tiling.threads, shared)
