"""How blocks of the Hopper forward divide their work (``kernels/fwd_sm90_block.cuh``)."""

from __future__ import annotations

from dataclasses import replace

from dlattn.plans.kernels import round_up
from dlattn.plans.mapped import bias_tile_bytes, slab_bytes
from dlattn.problem import BLOCK, Alibi, GivenMask, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.target import KNOWN

#: Rows that one copy stores: a warp's, or zeros (``output_rows`` in the kernel).
OUTPUT_ROWS = 16

#: Widths of the output product; the next one at or above head_dim_v is computed.
VALUE_COLUMNS = (32, 48, 64, 96, 112, 128, 160, 192, 256)


@dataclass(frozen=True)
class Sm90FwdTiling:
    """How a Hopper forward block divides its work (``Sm90FwdTiling`` in the kernel).

    Attributes:
        consumers: warpgroups of 64 query rows each, 2 to 4.
        tile_k: keys per tile.
        stages: key tiles, and value tiles, in shared memory.
        q_stages: query tiles in shared memory.
        ping_pong: consumers take turns at the tensor cores.
        exponentials_first: before the wait for the output of the tile before, or after it.
        alternates: key tiles may be visited from the first to the last, too, as the schedule says.
        stages_bias: a bias comes through shared memory, too.
        shares_more: blocks share the keys of query tiles under a band, too, which gives each its
            own; and where the parts of a tile are many, they leave them to a kernel of its own.
        slower: what a product of a query and a key takes, as measured, of what it takes with the
            fastest tiling of these head dimensions.
    """

    consumers: int
    tile_k: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = False
    exponentials_first: bool = True
    alternates: bool = False
    stages_bias: bool = False
    shares_more: bool = False
    slower: float = 1.0

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def min_blocks(self) -> int:
        return 1

    @property
    def cpp(self) -> str:
        flags = (self.ping_pong, self.exponentials_first, self.alternates)
        ping_pong, first, alternates = (str(flag).lower() for flag in flags)
        cpp = (
            f"Sm90FwdTiling<{self.consumers}, {self.tile_k}, {self.stages}, {self.q_stages}, "
            f"{ping_pong}, {first}, {alternates}>"
        )
        return f"SharesMore<{cpp}>" if self.shares_more else cpp

    def output_slabs(self, problem: Problem) -> int:
        """Slabs of 64 columns of the output in shared memory at a time: what there is room for."""
        room = KNOWN["sm_90a"].shared_memory - self._bytes_beside_output(problem)
        needed = -(-value_columns(problem) // 64)
        return max(1, min(needed, room // slab_bytes(self.tile_q, 64)))

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the kernel's ``SharedMemory``."""
        output = self.output_slabs(problem) * slab_bytes(self.tile_q, 64)
        return round_up(self._bytes_beside_output(problem) + output, 1024)

    def _bytes_beside_output(self, problem: Problem) -> int:
        dim_qk, dim_v = problem.head_dim_qk, value_columns(problem)
        q, zeros = slab_bytes(self.tile_q, dim_qk), slab_bytes(OUTPUT_ROWS, 64)
        k_and_v = slab_bytes(self.tile_k, dim_qk) + slab_bytes(self.tile_k, dim_v)
        items = 3 * (64 * (1 + self.consumers) + 2 * 8)
        rings = self.q_stages * self.consumers + 2 * self.stages + self.consumers
        barriers = 8 * 4 + 2 * 8 * rings
        asking = 2 * 4
        visits = 4 * self.stages if problem.has_blocks else self.stages
        bias = self.consumers
        if self.stages_bias:
            bias *= bias_tile_bytes(problem, 64, self.tile_k)
        tiles = self.q_stages * q + zeros + self.stages * k_and_v + round_up(bias, 8)
        return tiles + items + round_up(visits, 8) + barriers + asking


@dataclass(frozen=True)
class PartsTiling:
    """How the kernel that puts parts together divides its work (``FwdParts`` in the kernel).

    Attributes:
        of: the tiling that has left them.
        threads: of a block, at the most.
        columns: of the 16 rows that a block has.
        at_a_time: parts that a warp loads.
    """

    of: Sm90FwdTiling
    threads: int = 256
    min_blocks: int = 2
    columns: int = 32
    at_a_time: int = 4

    @property
    def cpp(self) -> str:
        return self.of.cpp

    @property
    def sum_bytes(self) -> int:
        """Of shared memory, for each warp but the first."""
        return 32 * 16 * (1 + self.columns // 8)


def value_columns(problem: Problem) -> int:
    """Columns of the output product: a width of wgmma, not below head_dim_v."""
    return next(width for width in VALUE_COLUMNS if width >= problem.head_dim_v)


def is_positive(problem: Problem) -> bool:
    """Whether the scale is known to be."""
    return any(isinstance(edit, Scale) and edit.positive for edit in problem.edits)


def alternates(problem: Problem) -> bool:
    """Whether query tiles have more keys from one to the next, and blocks do not ask for them: it
    pays above 128 columns that some are visited from the first key to the last."""
    grow = any(band.right and not band.left for band in problem.bands)
    return grow and not (problem.ragged or problem.has_blocks)


def tilings(problem: Problem) -> tuple[Sm90FwdTiling, ...]:
    """The fastest tilings (``bench/NOTES.md``): for many query tiles of many key tiles, then for
    fewer, and for sequences that fill them better."""
    known = _known(problem)
    if problem.has_blocks:  # which tiles divide
        known = tuple(it for it in known if BLOCK % it.tile_q == 0)
    return known


def _known(problem: Problem) -> tuple[Sm90FwdTiling, ...]:
    """Of a problem with a block mask, also those whose tiles do not divide its blocks."""
    dim_qk, dim_v = problem.head_dim_qk, problem.head_dim_v
    largest = max(dim_qk, dim_v)
    if problem.has_aligned_bias and largest <= 128:
        tiling = Sm90FwdTiling(2, 128, stages_bias=True, ping_pong=True)
        if largest <= 64:
            # A scale of either sign takes a register more.
            keys = 128 if is_positive(problem) else 64
            tiling = replace(tiling, tile_k=keys, stages=3, q_stages=2)
        return (tiling,)
    crowded = problem.keeps_scores and problem.has_bias and largest > 64
    crowded |= problem.has_program and largest > (64 if problem.has_blocks else 128)
    if crowded and problem.has_program and problem.ragged and largest > 128:
        return (Sm90FwdTiling(2, 32, stages=4),)
    if problem.gathers and problem.dropout and largest <= 64:
        return (Sm90FwdTiling(2, 64, stages=3, q_stages=2, ping_pong=True),)
    if crowded and largest <= 192:
        return (Sm90FwdTiling(2, 64, ping_pong=True),)
    if largest <= 64:
        two = Sm90FwdTiling(2, 128, stages=3, q_stages=2, ping_pong=True, slower=1.33)
        three = Sm90FwdTiling(3, 96, stages=4, q_stages=2, slower=1.08)
        # Four have no registers for edits or dropout, nor has their scheduler to divide by other
        # numbers, or beside other results; nor have they for a scale of either sign beside pages or
        # fewer columns of v.
        more = problem.is_edited or problem.dropout is not None
        more |= problem.sink or problem.score_max or problem.score_sum_exp
        if not is_positive(problem):
            more |= problem.paged_k or problem.paged_v or dim_v < 64
        if dim_v & (dim_v - 1) or more:
            fewer_keys = Sm90FwdTiling(3, 64, stages=6, q_stages=2, slower=1.12)
            # Nor have three with 96 keys, where a function reads an element for each score, a soft
            # cap meets dropout, or ALiBi a sink under a causal mask.
            needs_more = problem.keeps_scores and problem.dropout is not None
            needs_more |= problem.reads_tables
            has_alibi = any(isinstance(edit, Alibi) for edit in problem.edits)
            needs_more |= has_alibi and problem.sink and any(band.right for band in problem.bands)
            return (fewer_keys, two) if needs_more else (three, fewer_keys, two)
        return Sm90FwdTiling(4, 64, stages=6, q_stages=2), three, two
    if largest <= 128:
        # Beside a soft cap, consumers would wait for their turns.
        caps = problem.keeps_scores and not problem.has_program
        two = Sm90FwdTiling(2, 128, q_stages=2, ping_pong=not caps, slower=1.09)
        return Sm90FwdTiling(3, 64, stages=3, q_stages=2), two
    if dim_qk <= 192 and dim_v <= 128:
        up = alternates(problem)
        two = Sm90FwdTiling(2, 128, ping_pong=True, alternates=up)
        return two, Sm90FwdTiling(3, 64, stages=3, alternates=up)
    if largest <= 192 and problem.has_blocks:
        return (Sm90FwdTiling(2, 64, stages=3, ping_pong=True),)
    if largest <= 192 and problem.adds_to_scores and problem.ragged:
        return (Sm90FwdTiling(2, 64, ping_pong=True),)
    if largest <= 192:
        return _above_128(problem)
    given_mask = isinstance(problem.dropout, GivenMask)
    if problem.adds_to_scores or problem.has_blocks or given_mask:
        return (Sm90FwdTiling(2, 32, stages=4),)
    return (Sm90FwdTiling(2, 64, alternates=alternates(problem)),)


def _above_128(problem: Problem) -> tuple[Sm90FwdTiling, ...]:
    """Of 129 to 192 columns of v. Where rows of a head do not begin with a sector of L2, each copy
    asks for more of them than it brings, and more rows of queries for each key are worth more."""
    within_sector = (problem.head_dim_qk | problem.head_dim_v) % 16 > 0
    up = alternates(problem)
    two = Sm90FwdTiling(2, 96, ping_pong=True, alternates=up)
    if value_columns(problem) <= 160:
        three = Sm90FwdTiling(3, 48, stages=3, alternates=up)
        return three, replace(two, slower=1.3 if within_sector else 1.12 if up else 1.02)
    if within_sector:
        three = Sm90FwdTiling(3, 32, stages=4, alternates=up)
        return three, replace(two, slower=1.08)
    if problem.has_bias and problem.dropout:
        return (two,)
    return two, Sm90FwdTiling(2, 64, stages=3, alternates=up, slower=1.02)
