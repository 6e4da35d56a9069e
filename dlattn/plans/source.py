"""Writing the translation unit of a specialised kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

from dlattn.dtypes import to_cpp
from dlattn.plans.argument import Params
from dlattn.problem import Problem, ScoreProgram
from dlattn.runtime.jit import KernelSource

#: See ``attn/seqlen.cuh``.
_CORNER_AS_GIVEN = "#define DLATTN_CORNER_AS_GIVEN\n"


class Tiling(Protocol):
    """What the generated source needs of a tiling."""

    @property
    def threads(self) -> int: ...

    @property
    def cpp(self) -> str: ...

    @property
    def min_blocks(self) -> int: ...


def kernel_source(
    kernel: str,
    problem: Problem,
    tiling: Tiling,
    shared_memory: int,
    *,
    argument: type[ctypes.Structure] = Params,
    cluster: int = 1,
    constants: Mapping[str, int] | None = None,
    types: Mapping[str, str] | None = None,
    definitions: str = "",
) -> KernelSource:
    """The source that instantiates ``kernels/<kernel>.cuh`` for one problem and tiling.

    Args:
        shared_memory: bytes of dynamic shared memory that the launch will ask for; the kernel
            asserts that its layout has exactly this size.
        cluster: blocks side by side that see each other's shared memory.
        constants, types: more of them that this kernel takes from ``Problem``.
        definitions: of what those types are.
    """
    edits = ", ".join(edit.cpp for edit in problem.edits)
    masks = ", ".join(dict.fromkeys(mask.cpp for mask in problem.masks))
    entry = f"dlattn_{kernel}"
    extra = "".join(
        f"\n  static constexpr int {name} = {value};" for name, value in (constants or {}).items()
    )
    extra += "".join(f"\n  using {name} = {cpp};" for name, cpp in (types or {}).items())
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    text = f"""\
{_CORNER_AS_GIVEN if problem.corner_as_given else ""}\
#include "kernels/{kernel}.cuh"

using namespace dlattn;

{_of_program(problem)}\
{definitions}\
struct Problem {{
  using Element = {to_cpp(problem.dtype)};
  static constexpr int head_dim_qk = {problem.head_dim_qk}, head_dim_v = {problem.head_dim_v};
  using Score = Edits<{edits}>;
  using Mask = Masks<{masks}>;{_element_mask(problem)}
  static constexpr bool stats = {str(problem.stats is not None).lower()};
  using Stats = {to_cpp(problem.stats) if problem.stats else "float"};
{_flags(problem, "flash_stats", "score_max", "score_sum_exp", "sink", "ragged")}
  using Dropout = {problem.dropout.cpp if problem.dropout else "NoDropout"};
{_flags(problem, "paged_k", "paged_v")}
  static constexpr int access_bytes = {problem.access_bytes};
  static constexpr bool deterministic = {str(problem.deterministic).lower()};
  static constexpr int shared_memory = {shared_memory};{extra}
}};
using Tiling = {tiling.cpp};
static_assert(sizeof({argument.__name__}) == {ctypes.sizeof(argument)}, "dlattn/plans/argument.py");

extern "C" __global__ void __launch_bounds__({tiling.threads}, {tiling.min_blocks})
{dims}{entry}(const __grid_constant__ {argument.__name__} p) {{
  {kernel}<Problem, Tiling>(p);
}}
"""
    return KernelSource(entry, text)


def _of_program(problem: Problem) -> str:
    """What a user's function is: a score edit, a mask, or both."""
    programs = [edit for edit in problem.edits if isinstance(edit, ScoreProgram)]
    blocks = problem.score_blocks
    if not programs and blocks is None:
        return ""
    from dlattn.plans.score_source import definition, mask_definition

    mask = mask_definition(blocks) if blocks is not None and blocks.elements else ""
    return "".join(map(definition, programs)) + mask


def _element_mask(problem: Problem) -> str:
    blocks = problem.score_blocks
    masks = blocks is not None and blocks.elements
    return "\n  using ElementMask = ScoreMask;" if masks else ""


def _flags(problem: Problem, *names: str) -> str:
    values = ", ".join(f"{name} = {str(getattr(problem, name)).lower()}" for name in names)
    return f"  static constexpr bool {values};"
