"""Kernels with functions of scores compile everywhere, without spilling and without complaints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.bwd_sm90_refusal import MOST_SLOPE, register_refusal
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import Decode
from dlattn.plans.dumps import debug_kernels
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.score_blocks import ScoreBlocksScratch
from dlattn.plans.score_source import definition, mask_definition
from dlattn.problem import (
    POINTWISE,
    Arithmetic,
    Direction,
    Geometry,
    Philox,
    Problem,
    Read,
    Scale,
    ScoreGradient,
    ScoreProgram,
    SoftCap,
    skipped_blocks,
)
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import Kind
from dlattn.problem.score_program import partial_program, score_program, slope_of
from dlattn.runtime import jit
from tests.compile.problems import (
    EDITED_HEAD_DIMS,
    EDITS,
    FAMILIES,
    MASKS,
    complaints,
    direction_of,
    every_source,
    is_decoded,
    plan_for,
    sources_of,
)
from tests.compile.programs import MODS, program, with_gradients
from tests.unit.test_score_blocks import EXACT
from tests.unit.test_score_blocks import program as condition

#: What a function meets, in turn.
_TOGETHER: tuple[dict[str, Any], ...] = (
    {}, {"ragged": True}, {}, {"paged_k": True, "paged_v": True}, {}, {"dropout": Philox()},
)  # fmt: skip


def programmed(family: type[CudaPlan]) -> list[Problem]:
    """Every function at every class of head dimensions, with masks and other features in turn."""
    direction, masks = direction_of(family), tuple(MASKS.values())[:4]
    found = []
    for (n, dims), (m, name) in product(enumerate(EDITED_HEAD_DIMS), enumerate(MODS)):
        i = 5 * n + m  # odd, so that each function meets all of the others
        made = program(name, direction)
        blocks = skipped_blocks(made)
        problem = Problem(
            direction,
            (data_type.BFLOAT16, data_type.HALF)[i % 2],
            *dims,
            (Scale(positive=i % 3 != 0), made),
            (*masks[i % len(masks)], *([] if blocks is None else [blocks])),
            data_type.FLOAT,
        )
        found += [problem, replace(problem, **_TOGETHER[(i + i // 4) % len(_TOGETHER)])]
    if family is Decode:
        return [p for p in found if is_decoded(p)]
    return [p for p in found if not (family is BwdSm90 and register_refusal(family.skipping(p)))]


@pytest.mark.parametrize(
    "family, arch", [(family, arch) for family, archs in FAMILIES.items() for arch in archs]
)
def test_no_spills_and_no_warnings(
    family: type[CudaPlan], arch: str, request: pytest.FixtureRequest
) -> None:
    """No kernel of any function spills a register or draws a ptxas performance warning; on
    Blackwell, wide heads may spill a few bytes."""
    step = max(1, request.config.getoption("--kernels") // 4)
    first = FAMILIES[family].index(arch) * step // len(FAMILIES[family])
    sources = sources_of(family, programmed(family)[first::step], arch)
    found = complaints(sources, arch, _most_spilled)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["documents", "marked", "bent"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_no_spills_in_a_fixed_order(name: str, head_dim: int) -> None:
    """Nor does Hopper's backward of a function that masks, where additions to dQ take turns."""
    made = program(name, Direction.BACKWARD)
    blocks = skipped_blocks(made)
    problem = Problem(
        Direction.BACKWARD, data_type.BFLOAT16, head_dim, head_dim, (Scale(positive=True), made),
        (*MASKS["causal"], *([] if blocks is None else [blocks])), data_type.FLOAT,
        deterministic=True,
    )  # fmt: skip
    if register_refusal(BwdSm90.skipping(problem)) is None:
        for source in every_source(plan_for(BwdSm90, problem, "sm_90a")):
            kernel = jit.compile_kernel(source, "sm_90a")
            assert not (kernel.spill_stores or kernel.warnings), kernel.name


@pytest.mark.parametrize("name", ["table", "masked"])
@pytest.mark.parametrize("head_dim", [32, 40, 64])
def test_no_spills_of_few_columns(name: str, head_dim: int) -> None:
    """Nor does Hopper's forward of a function that reads an element for each score, whatever tiling
    it takes: of few columns three consumers have the fewest registers for it."""
    problem = Problem(
        Direction.FORWARD, data_type.HALF, head_dim, head_dim,
        (Scale(positive=False), program(name, Direction.FORWARD)), MASKS["window"], data_type.FLOAT,
    )  # fmt: skip
    found = complaints(sources_of(FwdSm90, [problem], "sm_90a"), "sm_90a")
    assert not found, "\n".join(found)


def _most_spilled(problem: Problem, arch: str) -> int:
    is_wide = max(problem.head_dim_qk, problem.head_dim_v) > 128
    return 64 if is_wide and arch in ("sm_100", "sm_120") else 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_beside_other_kernels(arch: str) -> None:
    """The gradient of a bias beside a function, and the probabilities, compile everywhere."""
    backward = Problem(
        Direction.BACKWARD, data_type.HALF, 64, 64,
        (Scale(), program("bent", Direction.BACKWARD), *EDITS["rows"]),
        MASKS["causal"], data_type.FLOAT, d_bias=data_type.FLOAT,
    )  # fmt: skip
    for source in every_source(plan_for(BwdSm80, backward, arch)):
        jit.compile_kernel(source, arch)
    forward = replace(
        backward, direction=Direction.FORWARD, d_bias=None,
        edits=(Scale(), program("documents", Direction.FORWARD)),
    )  # fmt: skip
    geometry = plan_for(FwdSm80, forward, arch).geometry
    spec = replace(geometry.tensors["o"], name="debug_softmax", dim=(2, 4, 384, 384))
    geometry = replace(geometry, tensors={**geometry.tensors, "debug_softmax": spec})
    (kernel,) = debug_kernels(forward, geometry)
    assert not jit.compile_kernel(kernel.source, arch).spill_stores


#: Head dimensions, function, what else: each tiling, with what takes most registers.
_READ_GRADIENTS: tuple[tuple[tuple[int, int], str, dict[str, Any]], ...] = (
    ((8, 8), "table", {}),
    ((64, 64), "capped", {"dropout": Philox()}),
    ((64, 64), "bent", {"access_bytes": 2}),
    ((96, 96), "bent", {"ragged": True}),
    ((128, 128), "bent", {"dropout": Philox()}),
    ((128, 128), "table", {}),
    ((128, 128), "masked", {"dropout": Philox()}),
    ((192, 128), "capped", {}),
    ((192, 128), "bent", {}),
    ((256, 256), "bent", {"dropout": Philox()}),
    ((64, 64), "slopes", {}),
    ((128, 128), "slopes", {"dropout": Philox()}),
    ((64, 64), "slopes beside a mask", {}),
    ((256, 256), "slopes beside a mask", {"dropout": Philox()}),
    ((128, 128), "slopes beside a mask of keys", {"ragged": True}),
)
#: What slopes that are ALiBi's, of which a function has told the gradient, are beside.
_BESIDE = {
    "slopes": "bias",
    "slopes beside a mask": "mask",
    "slopes beside a mask of keys": "mask of keys",
}


def _learned_slopes() -> ScoreGradient:
    """The gradient of slopes that are ALiBi's."""
    builder = Builder()
    ahead = builder.pointwise("sub", builder.position(3), builder.position(2))
    return ScoreGradient(0, data_type.FLOAT, partial_program(builder, ahead, (), ()))


def read_gradients(
    arch: str, dims: tuple[int, int], name: str, more: Mapping[str, Any]
) -> list[jit.KernelSource]:
    """The kernels for gradients of all floats that a function reads, beside a soft cap and a bias
    in every second case."""
    if name in _BESIDE:
        made, gradients = (*EDITS[_BESIDE[name]], *EDITS["alibi"]), (_learned_slopes(),)
    else:
        made, gradients = with_gradients(name)
    crowded = "dropout" in more
    bias = EDITS["rows"] if crowded and name not in _BESIDE else ()
    family = BwdSm90 if arch == "sm_90a" and not more else BwdSm80
    problem = Problem(
        Direction.BACKWARD, data_type.HALF, *dims,
        (Scale(), *((SoftCap(),) * crowded), *made, *bias),
        MASKS["causal"], data_type.FLOAT,
        score_gradients=gradients, **more,
    )  # fmt: skip
    if family is BwdSm90 and problem.steepest > MOST_SLOPE:
        problem = replace(problem, dtype=data_type.BFLOAT16)
    kernels = plan_for(family, problem, arch).kernels()
    found = [k.source for k in kernels if k.source.name == "dlattn_bwd_dbias"]
    assert len(found) == len(gradients) > 0
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_gradients_of_what_is_read(arch: str) -> None:
    """Their kernels neither spill nor draw a warning."""
    sources = {
        source.text: (case, source)
        for case in _READ_GRADIENTS
        for source in read_gradients(arch, *case)
    }
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda item: jit.compile_kernel(item[1], arch), sources.values())
        complaints = [
            f"{kernel.spill_stores} bytes spilled, {kernel.warnings}: {case}"
            for (case, _), kernel in zip(sources.values(), compiled, strict=True)
            if kernel.spill_stores or kernel.warnings
        ]
    assert not complaints, "\n".join(complaints)


def everything(direction: Direction, by_value: bool) -> ScoreProgram:
    """All operations, of all kinds of numbers, and reads of all types."""
    builder = Builder()
    total = builder.score()
    for name, operation in POINTWISE.items():
        kinds = [Kind.FLOAT]
        if operation.arithmetic in (Arithmetic.NUMBERS, Arithmetic.COMPARES, Arithmetic.MOVES):
            kinds += [Kind.INT32, Kind.INT64]
        for kind in kinds:
            wide = builder.cast(builder.position(2), Kind.INT64)
            moved = builder.position(3) if kind is Kind.INT32 else wide
            first = builder.score() if kind is Kind.FLOAT else moved
            given = (first, builder.constant(3, kind), builder.score())
            numbers = {"negative_slope": 0.25} if name.startswith("leaky") else {}
            made = builder.pointwise(name, *given[: len(operation.operands)], kind=kind, **numbers)
            total = builder.pointwise("add", total, made)
    types = ("FLOAT", "HALF", "BFLOAT16", "INT8", "UINT8", "INT32", "INT64", "BOOLEAN")
    reads = [
        Read(getattr(data_type, name), by_query=i % 2 == 0, by_key=i % 3 == 0, by_value=by_value)
        for i, name in enumerate(types)
    ]
    for number, read in enumerate(reads):
        made = builder.cast(builder.read(number, read.kind), Kind.FLOAT)
        total = builder.pointwise("add", total, made)
    for axis in (0, 1):
        total = builder.pointwise("add", total, builder.position(axis))
    slope = slope_of(builder, total) if direction is Direction.BACKWARD else None
    return score_program(builder, total, slope, reads)[0]


@pytest.mark.parametrize("family", [FwdSm80, BwdSm80])
def test_every_operation_compiles(family: type[CudaPlan]) -> None:
    """What a function may hold is C++, whatever registers it takes."""
    direction = direction_of(family)
    edits = (Scale(), everything(direction, by_value=family is FwdSm80))
    problem = Problem(
        direction, data_type.HALF, 64, 64, edits, MASKS["full"], data_type.FLOAT
    )  # fmt: skip
    for source in every_source(plan_for(family, problem, "sm_80")):
        assert not jit.compile_kernel(source, "sm_80").warnings


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_every_condition_compiles(arch: str) -> None:
    """What is known of every operation, of all kinds of numbers and reads, is C++."""
    number: Any = "row"
    for name in ("add", "sub", "mul", "div", "mod", "max", "min"):
        number = (name, number, ("floor", ("neg", ("abs", "rows"))))
    for name in ("add_whole", "sub_whole", "mul_whole", "mod_whole"):
        number = ("ceil", (name, number, ("abs_whole", ("max", "documents_q", "documents_k"))))
    number = ("binary_select", number, ("sub", "head", "slopes"), "flags")
    tree: Any = ("binary_select", "flags", ("logical_not", "flags"), ("cmp_neq", number, "columns"))
    for chosen in (-1, "documents_k"):
        whole = ("cmp_eq", ("binary_select", "documents_q", chosen, "flags"), "documents_k")
        tree = ("logical_or", tree, whole)
    for name in ("cmp_eq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"):
        tree = ("logical_or", tree, ("logical_and", "flags", (name, number, 0.5)))
    blocks = skipped_blocks(condition(tree)[0])
    assert blocks is not None
    kernel = jit.compile_kernel(ScoreBlocksScratch(blocks, Geometry()).source(), arch)
    assert not kernel.spill_stores and not kernel.warnings


def test_a_mask_as_it_is_written() -> None:
    """The generated struct computes what is of queries alone, and of keys alone, apart from what is
    left for each element; numbers that are of neither are with the queries."""
    nearest = ("cmp_lt", ("abs_whole", ("sub_whole", "row", "col")), ("mul", "slopes", 8.0))
    blocks = skipped_blocks(condition(("logical_and", nearest, EXACT["documents"]))[0])
    assert blocks is not None
    written = mask_definition(blocks)
    functions = {
        part.split("(")[0].split()[-1]: part for part in written.split("DLATTN_DEVICE")[1:]
    }
    query, key, both = (functions[name] for name in ("of_query", "of_key", "keeps"))
    assert [len(re.findall("read<", part)) for part in (query, key, both)] == [2, 1, 0]
    assert [len(re.findall("pointwise::", part)) for part in (query, key, both)] == [1, 0, 4]
    assert "queries_repeat = false" in written and "keys_repeat = false" in written
    (documents,) = [it for it in [skipped_blocks(condition(EXACT["documents"])[0])] if it]
    written = mask_definition(documents)
    assert "queries_repeat = true" in written and "keys_repeat = true" in written
    assert len(re.findall(r"return identical\(a.x\d, b.x\d\);", written)) == 2


def test_a_function_as_it_is_written() -> None:
    """The generated struct is what the function says, a line for each operation, and what its
    derivative needs."""
    written = definition(program("capped", Direction.BACKWARD))
    lines = [line.strip() for line in written.splitlines()]
    assert lines[1] == "struct ScoreProgram : Programmed<ScoreProgram, true> {"
    value = [
        "const float x0 = number<float>(values.p.score_mod[0]);",
        "const float x3 = pointwise::mul(score, 0.05f);",
        "const float x4 = pointwise::tanh(x3);",
        "const float x5 = pointwise::mul(x0, x4);",
        "return x5;",
        "}",
    ]
    derivative = [
        "const float x0 = number<float>(values.p.score_mod[0]);",
        "const float x3 = pointwise::mul(score, 0.05f);",
        "const float x4 = pointwise::tanh(x3);",
        "const float x7 = pointwise::mul(x4, x4);",
        "const float x8 = pointwise::sub(1.0f, x7);",
        "const float x9 = pointwise::mul(x8, 0.05f);",
        "const float x10 = pointwise::mul(x0, x9);",
        "return x10;",
        "}",
    ]
    first, second = (n + 1 for n, line in enumerate(lines) if line.startswith("using namespace"))
    assert lines[first : first + len(value)] == value
    assert lines[second : second + len(derivative)] == derivative
