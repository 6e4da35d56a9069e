"""Gradients of a bias, and of what a user's function of scores reads, after a backward's main
kernel: ``cuda_src/kernels/bwd_dbias.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from math import prod

from dlattn.dtypes import data_type, to_cpp
from dlattn.plans.kernels import MOST_BLOCKS, KernelLaunch, round_up, shared_of_each, tile_bytes
from dlattn.plans.mapped import staged
from dlattn.plans.source import Tiling, kernel_source
from dlattn.problem import Edit, Geometry, Problem, ScoreGradient, ScoreProgram
from dlattn.records import dataclass
from dlattn.runtime.target import Target

#: What head dimensions are rounded up to.
_COLUMNS = 32
#: ``walks`` in the kernel.
_WALKS_BYTES = 96


@dataclass(frozen=True)
class DBiasTiling:
    """How a block divides a tile of dBias (``DBiasTiling`` in the kernel).

    Attributes:
        tile_q, tile_k: queries and keys.
        warps: warps per block.
        warps_q: of those, along queries.
        min_blocks: resident blocks per multiprocessor that registers and shared memory must allow.
        main: the main kernel's tiling, in C++, by which row statistics are laid out.
    """

    tile_q: int
    tile_k: int
    warps: int
    warps_q: int
    min_blocks: int = 1
    main: str = ""

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


#: Blocks that share tiles: as many waves of them, and each at least so many steps.
_WAVES, _LEAST_STEPS = 2, 8

#: The first that fits is taken: two blocks that hide each other's waits, else as many products for
#: each element that is loaded as there is room for.
TILINGS = (
    DBiasTiling(64, 64, 8, 2, min_blocks=2),
    DBiasTiling(128, 64, 8, 4),
    DBiasTiling(64, 64, 8, 2),
    DBiasTiling(64, 32, 8, 4),
    DBiasTiling(32, 32, 4, 2),
)
#: Registers of two such blocks are enough for no more than an aligned bias.
PLAIN_TILINGS = (DBiasTiling(128, 64, 8, 4, min_blocks=2), *TILINGS)


def choose_tiling(problem: Problem, target: Target) -> DBiasTiling | None:
    """The first tiling that leaves room for the blocks that are to be side by side, if any does."""
    plain = problem.has_aligned_rows and len(problem.edits) == 2 and problem.access_bytes == 16
    plain = plain and problem.dropout is None
    # Copies element by element leave a function too few registers for two blocks.
    alone = problem.has_program and problem.access_bytes != 16

    def fits(tiling: DBiasTiling) -> bool:
        if alone and tiling.min_blocks > 1:
            return False
        return tiling.shared_memory(problem) <= shared_of_each(target, tiling.min_blocks)

    return next(filter(fits, PLAIN_TILINGS if plain else TILINGS), None)


def dbias_kernel(
    problem: Problem, geometry: Geometry, target: Target, main: Tiling
) -> KernelLaunch:
    """The kernel for the gradient of a bias; a block has a tile of it, whatever is added to that.

    Args:
        main: the tiling of the main kernel.
    """
    assert problem.d_bias is not None
    types = {"DBias": to_cpp(problem.d_bias)}
    return _kernel("dBias", -1, types, "", problem, geometry, target, main)


def score_gradient_kernel(
    of: ScoreGradient, problem: Problem, geometry: Geometry, target: Target, main: Tiling
) -> KernelLaunch:
    """The same for that of a tensor that a user's function reads."""
    types, definitions = {"DBias": to_cpp(of.dtype)}, ""
    if not of.is_plain:
        from dlattn.plans.score_source import definition

        # Of the score that the function is given, as the edits before it make that.
        before = takewhile(lambda edit: not isinstance(edit, ScoreProgram), problem.edits)
        given = before if of.partial.takes_score else ()
        edits = ", ".join(edit.cpp for edit in (*given, of.partial))
        types, definitions = {**types, "Partial": f"Edits<{edits}>"}, definition(of.partial)
    return _kernel(of.role, of.number, types, definitions, problem, geometry, target, main)


def _kernel(
    role: str,
    number: int,
    types: Mapping[str, str],
    definitions: str,
    problem: Problem,
    geometry: Geometry,
    target: Target,
    main: Tiling,
) -> KernelLaunch:
    chosen = choose_tiling(problem, target)
    assert chosen is not None
    tiling = replace(chosen, main=main.cpp)
    shared = tiling.shared_memory(problem)
    source = kernel_source(
        "bwd_dbias",
        replace(problem, edits=_edits(problem), sink=False, deterministic=False),
        tiling,
        shared,
        constants={"gradient_of": number, "bias_pairs": int(_reads_pairs(problem))},
        types=types,
        definitions=definitions,
    )
    grid = _grid(problem, geometry, role, tiling, target)
    return KernelLaunch(source, grid, tiling.threads, shared, plain=True)


def _reads_pairs(problem: Problem) -> bool:
    """Whether elements of the bias for two neighbouring keys are a word of memory."""
    bias = problem.bias
    return bias is not None and problem.has_aligned_rows and not bias.is_boolean


def _edits(problem: Problem) -> tuple[Edit, ...]:
    """With a bias that is read by tiles, and functions without their derivative by the score: what
    does not exist need not be kept from them then, unless they read elements of it."""
    return tuple(
        replace(edit, slope=None) if isinstance(edit, ScoreProgram) else edit
        for edit in staged(problem).edits
    )


@dataclass(frozen=True)
class GradientScratch:
    """What blocks that share tiles leave to each other: one gradient after the other.

    Attributes:
        arrivals: bytes of counts, which are zero when the first kernel starts.
        parts: bytes of sums.
    """

    arrivals: int = 0
    parts: int = 0


def gradient_scratch(problem: Problem, geometry: Geometry, target: Target) -> GradientScratch:
    """For all of these kernels of a problem."""
    wanted = _wanted(problem)
    tiling = choose_tiling(problem, target) if wanted else None
    if tiling is None:
        return GradientScratch()
    grids = [_grid(problem, geometry, role, tiling, target) for role in wanted]
    shared = [grid for grid in grids if prod(grid[1:]) > 1]
    counts = max((grid[0] for grid in shared), default=0)
    parts = max(map(prod, shared), default=0)
    return GradientScratch(round_up(4 * counts, 256), 4 * tiling.tile_q * tiling.tile_k * parts)


def gradients_refusal(problem: Problem, geometry: Geometry, target: Target) -> str | None:
    """Why the kernels cannot run a problem, or ``None``."""
    wanted = _wanted(problem)
    tiling = choose_tiling(problem, target) if wanted else None
    for role, dtype in wanted.items():
        name = geometry.tensors[role].name
        if dtype is data_type.DOUBLE:
            return f"{name}, a gradient, must be HALF, BFLOAT16 or FLOAT; got DOUBLE."
        if tiling is None:
            return (
                f"{name}: rows of so large head dimensions do not fit the shared memory of "
                f"{target}."
            )
        if _tiles(geometry, role, tiling) > MOST_BLOCKS:
            return f"{name}, a gradient, must have fewer than 2**31 tiles; split the batch."
    return None


def _wanted(problem: Problem) -> dict[str, data_type]:
    """The gradients that are written, and their types."""
    wanted = {} if problem.d_bias is None else {"dBias": problem.d_bias}
    return wanted | {of.role: of.dtype for of in problem.score_gradients}


def _grid(
    problem: Problem, geometry: Geometry, role: str, tiling: DBiasTiling, target: Target
) -> tuple[int, int, int]:
    """The tiles of a gradient; blocks that share each, along queries or keys, and along heads or
    batch entries: as many as run at once, if a block has steps enough."""
    batch, heads, seq_q, seq_kv = geometry.tensors[role].dim
    along_q = -(-geometry.seq_q // tiling.tile_q) if seq_q == 1 else 1
    along_k = -(-geometry.seq_kv // tiling.tile_k) if seq_kv == 1 else 1
    along_heads, along_batch = geometry.heads_q // heads, geometry.batch // batch
    tiles = _tiles(geometry, role, tiling)
    wanted = _WAVES * target.multiprocessors * tiling.min_blocks // tiles
    steps = along_q * along_k * along_heads * along_batch
    # An aligned bias has tiles of every query and key, and its kernel no registers for more.
    crowded = role == "dBias" and problem.has_aligned_rows
    parts = 1 if crowded else max(1, min(wanted, steps // _LEAST_STEPS))
    y = min(parts, along_q if seq_q == 1 else along_k)
    return tiles, y, min(parts // y, along_heads if heads == 1 else along_batch)


def _tiles(geometry: Geometry, role: str, tiling: DBiasTiling) -> int:
    batch, heads, seq_q, seq_kv = geometry.tensors[role].dim
    return batch * heads * -(-seq_q // tiling.tile_q) * -(-seq_kv // tiling.tile_k)
