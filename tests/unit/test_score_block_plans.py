"""Plans of functions that mask blocks: what they launch first, and the memory of the mask."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from dlattn.dtypes import data_type
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import Decode
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import (
    Band,
    Bias,
    BlockMask,
    Geometry,
    Mask,
    Padding,
    Philox,
    Problem,
    Scale,
    TensorSpec,
    skipped_blocks,
)
from dlattn.runtime.target import KNOWN
from tests.compile.problems import direction_of, plan_for
from tests.compile.programs import program

FAMILIES = {FwdSm80: "sm_80", FwdSm90: "sm_90a", BwdSm80: "sm_80", BwdSm90: "sm_90a"}


def documents(family: type[CudaPlan], **fields: Any) -> Problem:
    """Attention inside documents."""
    made = program("documents", direction_of(family))
    blocks = skipped_blocks(made)
    assert blocks is not None
    problem = Problem(
        direction_of(family), data_type.HALF, 128, 128, (Scale(), made), (Padding(), blocks),
        data_type.FLOAT,
    )  # fmt: skip
    return replace(problem, **fields)


def with_reads(plan: CudaPlan, dims: dict[str, tuple[int, ...]]) -> CudaPlan:
    """The same plan where tensors have other shapes."""
    specs = dict(plan.geometry.tensors)
    for role, dim in dims.items():
        dtype = specs[role].dtype if role in specs else data_type.UINT8
        specs[role] = TensorSpec(role, dim, (1, 1, 1, 1), dtype)
    geometry = Geometry(specs, 0.125)
    return type(plan)(plan.problem, geometry, plan.target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_more(family: type[CudaPlan]) -> None:
    """The first kernel tells of blocks; the others are those of a problem with a block mask, in as
    much workspace and what the mask takes."""
    problem, arch = documents(family), FAMILIES[family]
    plan = plan_for(family, problem, arch)
    first, *others = (kernel.source for kernel in (*plan.first_kernels(), *plan.kernels()))
    assert first.name == "dlattn_score_blocks"
    given = replace(problem.without_score_blocks, masks=(Padding(), BlockMask()))
    like = plan_for(family, given, arch)
    assert [source.name for source in others] == [kernel.source.name for kernel in like.kernels()]
    # 3 x 3 blocks: two bits for each, in rows of a word.
    assert plan.workspace_size == like.workspace_size + 256
    assert plan.score_blocks is not None and plan.score_blocks.grid == (1, 1, 1)


@pytest.mark.parametrize(
    "dims, entries",
    [
        ({}, (1, 1)),
        ({"score_mod_0": (2, 1, 1, 300)}, (2, 1)),
        ({"score_mod_1": (1, 4, 300, 1)}, (1, 4)),
        ({"score_mod_0": (2, 1, 1, 300), "score_mod_1": (1, 4, 300, 1)}, (2, 4)),
        ({"block_mask": (2, 4, 3, 1)}, (2, 4)),
    ],
)
def test_entries_share_a_mask(dims: Any, entries: tuple[int, int]) -> None:
    """Batch entries, and heads, have masks of their own only where what is read differs, or where
    the mask that the user gives does; strides say so."""
    plan = with_reads(plan_for(FwdSm80, documents(FwdSm80), "sm_80"), dims)
    batch, heads = entries
    assert plan.score_blocks is not None and plan.score_blocks.grid == (1, heads, batch)
    mask = plan._params.block_mask
    steps = (mask.batch, mask.head, mask.row, mask.column)
    assert steps == (12 * heads * (batch > 1), 12 * (heads > 1), 4, 1)
    given = plan._params.given_block_mask
    assert (given.row != 0) == ("block_mask" in dims)
    places = [begin for _, begin in plan.score_blocks.places(plan._params)]
    assert places == [0, 12 * batch * heads]
    bytes_of_masks = 2 * 12 * batch * heads
    assert plan.score_blocks.nbytes == -(-bytes_of_masks // 256) * 256


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("access_bytes", [2, 16])
def test_parts_of_a_gradient_have_room(arch: str, access_bytes: int) -> None:
    """The kernel of a bias' gradient has the whole function as an edit, and so tiles of its own."""
    bias = Bias(data_type.HALF, contiguous=True)
    problem = documents(
        BwdSm80, edits=(*documents(BwdSm80).edits, bias), head_dim_qk=64, head_dim_v=64,
        d_bias=data_type.HALF, access_bytes=access_bytes,
    )  # fmt: skip
    plan = plan_for(BwdSm80, problem, arch)
    specs, (_, _, rows, columns) = dict(plan.geometry.tensors), plan.geometry.tensors["q"].dim
    heads = 24
    for role in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV"):
        dim, stride = (1, heads, rows, columns), (0, rows * columns, columns, 1)
        specs[role] = replace(specs[role], dim=dim, stride=stride)
    for role in ("bias", "dBias"):
        specs[role] = TensorSpec(role, (1, 1, 1, rows), (0, 0, 0, 1), data_type.HALF)
    plan = BwdSm80(problem, Geometry(specs, 0.125), KNOWN[arch])
    (kernel,) = (it for it in plan.kernels() if it.source.name == "dlattn_bwd_dbias")
    tile = re.search(r"DBiasTiling<(\d+), (\d+)", kernel.source.text)
    assert tile is not None and prod(kernel.grid[1:]) > 1
    assert plan._arrays["dbias_parts"] >= 4 * prod(map(int, tile.groups())) * prod(kernel.grid)
    assert plan._arrays["dbias_arrivals"] >= 4 * kernel.grid[0]


def test_masks_lie_behind_what_is_told_of_sequences() -> None:
    """Of a ragged problem, whose first kernel writes there, too."""
    plan = plan_for(FwdSm80, documents(FwdSm80, ragged=True), "sm_80")
    assert plan.ragged is not None and plan.score_blocks is not None
    begins = [begin for _, begin in plan._places]
    masks = len(plan.score_blocks.places(plan._params))
    behind = plan.scratch_bytes + plan.ragged.nbytes
    assert max(begins[:-masks]) < behind == begins[-masks]
    assert plan.workspace_size == behind + plan.score_blocks.nbytes


def test_long_sequences() -> None:
    """A thread block has 32 x 32 blocks, of which rows of bits are whole words."""
    plan = plan_for(FwdSm80, documents(FwdSm80), "sm_80", seq=16_385)
    assert plan.score_blocks is not None
    assert plan.score_blocks.grid == (5 * 5, 1, 1)
    assert plan.score_blocks.nbytes == -(-2 * 129 * 20 // 256) * 256


def test_what_has_no_registers() -> None:
    """Where a kernel has no registers for a block mask beside others, it visits every block, and
    is not left to a slower one; a decode, whose queries are in one block, does, too."""
    dropped = plan_for(BwdSm90, documents(BwdSm90, dropout=Philox()), "sm_90a")
    few = plan_for(Decode, documents(Decode), "sm_80")
    for plan in (dropped, few):
        assert plan.score_blocks is None and not plan.problem.has_blocks
        assert not plan.first_kernels()
    assert plan_for(BwdSm80, documents(BwdSm80, dropout=Philox()), "sm_80").score_blocks


@pytest.mark.parametrize(
    "dims, lengths, entries",
    [
        ({}, False, (1, 1)),
        ({}, True, (2, 1)),
        ({"score_mod_1": (1, 4, 300, 1)}, False, (1, 4)),
        ({"block_mask": (2, 4, 64, 8)}, True, (2, 4)),
    ],
)
def test_many_tiles_are_put_in_order(dims: Any, lengths: bool, entries: tuple[int, int]) -> None:
    """Where blocks of the Hopper forward ask for query tiles of a block mask, a kernel before says
    in which order they come, for each entry whose tiles differ; it waits for the mask, and the
    forward for it, by themselves."""
    plan = plan_for(FwdSm90, documents(FwdSm90), "sm_90a", seq=8100)
    more = {"seq_len_q": (2, 1, 1, 1)} if lengths else {}
    plan = with_reads(plan, dims | more)
    (blocks, order), (main,) = plan.first_kernels(), plan.kernels()
    names = [kernel.source.name for kernel in (blocks, order, main)]
    assert names == ["dlattn_score_blocks", "dlattn_tile_order", "dlattn_fwd_sm90"]
    assert [it.programmatic for it in (blocks, order, main)] == [False, True, True]
    batch, heads = entries
    assert order.grid == (heads, batch, 1) and order.shared == 4 * 64
    told = plan._params.tile_order
    assert (told.batch, told.head) == (64 * heads * (batch > 1), 64 * (heads > 1))
    assert plan.scratch_bytes == 256
    assert plan.score_blocks is not None
    assert plan.workspace_size == 256 + plan.score_blocks.nbytes + 256 * batch * heads


def test_few_tiles_have_no_order() -> None:
    """Nor have those of a packed batch, whose long sequences come first."""
    for fields, seq in (({}, 300), ({"ragged": True}, 8100)):
        plan = plan_for(FwdSm90, documents(FwdSm90, **fields), "sm_90a", seq=seq)
        names = [kernel.source.name for kernel in (*plan.first_kernels(), *plan.kernels())]
        assert "dlattn_tile_order" not in names and plan._params.tile_order.batch == 0
        companions = [source.name for source in plan.companions()]
        assert ("dlattn_tile_order" in companions) == (not fields)


def test_a_mask_as_given_has_an_order() -> None:
    """Of the user's, no kernel comes before it."""
    problem = replace(
        documents(FwdSm90).without_score_blocks,
        edits=(Scale(),),
        masks=(Padding(), BlockMask()),
    )
    plan = plan_for(FwdSm90, problem, "sm_90a", seq=8100)
    (order,), (main,) = plan.first_kernels(), plan.kernels()
    assert (order.programmatic, main.programmatic) == (False, True)
    assert order.grid == (4, 2, 1)


@pytest.mark.parametrize("masks", [(), (Band(left=False, right=True),), (BlockMask(),)])
@pytest.mark.parametrize("seq", [129, 1700, 8100])
def test_a_plan_travels(masks: tuple[Mask, ...], seq: int) -> None:
    """What a forward launches on devices of other numbers of multiprocessors, with the tiling that
    it has here, is among its kernels here, and those that it would have elsewhere."""
    problem = replace(
        documents(FwdSm90).without_score_blocks, edits=(Scale(),), masks=(Padding(), *masks)
    )
    left, right = None, 0 if masks and isinstance(masks[0], Band) else None
    here = plan_for(FwdSm90, problem, "sm_90a", seq=seq, left=left, right=right)
    assert isinstance(here, FwdSm90)
    carried = {*here.sources(), *here.elsewhere()}
    for multiprocessors in (3, 24, 78, 114, 132, 160):
        target = replace(here.target, multiprocessors=multiprocessors)
        there = FwdSm90(problem, here.geometry, target, here.tiling)
        assert carried.issuperset(there.sources()), multiprocessors
