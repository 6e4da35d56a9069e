"""Every kernel family compiles for every architecture, without spilling and without complaints.

NVRTC needs no GPU, so this runs everywhere; it is skipped where NVRTC is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import Decode
from dlattn.plans.dumps import debug_kernels
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import (
    Alibi,
    Bias,
    Direction,
    Dropout,
    FlashDropout,
    Geometry,
    Padding,
    Philox,
    Problem,
    Scale,
    SoftCap,
    TensorSpec,
)
from dlattn.runtime import jit
from dlattn.runtime.target import KNOWN
from tests.compile.problems import (
    DROPOUTS,
    EDITS,
    FAMILIES,
    MASKS,
    WIDE_HEAD_DIMS,
    complaints,
    direction_of,
    every_source,
    is_decoded,
    is_too_wide,
    plan_for,
    problems,
    sources_of,
)


@pytest.mark.parametrize(
    "family, arch", [(family, arch) for family, archs in FAMILIES.items() for arch in archs]
)
def test_no_spills_and_no_warnings(
    family: type[CudaPlan], arch: str, request: pytest.FixtureRequest
) -> None:
    """No kernel of any problem spills a register or draws a ptxas performance warning."""
    step, archs = request.config.getoption("--kernels"), FAMILIES[family]
    places = {archs.index(arch) * step // len(archs)}
    if len(archs) == 1:
        places = {0, step // 2 + 1}  # an even number and an odd one: choices alternate
    drawn = [
        it
        for i, it in enumerate(problems(family))
        if i % step in places and not is_too_wide(it, arch)
    ]
    found = complaints(sources_of(family, drawn, arch), arch)
    assert not found, "\n".join(found)


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
    ((128, 64), "bias", "window", data_type.FLOAT, 16),
    ((64, 128), "bias", "blocks", data_type.HALF, 16),
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
    (source,) = (k.source for k in kernels if k.source.name.startswith("dlattn_bwd_dbias"))
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


#: Head dimensions, what follows the scale, mask, form of dropout, width of accesses, what else.
LOOKS_INSIDE = [
    ((8, 8), (), "causal", FlashDropout(), 16, {"ragged": True, "paged_k": True}),
    ((64, 64), EDITS["all"], "window", Philox(), 2, {}),
    ((128, 128), EDITS["bias"], "blocks", FlashDropout(), 16, {"ragged": True}),
    ((256, 64), EDITS["softcap"], "full", DROPOUTS[1], 2, {"paged_k": True}),
    ((512, 512), EDITS["alibi"], "causal", None, 16, {"ragged": True}),
    ((40, 40), EDITS["mask"], "blocks", DROPOUTS[2], 2, {}),
]


@pytest.mark.parametrize("arch", KNOWN)
def test_debug_softmax(arch: str) -> None:
    """Its kernel fits, and neither spills nor draws a warning."""
    dim = (2, 4, 384, 384)
    for i, (head_dims, edits, mask, dropout, access_bytes, flags) in enumerate(LOOKS_INSIDE):
        problem = Problem(
            Direction.FORWARD, (data_type.BFLOAT16, data_type.HALF)[i % 2], *head_dims,
            (Scale(positive=False), *edits), MASKS[mask], data_type.FLOAT, dropout=dropout,
            access_bytes=access_bytes, **flags,
        )  # fmt: skip
        geometry = plan_for(FwdSm80, problem, arch).geometry
        wanted = TensorSpec("debug_softmax", dim, (4 * 384**2, 384**2, 384, 1), problem.dtype)
        tensors = {**geometry.tensors, "debug_softmax": wanted}
        (launch,) = debug_kernels(problem, replace(geometry, tensors=tensors))
        kernel = jit.compile_kernel(launch.source, arch)
        assert launch.shared <= KNOWN[arch].shared_memory
        assert not (kernel.spill_stores or kernel.spill_loads or kernel.warnings), problem


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
        if is_too_wide(problem, smallest) or (family is Decode and not is_decoded(problem)):
            continue
        if problem.direction is Direction.BACKWARD and head_dims not in wide:
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
    if family is Decode:
        for role in ("q", "o"):
            batch, heads, _, head_dim = tensors[role].dim
            tensors[role] = replace(tensors[role], dim=(batch, 8 * heads, 2, head_dim))
    other = type(plan)(problem, Geometry(tensors, 3.0, bottom_right=True), plan.target)
    assert {k.source for k in other.kernels()} <= set(every_source(plan))


#: Head dims, sequence length, mask -> tile_q, tile_k, bytes of shared memory and registers a thread
#: at launch: what ``setmaxnreg`` divides.
HOPPER_FORWARD = {
    ((64, 64), 8192, "full"): (256, 64, 200704, 96),
    ((64, 64), 8192, "causal"): (256, 64, 200704, 96),
    ((64, 64), 1024, "full"): (192, 96, 176128, 128),
    ((64, 64), 1024, "causal"): (128, 128, 150528, 168),
    ((32, 32), 8192, "full"): (256, 64, 200704, 96),
    ((40, 40), 8192, "full"): (192, 96, 176128, 128),
    ((96, 96), 8192, "full"): (192, 64, 225280, 128),
    ((128, 128), 8192, "full"): (192, 64, 225280, 128),
    ((128, 128), 8192, "causal"): (128, 128, 232448, 168),
    ((128, 128), 16384, "causal"): (192, 64, 225280, 128),
    ((192, 128), 8192, "causal"): (128, 128, 232448, 168),
    ((160, 160), 8192, "causal"): (192, 48, 212992, 128),
    ((168, 168), 8192, "full"): (192, 32, 225280, 128),
    ((192, 192), 8192, "full"): (128, 96, 232448, 168),
    ((256, 256), 8192, "full"): (128, 64, 232448, 168),
    ((256, 256), 8192, "causal"): (128, 64, 232448, 168),
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


@pytest.mark.parametrize("dropout", [Philox(), FlashDropout()], ids=["philox", "flash"])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_no_spills_of_a_soft_cap_and_dropout(head_dim: int, dropout: Dropout) -> None:
    """Of few columns three consumers have the fewest registers for both, in all tilings."""
    problem = Problem(
        Direction.FORWARD, data_type.HALF, head_dim, head_dim,
        (Scale(positive=False), SoftCap()), MASKS["causal"], data_type.FLOAT, dropout=dropout,
    )  # fmt: skip
    found = complaints(sources_of(FwdSm90, [problem], "sm_90a"), "sm_90a")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_no_spills_of_alibi_and_a_sink(symmetric: bool, paged: bool) -> None:
    """Under a causal mask, of few columns, three consumers of 96 keys had no registers for them."""
    problem = Problem(
        Direction.FORWARD, data_type.BFLOAT16, 64, 64,
        (Scale(positive=True), Alibi(symmetric=symmetric)), MASKS["causal"], data_type.FLOAT,
        sink=True, paged_k=paged, paged_v=paged,
    )  # fmt: skip
    found = complaints(sources_of(FwdSm90, [problem], "sm_90a"), "sm_90a")
    assert not found, "\n".join(found)


def test_hopper_instructions() -> None:
    """The Hopper forward multiplies with wgmma and loads tiles with the copy engine."""
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("needs cuobjdump, from the CUDA toolkit or Triton")
    problem = problems(FwdSm90)[0]
    (kernel,) = plan_for(FwdSm90, problem, "sm_90a").kernels()
    cubin = jit.compile_kernel(kernel.source, "sm_90a").cubin
    listing = subprocess.run(
        [disassembler, "-sass", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    for instruction in ("HGMMA.64x", "UTMALDG.4D", "USETMAXREG"):
        assert instruction in listing, instruction


def find_disassembler() -> str | None:
    """cuobjdump on the path, else the one in Triton's wheel."""
    triton = find_spec("triton")
    packages = list(triton.submodule_search_locations or []) if triton else []
    inside = [Path(package) / "backends" / "nvidia" / "bin" for package in packages]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, inside)]))
