"""Query tiles whose keys several blocks of the Hopper forward share: how many parts meet, and the
kernels of those with keys of their own, or many."""

from __future__ import annotations

import pytest

from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.runtime import jit
from tests.compile.problems import every_source, plan_for, problems

#: What the blocks of up to so many parts do, one after the other, at compile time.
MOST_PARTS = 140
MEETING = f"""\
#include "attn/key_parts.cuh"

using namespace dlattn;

template <int parts>
__device__ constexpr bool meet() {{
  int left[parts] = {{}};  // of how many parts a block has left the sum
  for (int number = 0; number < parts; ++number) {{
    const PartGroups part{{number, number == parts - 1}};
    int sum = 1, before = 0;
    for (int level = 0;; ++level) {{
      if (part.leaves(level)) {{
        left[number] = sum;
        break;
      }}
      for (int i = 0; i < part.others(level); ++i) {{
        const int other = part.end_of_other(level, i);
        if (other < 0 || other >= number || left[other] == 0) return false;
        sum += left[other];
        left[other] = 0;
        if (++before > 3 * 4) return false;
      }}
      if (part.completes(level)) return sum == parts;
    }}
  }}
  return false;
}}

template <int parts>
__device__ constexpr bool all_meet() {{
  if constexpr (parts > 2) {{
    return meet<parts>() && all_meet<parts - 1>();
  }} else {{
    return meet<parts>();
  }}
}}
static_assert(all_meet<{MOST_PARTS}>(), "each part is added once");

extern "C" __global__ void dlattn_meeting() {{}}
"""


def test_parts_meet_in_groups() -> None:
    """Every part is added once, by a block with a later part, and to the last one's in the end;
    nobody adds more than three on each of four levels."""
    jit.compile_kernel(jit.KernelSource("dlattn_meeting", MEETING), "sm_90a")


def test_kernels_that_share_more(request: pytest.FixtureRequest) -> None:
    """None spills a register or draws a ptxas performance warning."""
    step = request.config.getoption("--kernels")
    sources = {
        source.text: (problem, source)
        for problem in problems(FwdSm90)[::step]
        for source in every_source(plan_for(FwdSm90, problem, "sm_90a"))
        if "SharesMore" in source.text
    }
    assert sources
    compiled = jit.compile_kernels([source for _, source in sources.values()], "sm_90a")
    complaints = [
        f"{kernel.spill_stores} bytes spilled, {kernel.warnings}: {problem}"
        for (problem, _), kernel in zip(sources.values(), compiled, strict=True)
        if kernel.spill_stores or kernel.spill_loads or kernel.warnings
    ]
    assert not complaints, "\n".join(complaints)
