"""The kernels of a plan: how one is launched, and what their sizes are made of."""

from __future__ import annotations

from typing import Protocol

from dlattn.plans.argument import Params
from dlattn.plans.params import Place
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target

#: Blocks of a launch grid along x, and along y or z.
MOST_BLOCKS, MOST_BLOCKS_YZ = 2**31 - 1, 2**16 - 1

#: What one wave of blocks may re-read from L2; about half of the smallest L2 that matters (A100).
WAVE_BYTES = 20 * 2**20

#: Shared memory that the driver takes for each block, besides what a launch asks for.
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan.

    Attributes:
        source: its translation unit.
        grid: blocks along x, y, z.
        block: threads per block.
        shared: bytes of dynamic shared memory.
        plain: it takes ``Params`` where the plan's argument has more.
        programmatic: it waits by itself for the kernel before, and may be begun earlier.
        cluster: blocks of a cluster.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    block: int
    shared: int
    plain: bool = False
    programmatic: bool = False
    cluster: int = 1


def shared_of_each(target: Target, blocks: int) -> int:
    """Bytes of shared memory that each of so many blocks of a multiprocessor may ask for."""
    return (target.shared_memory + _RESERVED_SHARED) // blocks - _RESERVED_SHARED


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def query_tiles(geometry: Geometry, tile_q: int) -> int:
    """Query tiles of all (batch, head) pairs."""
    return geometry.batch * geometry.heads_q * -(-geometry.seq_q // tile_q)


def pairs_per_wave(problem: Problem, geometry: Geometry, wave_bytes: int = WAVE_BYTES) -> int:
    """(batch, head) pairs of a forward whose keys and values stay in L2 together; at least 1."""
    kv_bytes = 2 * geometry.seq_kv * (problem.head_dim_qk + problem.head_dim_v)
    shared_by = geometry.heads_q // max(geometry.heads_k, geometry.heads_v)
    return min(geometry.batch * geometry.heads_q, max(1, wave_bytes * shared_by // kv_bytes))


def tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a ``SharedTile`` of 16-bit elements (``cuda_src/tile/shared_tile.cuh``)."""
    pitch = columns + 8 if columns // 8 % 2 == 0 else columns
    return 2 * rows * pitch


class FirstScratch(Protocol):
    """What a kernel before a plan's own finds out for them, in the workspace."""

    @property
    def nbytes(self) -> int: ...

    def kernel(self) -> KernelLaunch: ...

    def places(self, params: Params) -> list[Place]: ...
