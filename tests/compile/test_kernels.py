"""Every kernel family compiles for every architecture, without spilling and without complaints.

NVRTC needs no GPU, so this runs everywhere; it is skipped where NVRTC is not installed.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dlattn.config import settings
from dlattn.dtypes import data_type
from dlattn.errors import CompileError
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import (
    PAGE_TABLES,
    RAGGED_ROLES,
    Alibi,
    Band,
    Bias,
    BlockMask,
    Direction,
    Dropout,
    Edit,
    Geometry,
    GivenMask,
    Mask,
    Padding,
    Philox,
    Problem,
    Scale,
    SoftCap,
    TensorSpec,
    offset_role,
)
from dlattn.runtime import jit, nvrtc
from dlattn.runtime.target import KNOWN

#: Kernel families, each with the architectures it is compiled for.
FAMILIES: dict[type[CudaPlan], tuple[str, ...]] = {
    FwdSm80: tuple(KNOWN),
    BwdSm80: tuple(KNOWN),
    FwdSm90: ("sm_90a",),
    BwdSm90: ("sm_90a",),
}
#: One pair of head dimensions (q and k, v) for each row of the tiling tables, the ends of each
#: row's range, and unequal pairs.
HEAD_DIMS = [
    (8, 8), (40, 40), (64, 64), (72, 72), (96, 96), (104, 104), (128, 128), (136, 136),
    (192, 192), (200, 200), (256, 256), (192, 128), (8, 256), (256, 8), (128, 64), (64, 128),
    (64, 32), (32, 64), (64, 96),
]  # fmt: skip
#: Of the portable kernels alone.
WIDE_HEAD_DIMS = [(264, 264), (384, 384), (512, 64), (64, 512), (480, 512), (512, 512)]
#: Of these, one for each row, and unequal ones: for every edit.
EDITED_HEAD_DIMS = [
    (8, 8), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64),
    (64, 128),
]  # fmt: skip
#: What follows the scale.
EDITS: dict[str, tuple[Edit, ...]] = {
    "softcap": (SoftCap(),),
    "alibi": (Alibi(symmetric=False),),
    "slopes": (Alibi(symmetric=True),),
    "bias": (Bias(data_type.BFLOAT16, contiguous=True, aligned=True),),
    "rows": (Bias(data_type.HALF, contiguous=True),),
    "mask": (Bias(data_type.BOOLEAN, contiguous=True),),
    "all": (SoftCap(), Bias(data_type.FLOAT, contiguous=False), Alibi(symmetric=True)),
}
#: Forms of dropout.
DROPOUTS: tuple[Dropout, ...] = (
    Philox(),
    GivenMask(data_type.BFLOAT16, contiguous=True),
    GivenMask(data_type.BOOLEAN, contiguous=False),
)
MASKS: dict[str, tuple[Mask, ...]] = {
    "full": (Padding(),),
    "causal": (Padding(), Band(left=False, right=True)),
    "left": (Padding(), Band(left=True, right=False)),
    "window": (Padding(), Band(left=True, right=True)),
    "blocks": (Padding(), Band(left=False, right=True), BlockMask()),
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        nvrtc.load(settings().cache_dir)
    except CompileError as missing:
        pytest.skip(str(missing))


def direction_of(family: type[CudaPlan]) -> Direction:
    return Direction.BACKWARD if family.name.startswith("bwd") else Direction.FORWARD


def is_too_wide(problem: Problem, arch: str) -> bool:
    """Whether a backward's tiles do not fit shared memory, which it says."""
    wide = min(problem.head_dim_qk, problem.head_dim_v) > 480
    return wide and problem.direction is Direction.BACKWARD and arch == "sm_120"


def plan_for(
    family: type[CudaPlan],
    problem: Problem,
    arch: str,
    *,
    seq: int = 300,
    left: int | None = 64,
    right: int | None = 0,
) -> CudaPlan:
    """A plan on an arbitrary geometry: the code must not depend on it."""

    paged = {"k": problem.paged_k, "v": problem.paged_v}

    def spec(role: str, heads: int, head_dim: int) -> TensorSpec:
        if paged.get(role):
            dim = (50, heads, 16, head_dim)
        else:
            dim = (2, heads, seq, head_dim)
        stride = tuple(math.prod(dim[axis + 1 :]) for axis in range(4))
        ragged = problem.ragged and role in RAGGED_ROLES and not paged.get(role)
        return TensorSpec(role, dim, stride, problem.dtype, ragged=ragged)

    tensors = {
        "q": spec("q", 4, problem.head_dim_qk),
        "k": spec("k", 2, problem.head_dim_qk),
        "v": spec("v", 2, problem.head_dim_v),
        "o": spec("o", 4, problem.head_dim_v),
    }
    if problem.direction is Direction.BACKWARD:
        tensors |= {"dO": tensors["o"], "dK": tensors["k"], "dV": tensors["v"]}
        tensors |= {"dBias": spec("dBias", 4, seq)} if problem.d_bias else {}
        tensors |= {"dQ": tensors["q"]}
    if problem.ragged:
        offsets = TensorSpec("offsets", (3, 1, 1, 1), (1, 0, 0, 1), data_type.INT32)
        ragged = [role for role, spec in tensors.items() if spec.ragged]
        tensors |= {offset_role(role): offsets for role in ragged}
    for role, table in PAGE_TABLES.items():
        if paged[role]:
            tensors[table] = TensorSpec(table, (2, 1, 19, 1), (19, 0, 1, 1), data_type.INT32)
    longest = seq if any(paged.values()) else None
    geometry = Geometry(tensors, 0.125, band_left=left, band_right=right, max_seq_kv=longest)
    assert family.supports(problem, geometry, KNOWN[arch]) is None
    return family(problem, geometry, KNOWN[arch])


def every_source(plan: CudaPlan) -> list[jit.KernelSource]:
    """The kernels of a plan, and those that other sizes take."""
    kernels = [*plan.first_kernels(), *plan.kernels()]
    return [kernel.source for kernel in kernels] + plan.companions()


#: What a problem does with its rows beside o and stats, by direction.
ROWS: dict[Direction, tuple[dict[str, bool], ...]] = {
    Direction.FORWARD: (
        {}, {"sink": True}, {}, {"score_max": True}, {}, {"score_sum_exp": True}, {},
        {"score_max": True, "score_sum_exp": True}, {}, {"score_sum_exp": True, "sink": True}, {},
    ),
    Direction.BACKWARD: ({}, {}, {"sink": True}),
}  # fmt: skip


#: What is paged.
PAGED = (
    {"paged_k": True, "paged_v": True},
    {"paged_k": True, "paged_v": True},
    {"paged_k": True},
    {"paged_v": True},
)


def problems(family: type[CudaPlan]) -> list[Problem]:
    """Every head-dim class with every mask, every edit and every form of dropout; the other choices
    cycle, so that each pair meets. Each class also ragged, with pages, with both where a plan takes
    both, and of a forward with all that it can write."""
    direction = direction_of(family)
    hopper = family in (FwdSm90, BwdSm90)
    widths = (16,) if hopper else (16, 16, 16, 16, 2)
    stats: list[data_type | None] = [data_type.FLOAT, None]
    if direction is Direction.BACKWARD:
        stats = [data_type.FLOAT]
    found = []
    wide = [] if hopper else WIDE_HEAD_DIMS
    masks = tuple(MASKS.values())
    some_edits = ((), *EDITS.values())
    wanted: list[tuple[Any, ...]] = [
        *((dims, (), mask, None) for dims, mask in product(HEAD_DIMS, masks)),
        *((dims, (), masks[i % len(masks)], None) for i, dims in enumerate(wide)),
        *(
            (dims, edits, masks[i % len(masks)], None)
            for i, (edits, dims) in enumerate(
                product(EDITS.values(), (*EDITED_HEAD_DIMS, *wide[-1:]))
            )
        ),
        *(
            (dims, some_edits[i % len(some_edits)], masks[i % len(masks)], dropout)
            for i, (dropout, dims) in enumerate(product(DROPOUTS, (*EDITED_HEAD_DIMS, *wide[-1:])))
        ),
    ]
    for i, (head_dims, edits, mask, dropout) in enumerate(wanted):
        dtype = (data_type.BFLOAT16, data_type.HALF)[(i + i // 4) % 2]
        found.append(
            Problem(
                direction,
                dtype,
                *head_dims,
                (Scale(positive=i % 3 != 0), *edits),
                mask,
                stats[i % len(stats)],
                dropout=dropout,
                access_bytes=widths[i % len(widths)],
                **ROWS[direction][i % len(ROWS[direction])],
            )  # fmt: skip
        )
    each_mask = [found[len(masks) * i + i % len(masks)] for i in range(len(HEAD_DIMS))]
    edited = found[len(masks) * len(HEAD_DIMS) :]
    crowded = [
        p for p in found if len(p.edits) == 1 + len(EDITS["all"]) or p.dropout is DROPOUTS[-1]
    ]
    ragged = [replace(p, ragged=True) for p in (*each_mask, *crowded)]
    paged = [replace(p, **PAGED[i % len(PAGED)]) for i, p in enumerate((*each_mask, *edited))]
    if family is not BwdSm90:
        paged += [replace(p, **PAGED[i % len(PAGED)]) for i, p in enumerate(ragged)]
    if direction is Direction.FORWARD:
        everything = {"score_max": True, "score_sum_exp": True, "sink": True}
        found += [replace(p, stats=data_type.FLOAT, **everything) for p in each_mask]
    return found + ragged + paged


@pytest.mark.parametrize(
    "family, arch", [(family, arch) for family, archs in FAMILIES.items() for arch in archs]
)
def test_no_spills_and_no_warnings(family: type[CudaPlan], arch: str) -> None:
    """No kernel of any problem spills a register or draws a ptxas performance warning."""
    sources = {
        source.text: (problem, source)
        for problem in problems(family)
        if not is_too_wide(problem, arch)
        for source in every_source(plan_for(family, problem, arch))
    }
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda item: jit.compile_kernel(item[1], arch), sources.values())
        complaints = [
            f"{kernel.name} {kernel.spill_stores} bytes spilled, {kernel.warnings}: {problem}"
            for (problem, _), kernel in zip(sources.values(), compiled, strict=True)
            if kernel.spill_stores or kernel.spill_loads or kernel.warnings
        ]
    assert not complaints, "\n".join(complaints)


#: Head dimensions, what follows the scale, mask, type of the gradient, width of accesses: each
#: tiling with what takes most registers.
BIAS_GRADIENTS = [
    ((8, 8), "bias", "causal", data_type.BFLOAT16, 16),
    ((40, 200), "rows", "window", data_type.HALF, 2),
    ((64, 64), "all", "window", data_type.FLOAT, 16),
    ((64, 64), "bias", "full", data_type.FLOAT, 16),
    ((72, 72), "all", "causal", data_type.FLOAT, 16),
    ((96, 96), "rows", "left", data_type.HALF, 16),
    ((128, 128), "bias", "full", data_type.BFLOAT16, 16),
    ((128, 128), "all", "window", data_type.FLOAT, 2),
    ((192, 128), "rows", "causal", data_type.BFLOAT16, 16),
    ((256, 256), "all", "window", data_type.HALF, 16),
]


def bias_gradient_kernel(
    arch: str,
    head_dims: tuple[int, int],
    edits: str,
    mask: str,
    written: data_type,
    access_bytes: int,
) -> jit.KernelSource:
    """The kernel that writes the gradient of a bias."""
    problem = Problem(
        Direction.BACKWARD, data_type.HALF, *head_dims, (Scale(positive=False), *EDITS[edits]),
        MASKS[mask], data_type.FLOAT, d_bias=written, access_bytes=access_bytes,
    )  # fmt: skip
    family = BwdSm90 if arch == "sm_90a" and access_bytes == 16 else BwdSm80
    kernels = plan_for(family, problem, arch).kernels()
    (source,) = (k.source for k in kernels if k.source.name == "dlattn_bwd_dbias")
    return source


@pytest.mark.parametrize("arch", KNOWN)
def test_gradient_of_a_bias(arch: str) -> None:
    """Its kernel neither spills nor draws a warning, with what takes most registers."""
    sources = {case: bias_gradient_kernel(arch, *case) for case in BIAS_GRADIENTS}
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda source: jit.compile_kernel(source, arch), sources.values())
        complaints = [
            f"{kernel.spill_stores} bytes spilled, {kernel.warnings}: {case}"
            for case, kernel in zip(sources, compiled, strict=True)
            if kernel.spill_stores or kernel.spill_loads or kernel.warnings
        ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("family, archs", FAMILIES.items())
def test_shared_memory_fits(family: type[CudaPlan], archs: tuple[str, ...]) -> None:
    """Whatever the head dimensions, every kernel fits the smallest device of its family."""
    smallest = min(archs, key=lambda arch: KNOWN[arch].shared_memory)
    dims = range(8, 257, 8)
    wide = [] if family in (FwdSm90, BwdSm90) else WIDE_HEAD_DIMS
    for head_dims in (*product(dims, repeat=2), *wide):
        problem = Problem(
            direction_of(family), data_type.HALF, *head_dims, (Scale(),), (Padding(),),
            data_type.FLOAT,
        )  # fmt: skip
        if is_too_wide(problem, smallest):
            continue
        if problem.direction is Direction.BACKWARD:
            bias = Bias(data_type.FLOAT, contiguous=True)
            problem = replace(problem, edits=(Scale(), bias), d_bias=data_type.FLOAT)
        plan = plan_for(family, problem, smallest)
        assert max(kernel.shared for kernel in plan.kernels()) <= KNOWN[smallest].shared_memory


def test_masks_share_what_reads_no_mask() -> None:
    """Of a backward's kernels, another mask makes only the main one anew."""
    problem = problems(BwdSm80)[0]
    first, *others = (
        plan_for(BwdSm80, replace(problem, masks=masks), "sm_90a").kernels()
        for masks in MASKS.values()
    )
    for other in others:
        same = [a.source == b.source for a, b in zip(first, other, strict=True)]
        assert same == [True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_run_time_values(family: type[CudaPlan]) -> None:
    """Another batch, head count, length, stride or scale takes kernels compiled with the first."""
    problem = problems(family)[0]
    plan = plan_for(family, problem, "sm_90a")
    tensors = {
        role: replace(spec, dim=(5, 2 * spec.dim[1], 7000, spec.dim[3]), stride=(9**9, 16, 8**8, 1))
        for role, spec in plan.geometry.tensors.items()
    }
    other = type(plan)(problem, Geometry(tensors, 3.0, bottom_right=True), plan.target)
    assert {k.source for k in other.kernels()} <= set(every_source(plan))


#: Head dims, sequence length, mask -> tile_q, tile_k, bytes of shared memory and registers a thread
#: at launch: what ``setmaxnreg`` divides.
HOPPER_FORWARD = {
    ((64, 64), 8192, "full"): (192, 128, 140288, 128),
    ((64, 64), 8192, "causal"): (192, 128, 140288, 128),
    ((64, 64), 1024, "full"): (192, 128, 140288, 128),
    ((64, 64), 1024, "causal"): (128, 128, 148480, 168),
    ((96, 96), 8192, "full"): (128, 128, 230400, 168),
    ((128, 128), 8192, "full"): (128, 128, 230400, 168),
    ((128, 128), 8192, "causal"): (128, 128, 230400, 168),
    ((192, 128), 8192, "causal"): (128, 128, 230400, 168),
    ((192, 192), 8192, "full"): (128, 96, 214016, 168),
    ((256, 256), 8192, "full"): (128, 64, 214016, 168),
    ((256, 256), 8192, "causal"): (128, 64, 214016, 168),
}


@pytest.mark.parametrize("head_dims, seq, mask", HOPPER_FORWARD)
def test_hopper_forward_resources(head_dims: tuple[int, int], seq: int, mask: str) -> None:
    """Tiles, shared memory and registers are those of the table; a change must be meant."""
    problem = Problem(
        Direction.FORWARD, data_type.BFLOAT16, *head_dims, (Scale(positive=True),), MASKS[mask],
        data_type.FLOAT,
    )  # fmt: skip
    right = 0 if mask == "causal" else None
    plan = plan_for(FwdSm90, problem, "sm_90a", seq=seq, left=None, right=right)
    assert isinstance(plan, FwdSm90)
    (kernel,) = plan.kernels()
    registers = jit.compile_kernel(kernel.source, "sm_90a").registers
    found = (plan.tiling.tile_q, plan.tiling.tile_k, kernel.shared, registers)
    assert found == HOPPER_FORWARD[head_dims, seq, mask]


#: The same of the backward's main kernel.
HOPPER_BACKWARD = {
    (64, 64): (128, 128, 199680, 128),
    (96, 96): (64, 128, 231424, 128),
    (64, 128): (64, 128, 182272, 128),
    (128, 128): (64, 128, 231424, 128),
    (192, 128): (64, 128, 231424, 128),
    (192, 192): (64, 64, 215040, 128),
    (256, 256): (64, 64, 231424, 128),
}


@pytest.mark.parametrize("head_dims", HOPPER_BACKWARD)
def test_hopper_backward_resources(head_dims: tuple[int, int]) -> None:
    """Tiles, shared memory and registers are those of the table; a change must be meant."""
    problem = Problem(
        Direction.BACKWARD, data_type.BFLOAT16, *head_dims, (Scale(positive=True),),
        MASKS["causal"], data_type.FLOAT,
    )  # fmt: skip
    plan = plan_for(BwdSm90, problem, "sm_90a")
    assert isinstance(plan, BwdSm90)
    kernel = plan.kernels()[1]
    registers = jit.compile_kernel(kernel.source, "sm_90a").registers
    found = (plan.tiling.tile_q, plan.tiling.tile_k, kernel.shared, registers)
    assert found == HOPPER_BACKWARD[head_dims]


def test_hopper_instructions() -> None:
    """The Hopper forward multiplies with wgmma and moves tiles with the copy engine."""
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("needs cuobjdump, from the CUDA toolkit or Triton")
    problem = problems(FwdSm90)[0]
    (kernel,) = plan_for(FwdSm90, problem, "sm_90a").kernels()
    cubin = jit.compile_kernel(kernel.source, "sm_90a").cubin
    listing = subprocess.run(
        [disassembler, "-sass", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    for instruction in ("HGMMA.64x", "UTMALDG.4D", "UTMASTG.4D", "USETMAXREG"):
        assert instruction in listing, instruction


def find_disassembler() -> str | None:
    """cuobjdump on the path, else the one in Triton's wheel."""
    triton = find_spec("triton")
    packages = list(triton.submodule_search_locations or []) if triton else []
    inside = [Path(package) / "backends" / "nvidia" / "bin" for package in packages]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, inside)]))
