"""Writing the score edit that a user's function of scores becomes, in C++.

Each line of the program is a line of the struct; ``cuda_src/attn/program.cuh`` has what they call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dlattn.dtypes import data_type, to_cpp
from dlattn.problem import Read, ScoreBlocks, ScoreProgram
from dlattn.problem.lines import Kind, Line, needed

_POSITIONS = ("at.batch", "at.head", "query(at)", "key(at)")
_INTEGERS = {
    data_type.INT8: "signed char",
    data_type.UINT8: "unsigned char",
    data_type.INT32: "int",
    data_type.INT64: "int64",
    data_type.BOOLEAN: "bool",
}


def definition(program: ScoreProgram) -> str:
    """The struct of a program, of the name that its ``cpp`` says."""
    slope = program.slope
    functions = [_function(program, "value", program.result)]
    if slope is not None and not program.constant_derivative:
        functions.append(_function(program, "derivative", slope))
    return f"""\
// score_mod
struct {program.cpp} : Programmed<{program.cpp}, {_said(_is_guarded(program))}> {{
  static constexpr bool constant_derivative = {_said(program.constant_derivative)};
  static constexpr bool reads_positions = {_said(_reads_positions(program))};
{"".join(functions)}}};

"""


def _said(value: bool) -> str:
    return str(value).lower()


def _used(program: ScoreProgram) -> list[Line]:
    slope = [] if program.slope is None else [program.slope]
    return [program.lines[number] for number in needed(program.lines, program.result, *slope)]


def _is_guarded(program: ScoreProgram) -> bool:
    """Whether it may not be computed of elements that do not exist."""
    if program.lines[program.result].operation == "score":
        return False  # what is left of a mask
    reads = [program.reads[int(x.number or 0)] for x in _used(program) if x.operation == "read"]
    return program.slope is not None or any(read.by_query or read.by_key for read in reads)


def _reads_positions(program: ScoreProgram) -> bool:
    moved = any(line.operation in ("position", "read") for line in _used(program))
    return moved or _is_guarded(program)


def _function(program: ScoreProgram, name: str, result: int) -> str:
    lines = program.lines
    body = _body(program, needed(lines, result))
    return f"""\
  static DLATTN_DEVICE float {name}(float score, const Position& at, const ScoreValues& values) {{
    using namespace pointwise;
{body}    return {_operand(lines, result)};
  }}
"""


def _body(program: ScoreProgram, numbers: Iterable[int]) -> str:
    lines = program.lines
    return "".join(
        f"    const {_type(lines[n])} x{n} = {_expression(lines, n, program.reads)};\n"
        for n in numbers
        if lines[n].operation not in ("score", "constant")
    )


def mask_definition(blocks: ScoreBlocks) -> str:
    """The struct that ``cuda_src/attn/score_mask.cuh`` calls ``ElementMask``: what is computed once
    of a query, once of a key, and of both."""
    program, conditions = blocks.program, blocks.conditions
    lines = program.lines
    used = needed(lines, *(number for number, _ in conditions))
    axes = _axes(program, used)
    both = [n for n in used if axes[n] == {"query", "key"}]
    asked = {number for number, _ in conditions}.union(*(lines[n].operands for n in both))
    known = [n for n in used if n in asked and n not in both and lines[n].operation != "constant"]
    of_key = [n for n in known if axes[n] == {"key"}]
    of_query = [n for n in known if n not in of_key]
    told = "".join(
        f"    const {_type(lines[n])} x{n} = {axis}.x{n};\n"
        for axis, numbers in (("query", of_query), ("key", of_key))
        for n in numbers
    )
    kept = " & ".join(f"{'' if wanted else '!'}{_operand(lines, n)}" for n, wanted in conditions)
    return f"""\
// score_mod
struct ScoreMask {{
  static constexpr bool queries_repeat = {_said(_repeats(program, of_query, 2))};
  static constexpr bool keys_repeat = {_said(_repeats(program, of_key, 3))};
{_of_axis(program, "Query", of_query)}{_of_axis(program, "Key", of_key)}\
  static DLATTN_DEVICE bool keeps(const OfQuery& query, const OfKey& key) {{
    using namespace pointwise;
{told}{_body(program, both)}    return {kept};
  }}
}};

"""


def _axes(program: ScoreProgram, used: Sequence[int]) -> dict[int, set[str]]:
    """What each line depends on, of queries and keys."""
    found: dict[int, set[str]] = {}
    for n in used:
        line = program.lines[n]
        axes = set[str]().union(*(found[x] for x in line.operands))
        if line.operation == "position" and line.number in (2, 3):
            axes |= {"query" if line.number == 2 else "key"}
        elif line.operation == "read":
            read = program.reads[int(line.number or 0)]
            axes |= {"query"} if read.by_query else set()
            axes |= {"key"} if read.by_key else set()
        found[n] = axes
    return found


def _repeats(program: ScoreProgram, numbers: Sequence[int], axis: int) -> bool:
    """Whether neighbours along an axis may have the same lines: none of them tells positions."""
    used = (program.lines[n] for n in needed(program.lines, *numbers))
    return not any(line.operation == "position" and line.number == axis for line in used)


def _of_axis(program: ScoreProgram, axis: str, numbers: Sequence[int]) -> str:
    """What of its lines others ask for, and how it is computed."""
    lines = program.lines
    fields = "".join(f" {_type(lines[n])} x{n};" for n in numbers)
    return f"""\
  struct Of{axis} {{{fields} }};
  static DLATTN_DEVICE Of{axis} of_{axis.lower()}(const Position& at, const ScoreValues& values) {{
    using namespace pointwise;
{_body(program, needed(lines, *numbers))}    return {{{", ".join(f"x{n}" for n in numbers)}}};
  }}
  static DLATTN_DEVICE Of{axis} from_lane(const Of{axis}& own, int lane) {{
    return {{{", ".join(f"dlattn::from_lane(own.x{n}, lane)" for n in numbers)}}};
  }}
  static DLATTN_DEVICE bool equal(const Of{axis}& a, const Of{axis}& b) {{
    return {" & ".join(f"identical(a.x{n}, b.x{n})" for n in numbers) or "true"};
  }}
"""


def _type(line: Line) -> str:
    return line.kind.value


def _operand(lines: Sequence[Line], number: int) -> str:
    line = lines[number]
    if line.operation == "score":
        return "score"
    return literal(line) if line.operation == "constant" else f"x{number}"


def literal(line: Line) -> str:
    """A constant."""
    value = line.number
    assert value is not None
    if line.kind is Kind.BOOLEAN:
        return _said(bool(value))
    if line.kind is not Kind.FLOAT:
        return f"{_type(line)}({int(value)}ll)"
    if math.isnan(value):
        return "__int_as_float(0x7fffffff)"
    # What float32 does not reach is infinite in it.
    if abs(value) > 3.4028235677973366e38:
        return "infinity()" if value > 0 else "-infinity()"
    return f"{float(value)!r}f"


def _expression(lines: Sequence[Line], number: int, reads: Sequence[Read]) -> str:
    line = lines[number]
    operands = ", ".join(_operand(lines, x) for x in line.operands)
    if line.operation == "position":
        assert line.number is not None
        return _POSITIONS[int(line.number)]
    if line.operation == "read":
        assert line.number is not None
        return _read(int(line.number), reads[int(line.number)])
    if line.operation == "cast":
        return _cast(lines, line)
    return f"pointwise::{line.operation}({operands})"


def _cast(lines: Sequence[Line], line: Line) -> str:
    source = lines[line.operands[0]]
    given = _operand(lines, line.operands[0])
    if line.kind is Kind.BOOLEAN:
        return f"{given} != 0"
    if line.kind is Kind.FLOAT and source.operation == "position" and source.number in (2, 3):
        return f"{'query' if source.number == 2 else 'key'}_as_float(at)"
    return f"{_type(line)}({given})"


def _read(number: int, read: Read) -> str:
    tensor = f"values.p.score_mod[{number}]"
    if read.by_value:
        return f"number<{read.kind.value}>({tensor})"
    flags = ", ".join(map(_said, (read.by_query, read.by_key, read.contiguous)))
    return f"read<{element_type(read)}, {flags}>({tensor}, at)"


def element_type(read: Read) -> str:
    """Of the elements in memory."""
    return _INTEGERS.get(read.dtype) or to_cpp(read.dtype)
