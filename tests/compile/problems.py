"""Problems, and plans for them, that the compile tests take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import MOST_HEAD_DIM_QK, MOST_HEAD_DIM_V, Decode
from dlattn.plans.decode_tiling import MOST_QUERIES
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import (
    BLOCK,
    PAGE_TABLES,
    RAGGED_ROLES,
    SCORE_MOD_ROLES,
    Alibi,
    Band,
    Bias,
    BlockMask,
    Direction,
    Dropout,
    Edit,
    FlashDropout,
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
from dlattn.runtime import jit
from dlattn.runtime.target import KNOWN

#: Kernel families, each with the architectures it is compiled for.
FAMILIES: dict[type[CudaPlan], tuple[str, ...]] = {
    FwdSm80: tuple(KNOWN),
    BwdSm80: tuple(KNOWN),
    Decode: tuple(KNOWN),
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
#: Rows of the table of Hopper's forward alone.
FORWARD_HEAD_DIMS = [(112, 112), (160, 160), (168, 168)]
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
    "mask": (Bias(data_type.BOOLEAN, contiguous=True, aligned=True),),
    "mask of keys": (Bias(data_type.BOOLEAN, contiguous=True, aligned=True, one_row=True),),
    "any mask": (Bias(data_type.BOOLEAN, contiguous=True),),
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


def direction_of(family: type[CudaPlan]) -> Direction:
    return Direction.BACKWARD if family.name.startswith("bwd") else Direction.FORWARD


def is_too_wide(problem: Problem, arch: str) -> bool:
    """Whether a backward's tiles do not fit shared memory, which it says."""
    wide = min(problem.head_dim_qk, problem.head_dim_v) > 480
    return wide and problem.direction is Direction.BACKWARD and arch == "sm_120"


def is_left_to_portable(problem: Problem) -> bool:
    """Whether a backward has no registers on Hopper, and says so."""
    widest = problem.head_dim_qk + problem.head_dim_v > 384
    crowded = problem.keeps_scores and problem.adds_to_scores
    if problem.dropout is not None:
        given_mask = isinstance(problem.dropout, GivenMask) and problem.keeps_scores
        if problem.has_blocks or (given_mask and (widest or problem.head_dim_v > 192)):
            return True
    if problem.has_blocks:
        return problem.adds_to_scores if widest else problem.head_dim_v > 192
    return widest and crowded and (problem.dropout is not None or problem.paged_v)


def is_decoded(problem: Problem) -> bool:
    """Whether the decode takes a problem, if queries are few."""
    narrow = problem.head_dim_qk <= MOST_HEAD_DIM_QK and problem.head_dim_v <= MOST_HEAD_DIM_V
    whole, widest = problem.without_score_blocks, max(problem.head_dim_qk, problem.head_dim_v)
    narrow &= not (whole.gathers and widest > 128) and not (whole.reads_tables and widest > 96)
    plain = problem.dropout is None and not whole.has_blocks
    return narrow and plain and problem.access_bytes == 16


def plan_for(
    family: type[CudaPlan],
    problem: Problem,
    arch: str,
    *,
    seq: int | None = None,
    left: int | None = 64,
    right: int | None = 0,
) -> CudaPlan:
    """A plan on an arbitrary geometry: the code must not depend on it."""

    paged = {"k": problem.paged_k, "v": problem.paged_v}
    if seq is None:
        seq = MOST_QUERIES if family is Decode else 300

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
    if problem.has_blocks and problem.score_blocks is None:
        blocks = -(-seq // BLOCK)
        dim = (2, 4, blocks, -(-blocks // 8))
        stride = tuple(math.prod(dim[axis + 1 :]) for axis in range(4))
        tensors["block_mask"] = TensorSpec("block_mask", dim, stride, data_type.UINT8)
    for role, table in PAGE_TABLES.items():
        if paged[role]:
            tensors[table] = TensorSpec(table, (2, 1, 19, 1), (19, 0, 1, 1), data_type.INT32)
    for edit in problem.edits:
        for role, read in zip(SCORE_MOD_ROLES, getattr(edit, "reads", ()), strict=False):
            sizes = (1, 1, seq if read.by_query else 1, seq if read.by_key else 1)
            stride = tuple(math.prod(sizes[axis + 1 :]) for axis in range(4))
            tensors[role] = TensorSpec(role, sizes, stride, read.dtype, by_value=read.by_value)
    for of in problem.score_gradients:
        read = tensors.get(SCORE_MOD_ROLES[of.number])
        sizes = (1, 4, 1, 1) if read is None else read.dim
        stride = tuple(math.prod(sizes[axis + 1 :]) for axis in range(4))
        tensors[of.role] = TensorSpec(of.role, sizes, stride, of.dtype)
    longest = seq if any(paged.values()) else None
    geometry = Geometry(tensors, 0.125, band_left=left, band_right=right, max_seq_kv=longest)
    assert family.supports(problem, geometry, KNOWN[arch]) is None
    return family(problem, geometry, KNOWN[arch])


def sources_of(
    family: type[CudaPlan], problems: Iterable[Problem], arch: str
) -> dict[str, tuple[Problem, jit.KernelSource]]:
    """By their text, the kernels of a family's plans, each with a problem that has it."""
    return {
        source.text: (problem, source)
        for problem in problems
        for source in every_source(plan_for(family, problem, arch))
    }


def complaints(
    sources: Mapping[str, tuple[Problem, jit.KernelSource]],
    arch: str,
    most_spilled: Callable[[Problem, str], int] | None = None,
) -> list[str]:
    """Of kernels that spill registers or draw a ptxas performance warning.

    Args:
        sources: see :func:`sources_of`.
        most_spilled: bytes that a problem's kernels may; none of any, unless given.
    """
    compiled = jit.compile_kernels([source for _, source in sources.values()], arch)
    return [
        f"{kernel.name} {kernel.spill_stores} bytes spilled, {kernel.warnings}: {problem}"
        for (problem, _), kernel in zip(sources.values(), compiled, strict=True)
        if kernel.warnings
        or kernel.spill_stores > (most := most_spilled(problem, arch) if most_spilled else 0)
        or (kernel.spill_loads and not most)
    ]


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
    """Every head-dim class with every mask, every edit and every form of dropout, of which both
    that draw have the same companions; the other choices cycle, so that each pair meets. Each class
    also ragged, with pages, with both where a plan takes both, as FlashAttention's functions want
    it, and of a forward with all that it can write."""
    direction = direction_of(family)
    hopper = family in (FwdSm90, BwdSm90)
    widths = (16,) if hopper else (16, 16, 16, 16, 2)
    stats: list[data_type | None] = [data_type.FLOAT, None]
    if direction is Direction.BACKWARD:
        stats = [data_type.FLOAT]
    found = []
    wide = [] if hopper else WIDE_HEAD_DIMS
    own = FORWARD_HEAD_DIMS if family is FwdSm90 else []
    all_dims, edited_dims = (*HEAD_DIMS, *own), (*EDITED_HEAD_DIMS, *own, *wide[-1:])
    masks = tuple(MASKS.values())
    some_edits = ((), *EDITS.values())
    wanted: list[tuple[Any, ...]] = [
        *((dims, (), mask, None) for dims, mask in product(all_dims, masks)),
        *((dims, (), masks[i % len(masks)], None) for i, dims in enumerate(wide)),
        *(
            (dims, edits, masks[i % len(masks)], None)
            for i, (edits, dims) in enumerate(product(EDITS.values(), edited_dims))
        ),
        *(
            (dims, some_edits[i % len(some_edits)], masks[i % len(masks)], dropout)
            for i, (dropout, dims) in enumerate(product(DROPOUTS, edited_dims))
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
    each_mask = [found[len(masks) * i + i % len(masks)] for i in range(len(all_dims))]
    edited = found[len(masks) * len(all_dims) :]
    crowded = [
        p for p in found if len(p.edits) == 1 + len(EDITS["all"]) or p.dropout is DROPOUTS[-1]
    ]
    ragged = [replace(p, ragged=True) for p in (*each_mask, *crowded)]
    paged = [replace(p, **PAGED[i % len(PAGED)]) for i, p in enumerate((*each_mask, *edited))]
    if family is not BwdSm90:
        paged += [replace(p, **PAGED[i % len(PAGED)]) for i, p in enumerate(ragged)]
    wants = {"flash_stats": True} if direction is Direction.FORWARD else {"delta": True}
    flash = (*each_mask, *edited, *ragged[:: len(masks)])
    found += [replace(p, stats=data_type.FLOAT, **wants) for p in flash]
    everything: dict[str, Any] = {"d_stats": True, "sink": True}
    if direction is Direction.FORWARD:
        everything = {"score_max": True, "score_sum_exp": True, "sink": True}
    found += [replace(p, stats=data_type.FLOAT, **everything) for p in each_mask]
    every = found + ragged + paged
    drawn = [p for p in every if p.dropout is DROPOUTS[0]]
    every += [
        replace(p, dropout=FlashDropout(), ragged=i % 2 == 0 and not (p.paged_k or p.paged_v))
        for i, p in enumerate(drawn)
    ]
    if family is Decode:
        return [p for p in every if is_decoded(p)]
    return [p for p in every if not (family is BwdSm90 and is_left_to_portable(p))]
