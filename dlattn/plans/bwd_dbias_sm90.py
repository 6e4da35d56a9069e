"""The gradient of a bias on Hopper: ``cuda_src/kernels/bwd_dbias_sm90.cuh``."""

from __future__ import annotations

from dlattn.dtypes import to_cpp
from dlattn.plans.argument import MappedBwdParams
from dlattn.plans.kernels import KernelLaunch, round_up
from dlattn.plans.mapped import slab_bytes, staged
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass
from dlattn.runtime.target import Target

#: Queries and keys of a tile.
_TILE = 128


@dataclass(frozen=True)
class Sm90DBiasTiling:
    """How a block works on tiles of dBias (``Sm90DBiasTiling`` in the kernel).

    Attributes:
        stages: pairs of operands in shared memory.
        main: the main kernel's tiling, in C++.
    """

    stages: int
    main: str

    threads: int = 384
    min_blocks: int = 1

    @property
    def cpp(self) -> str:
        return f"Sm90DBiasTiling<{self.stages}, {self.main}>"

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        operands = 2 * slab_bytes(_TILE, max(problem.head_dim_qk, problem.head_dim_v))
        row_stats = 4 * 2 * _TILE * (self.stages // 2 + 1)
        barriers = 2 * 8 * (self.stages + 1)
        bias = slab_bytes(_TILE, _TILE)
        return round_up(self.stages * operands + bias + row_stats + barriers, 1024)


def fits(problem: Problem, geometry: Geometry) -> bool:
    """Whether the kernel can run a problem whose bias the main kernel reads by tiles."""
    plain = not (problem.ragged or problem.paged_k or problem.paged_v or problem.dropout)
    plain &= problem.has_aligned_rows
    _, _, rows, columns = geometry.tensors["dBias"].dim
    return plain and (rows, columns) == (geometry.seq_q, geometry.seq_kv)


def dbias_kernel(
    problem: Problem, geometry: Geometry, target: Target, main: Tiling
) -> KernelLaunch:
    """The kernel, whose blocks take tiles one after another."""
    assert problem.d_bias is not None
    narrow = max(problem.head_dim_qk, problem.head_dim_v) <= 64
    tiling = Sm90DBiasTiling(5 if narrow else 3, main.cpp)
    shared = tiling.shared_memory(problem)
    source = kernel_source(
        "bwd_dbias_sm90",
        staged(problem),
        tiling,
        shared,
        argument=MappedBwdParams,
        constants={"gradient_of": -1},
        types={"DBias": to_cpp(problem.d_bias)},
    )
    batch, heads, seq_q, seq_kv = geometry.tensors["dBias"].dim
    tiles = batch * heads * -(-seq_q // _TILE) * -(-seq_kv // _TILE)
    blocks = min(tiles, target.multiprocessors)
    return KernelLaunch(source, (blocks, 1, 1), tiling.threads, shared)
