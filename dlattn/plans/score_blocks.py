"""Which blocks a user's function of scores masks: ``kernels/score_blocks.cuh``, before a plan's
kernels, and the block mask that it writes for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dlattn.dtypes import data_type
from dlattn.plans.argument import BlockMaskRef, Params
from dlattn.plans.kernels import KernelLaunch
from dlattn.plans.params import Place, places_of
from dlattn.plans.score_source import element_type, literal
from dlattn.plans.source import kernel_source
from dlattn.problem import (
    BLOCK,
    SCORE_MOD_ROLES,
    Direction,
    Geometry,
    Padding,
    Problem,
    Read,
    Scale,
    ScoreBlocks,
    ScoreProgram,
)
from dlattn.problem.lines import Kind, Line, needed
from dlattn.problem.ranges import RANGES
from dlattn.problem.score_blocks import is_summed_up
from dlattn.problem.score_program import masked_last
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource

#: Blocks of scores, along queries and along keys, of a thread block.
_SIDE = 32


@dataclass(frozen=True)
class ScoreBlocksTiling:
    """How a thread block divides its work (``ScoreBlocksTiling`` in the kernel)."""

    warps: int = 32
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def cpp(self) -> str:
        return f"ScoreBlocksTiling<{self.warps}>"


@dataclass(frozen=True)
class ScoreBlocksScratch:
    """The block mask, two bits for each block: whether it is visited, and whether nothing of it is
    masked by the function. Batch entries, and heads, that read the same share it."""

    blocks: ScoreBlocks
    geometry: Geometry

    @property
    def _rows(self) -> int:
        return -(-self.geometry.seq_q // BLOCK)

    @property
    def _row_bytes(self) -> int:
        return 4 * -(-self.geometry.seq_kv // (_SIDE * BLOCK))

    @cached_property
    def entries(self) -> tuple[int, int]:
        """Batch entries and heads that have a mask of their own; 1 if all share one."""
        program, tensors = self.blocks.program, self.geometry.tensors
        _, conditions = masked_last(program)
        used = needed(program.lines, *(line for line, _ in conditions))
        masks = [tensors["block_mask"].dim] if "block_mask" in tensors else []
        leaves = [program.lines[number] for number in used]
        for line in leaves:
            if line.operation == "read":
                masks.append(tensors[SCORE_MOD_ROLES[int(line.number or 0)]].dim)
        positions = {line.number for line in leaves if line.operation == "position"}
        sizes = self.geometry.batch, self.geometry.heads_q
        batch, heads = (
            size if axis in positions or any(dim[axis] > 1 for dim in masks) else 1
            for axis, size in enumerate(sizes)
        )
        return batch, heads

    @property
    def _mask_bytes(self) -> int:
        batch, heads = self.entries
        return batch * heads * self._rows * self._row_bytes

    @property
    def nbytes(self) -> int:
        return -(-2 * self._mask_bytes // 256) * 256

    @property
    def grid(self) -> tuple[int, int, int]:
        batch, heads = self.entries
        columns = self._row_bytes // 4
        return columns * -(-self._rows // _SIDE), heads, batch

    def kernel(self) -> KernelLaunch:
        """The kernel that writes it."""
        return KernelLaunch(self.source(), self.grid, ScoreBlocksTiling().threads, 0, plain=True)

    def describe(self, params: Params) -> None:
        """Writes the mask's strides; one that the user gives becomes part of it."""
        params.given_block_mask = params.block_mask
        batch, heads = self.entries
        head = self._rows * self._row_bytes
        params.block_mask = BlockMaskRef(
            0, heads * head * (batch > 1), head * (heads > 1), self._row_bytes, 1
        )

    def places(self, params: Params) -> list[Place]:
        """Where addresses go; the memory is aligned to 4 bytes."""
        masks = (params.block_mask, "data"), (params, "whole_blocks")
        return places_of((*it, self._mask_bytes) for it in masks)

    def source(self) -> KernelSource:
        any_problem = Problem(Direction.FORWARD, data_type.HALF, 8, 8, (Scale(),), (Padding(),))
        return kernel_source(
            "score_blocks",
            any_problem,
            ScoreBlocksTiling(),
            0,
            types={"Blocks": "ScoreBlocks"},
            definitions=definition(self.blocks),
        )


def definition(blocks: ScoreBlocks) -> str:
    """The struct that the kernel calls ``Blocks``, in C++: what it reads, and its conditions."""
    program = blocks.program
    _, conditions = masked_last(program)
    used = needed(program.lines, *(line for line, _ in conditions))
    body = "".join(
        f"    const {_range_type(program.lines[n])} x{n} = {_expression(program, n)};\n"
        for n in used
    )
    kept = " & ".join(f"x{n}" if wanted else f"logical_not(x{n})" for n, wanted in conditions)
    leaves = [program.lines[n] for n in used]
    return f"""\
// score_mod
struct ScoreBlocks {{
{_summary(program, leaves, "Queries", "row")}{_summary(program, leaves, "Keys", "column")}\
  static DLATTN_DEVICE Truth keeps(const Params& p, const ScoreBlock& at, const Queries& queries,
                                   const Keys& keys) {{
    using namespace ranges;
{body}    return {kept};
  }}
}};

"""


def _summary(program: ScoreProgram, leaves: Sequence[Line], name: str, step: str) -> str:
    """What is read along one axis, and how."""
    reads = {int(x.number or 0): x for x in leaves if _axis(program, x) == name}
    fields = "".join(f" {_range_type(x)} r{n};" for n, x in reads.items())
    values = ",\n            ".join(
        f"read<{element_type(program.reads[n])}>(p.score_mod[{n}], p.score_mod[{n}].{step}, "
        "batch, head, at)"
        for n in reads
    )
    return f"""\
  struct {name} {{{fields} }};
  static DLATTN_DEVICE {name} {name.lower()}(const Params& p, int batch, int head, Interval at) {{
    using namespace ranges;
    return {{{values}}};
  }}
"""


def _axis(program: ScoreProgram, line: Line) -> str | None:
    """The struct that has what is read, where that is more than one element."""
    if line.operation != "read" or not is_summed_up(program, line):
        return None
    read = program.reads[int(line.number or 0)]
    return "Queries" if read.by_query else "Keys" if read.by_key else None


def _range_type(line: Line) -> str:
    if line.kind is Kind.BOOLEAN:
        return "Truth"
    return "Range<int64>" if line.kind.is_whole else "Range<float>"


def _expression(program: ScoreProgram, number: int) -> str:
    line = program.lines[number]
    nothing = "true, false" if line.kind is Kind.BOOLEAN else "0, 0, true"
    unknown = f"{_range_type(line)}{{{nothing}}}"
    operands = ", ".join(f"x{x}" for x in line.operands)
    if line.operation == "constant":
        return f"only({literal(line)})"
    if line.operation == "position":
        return (
            "only(at.batch)", "only(at.head)",
            "between(at.queries.first, at.queries.last - 1)",
            "between(at.keys.first, at.keys.last - 1)",
        )[int(line.number or 0)]  # fmt: skip
    if line.operation == "read":
        return _read(program, line) or unknown
    if line.operation == "cast":
        return f"Cast<{line.kind.value}>::of({operands})"
    if line.operation not in RANGES:
        return unknown
    made = f"ranges::{line.operation}({operands})"
    return f"fit<{line.kind.value}>({made})" if line.kind in (Kind.INT32, Kind.INT64) else made


def _read(program: ScoreProgram, line: Line) -> str | None:
    number = int(line.number or 0)
    read: Read = program.reads[number]
    axis = _axis(program, line)
    if read.by_value:
        return f"only(pointwise::number<{read.kind.value}>(p.score_mod[{number}]))"
    if axis is not None:
        return f"{axis.lower()}.r{number}"
    if not is_summed_up(program, line):
        return None
    return f"read<{element_type(read)}>(p.score_mod[{number}], at)"
