"""What a call writes for those who look inside: dropout's mask, and signed probabilities."""

from __future__ import annotations

from dataclasses import replace

from dlattn.plans.kernels import KernelLaunch, round_up, tile_bytes
from dlattn.plans.source import kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass


@dataclass(frozen=True)
class DumpTiling:
    """How a block of ``rng_dump`` divides its work (``DumpTiling`` in the kernel)."""

    threads: int = 256
    min_blocks: int = 1

    @property
    def cpp(self) -> str:
        return f"DumpTiling<{self.threads // 32}>"


def dump_kernels(problem: Problem, geometry: Geometry) -> list[KernelLaunch]:
    """The kernel that writes ``rng_dump``, if that is wanted."""
    if "rng_dump" not in geometry.tensors:
        return []
    plain = Problem(problem.direction, problem.dtype, 8, 8, dropout=problem.dropout)
    grid = (-(-geometry.seq_q // 16), geometry.heads_q, geometry.batch)
    tiling = DumpTiling()
    source = kernel_source("rng_dump", plain, tiling, 0)
    return [KernelLaunch(source, grid, tiling.threads, 0, plain=True)]


@dataclass(frozen=True)
class DebugSoftmaxTiling:
    """How a block of ``debug_softmax`` divides its work (``DebugSoftmaxTiling`` in the kernel)."""

    threads: int = 128
    min_blocks: int = 1
    tile_k: int = 32
    #: Rows and columns are those of the scores, and not rounded up to 128.
    exact: bool = False

    @property
    def tile_q(self) -> int:
        return self.threads // 2

    @property
    def cpp(self) -> str:
        return f"DebugSoftmaxTiling<{self.threads // 32}{', true' * self.exact}>"


def debug_kernels(problem: Problem, geometry: Geometry) -> list[KernelLaunch]:
    """The kernel that writes ``debug_softmax``, if that is wanted."""
    if "debug_softmax" not in geometry.tensors:
        return []
    batch, heads, rows, columns = geometry.tensors["debug_softmax"].dim
    exact = rows % 128 != 0 or columns % 128 != 0
    tiling, dim = DebugSoftmaxTiling(exact=exact), round_up(problem.head_dim_qk, 16)
    plain = replace(
        problem, head_dim_v=8, score_max=False, score_sum_exp=False, sink=False, paged_v=False
    )
    shared = tile_bytes(tiling.tile_q, dim) + tile_bytes(tiling.tile_k, dim)
    source = kernel_source("debug_softmax", plain, tiling, shared)
    tiles = -(-rows // tiling.tile_q) * -(-columns // tiling.tile_k)
    return [KernelLaunch(source, (tiles, heads, batch), tiling.threads, shared, plain=True)]
