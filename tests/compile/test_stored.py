"""Kernels that write S and that read it: no register spills, no performance warning."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.dumps import debug_kernels
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.problem import Problem, Scale, Stored, StoredSigns, TensorSpec
from dlattn.runtime import jit
from dlattn.runtime.target import KNOWN
from tests.compile.problems import (
    DROPOUTS,
    EDITED_HEAD_DIMS,
    EDITS,
    MASKS,
    WIDE_HEAD_DIMS,
    direction_of,
    every_source,
    is_too_wide,
    plan_for,
)

HALF, BFLOAT16, FLOAT = data_type.HALF, data_type.BFLOAT16, data_type.FLOAT


def check(sources: list[jit.KernelSource], arch: str) -> None:
    """No kernel spills, or draws a warning."""
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda source: jit.compile_kernel(source, arch), sources))
    for kernel, source in zip(compiled, sources, strict=True):
        assert not (kernel.spill_stores or kernel.spill_loads or kernel.warnings), source.text


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("family", [FwdSm80, BwdSm80])
def test_reading(family: type[FwdSm80] | type[BwdSm80], arch: str) -> None:
    """Of each class of head dimensions; S of the other types, or not aligned, of some."""
    sources = []
    for i, dims in enumerate((*EDITED_HEAD_DIMS, *WIDE_HEAD_DIMS)):
        dtype = (HALF, BFLOAT16)[i % 2]
        direction = direction_of(family)
        d_bias = (None, dtype, FLOAT)[i % 3] if family is BwdSm80 and max(dims) <= 256 else None
        problem = Problem(
            direction, dtype, *dims, (Scale(positive=i % 3 != 0), Stored(dtype, True, True)),
            tuple(MASKS.values())[i % 4], FLOAT, dropout=StoredSigns(dtype, True), d_bias=d_bias,
        )  # fmt: skip
        unaligned = replace(
            problem,
            edits=(Scale(positive=False), Stored(dtype, False)),
            dropout=StoredSigns(dtype, False) if i % 2 else None,
            access_bytes=2,
        )
        for each in (problem, unaligned) if i % 3 == 0 else (problem,):
            if not is_too_wide(each, arch):
                sources += every_source(plan_for(family, each, arch))
    check(sources, arch)


@pytest.mark.parametrize("arch", KNOWN)
def test_writing(arch: str) -> None:
    """Of lengths that are no multiples of tiles."""
    sources = []
    dim, stride = (2, 4, 300, 300), (4 * 300**2, 300**2, 300, 1)
    for i, (dims, edits) in enumerate(
        (((64, 64), "bias"), ((128, 64), "all"), ((512, 64), "mask"))
    ):
        problem = Problem(
            direction_of(FwdSm80), HALF, *dims, (Scale(positive=False), *EDITS[edits]),
            tuple(MASKS.values())[i], FLOAT, dropout=DROPOUTS[i],
        )  # fmt: skip
        geometry = plan_for(FwdSm80, problem, arch).geometry
        s = TensorSpec("s", dim, stride, HALF)
        geometry = replace(geometry, tensors={**geometry.tensors, "debug_softmax": s})
        sources += [launch.source for launch in debug_kernels(problem, geometry)]
    check(sources, arch)
