"""The gradient of a bias: ``cuda_src/kernels/bwd_dbias.cuh``, after a backward's main kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlattn.dtypes import to_cpp
from dlattn.plans.cuda import MOST_BLOCKS, KernelLaunch, round_up, tile_bytes
from dlattn.plans.mapped import staged
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Geometry, Problem
from dlattn.runtime.target import Target

#: What head dimensions are rounded up to.
_COLUMNS = 32
#: ``walks`` in the kernel.
_WALKS_BYTES = 96
#: Shared memory that the driver takes for each block.
_RESERVED = 1024


@dataclass(frozen=True)
class DBiasTiling:
    """How a block divides a tile of dBias (``DBiasTiling`` in the kernel).

    Attributes:
        tile_q, tile_k: queries and keys.
        warps: warps per block.
        warps_q: of those, along queries.
        main: the main kernel's tiling, in C++, by which row statistics are laid out.
        min_blocks: resident blocks per multiprocessor that the registers must allow.
    """

    tile_q: int
    tile_k: int
    warps: int
    warps_q: int
    main: str = ""
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return (
            f"DBiasTiling<{self.tile_q}, {self.tile_k}, {self.warps}, {self.warps_q}, {self.main}>"
        )

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        return (
            2 * 4 * self.tile_q
            + _WALKS_BYTES
            + sum(
                tile_bytes(rows, round_up(dim, _COLUMNS))
                for rows in (self.tile_q, self.tile_k)
                for dim in (problem.head_dim_qk, problem.head_dim_v)
            )
        )


#: Those with which fewer elements are loaded for each product first.
TILINGS = (
    DBiasTiling(128, 64, 8, 4),
    DBiasTiling(64, 64, 8, 2),
    DBiasTiling(64, 32, 8, 4),
    DBiasTiling(32, 32, 4, 2),
)


def choose_tiling(problem: Problem, target: Target) -> DBiasTiling:
    """The first of the large ones of which two blocks fit side by side, else the first that fits.

    The largest leaves no register for more than an aligned bias.
    """
    plain = problem.has_aligned_bias and len(problem.edits) == 2 and problem.access_bytes == 16
    for tiling in TILINGS[0 if plain else 1 : 2]:
        block = tiling.shared_memory(problem) + _RESERVED
        if 2 * block <= target.shared_memory + _RESERVED:
            return replace(tiling, min_blocks=2)
    return next(t for t in TILINGS if t.shared_memory(problem) <= target.shared_memory)


def dbias_kernel(
    problem: Problem, geometry: Geometry, target: Target, main: Tiling
) -> KernelLaunch:
    """The kernel; each block has a tile of dBias, whatever is added to it."""
    assert problem.d_bias is not None
    tiling = replace(choose_tiling(problem, target), main=main.cpp)
    shared = tiling.shared_memory(problem)
    source = kernel_source(
        "bwd_dbias",
        replace(staged(problem), sink=False, deterministic=False),
        tiling,
        shared,
        constants={"bias_pairs": int(problem.has_aligned_bias)},
        types={"DBias": to_cpp(problem.d_bias)},
    )
    blocks = _blocks(geometry, tiling)
    return KernelLaunch(source, (blocks, 1, 1), tiling.threads, shared, plain=True)


def dbias_refusal(problem: Problem, geometry: Geometry, target: Target) -> str | None:
    """Why the kernel cannot run a problem, or ``None``."""
    if problem.d_bias is None:
        return None
    if _blocks(geometry, choose_tiling(problem, target)) > MOST_BLOCKS:
        return "the gradient of a bias must have fewer than 2**31 tiles; split the batch."
    return None


def _blocks(geometry: Geometry, tiling: DBiasTiling) -> int:
    batch, heads, seq_q, seq_kv = geometry.tensors["dBias"].dim
    return batch * heads * -(-seq_q // tiling.tile_q) * -(-seq_kv // tiling.tile_k)
