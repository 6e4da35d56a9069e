"""The kernels beside attention compile for every architecture, without spilling."""

from __future__ import annotations

from itertools import product

import pytest

from dlattn.plans import append, merge
from dlattn.plans.direct import direct_source
from dlattn.runtime import jit
from dlattn.runtime.target import KNOWN

#: Lanes of a row.
_LANES = (4, 8, 16, 32)
_STATES = [("merge_states", merge.MergeParams, types, rest)
           for types in (("bf16", "bf16"), ("half", "float"), ("float", "bf16"), ("float", "float"))
           for rest in product(_LANES, (True, False), (2, 0))]  # fmt: skip
_CACHES = [("append", append.AppendParams, types, rest)
           for types in (("bf16", "bf16"), ("half", "float"))
           for rest in product(_LANES, (True, False), (True, False))]  # fmt: skip


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("family", ("merge_states", "append"))
def test_no_spills_and_no_warnings(family: str, arch: str, request: pytest.FixtureRequest) -> None:
    """No instance spills a register or draws a ptxas performance warning."""
    cases = _STATES if family == "merge_states" else _CACHES
    # Other instances for each architecture, as of attention's kernels; all with --kernels 1.
    step = max(1, request.config.getoption("--kernels") // 4)
    cases = cases[list(KNOWN).index(arch) % step :: step]
    sources = [
        direct_source(name, argument, 256, *types, *rest) for name, argument, types, rest in cases
    ]
    compiled = jit.compile_kernels(sources, arch)
    complaints = [
        f"{case}: {kernel.spill_stores} bytes spilled, {kernel.warnings}"
        for case, kernel in zip(cases, compiled, strict=True)
        if kernel.spill_stores or kernel.spill_loads or kernel.warnings
    ]
    assert not complaints, "\n".join(complaints)
