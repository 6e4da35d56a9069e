"""When a problem is decoded, and how its keys are divided among blocks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.decode import Decode
from dlattn.plans.decode_tiling import items_side_by_side, tilings
from dlattn.plans.select import select
from dlattn.problem import (
    PAGE_TABLES,
    Bias,
    BlockMask,
    Direction,
    Geometry,
    Padding,
    Philox,
    Problem,
    Scale,
    TensorSpec,
)
from dlattn.runtime.target import KNOWN
from tests.builders import make_tensors
from tests.decode_divisions import DIVIDED
from tests.drivers import geometry_of, problem_of
from tests.libraries import Library

HOPPER = KNOWN["sm_90a"]
PROBLEM = Problem(Direction.FORWARD, data_type.HALF, 128, 128, (Scale(),), (Padding(),))


def geometry(
    *,
    batch: int = 2,
    heads: tuple[int, int, int] = (8, 2, 2),
    queries: int = 1,
    keys: int = 1000,
    head_dim: int = 128,
) -> Geometry:
    """Contiguous tensors; ``heads`` of q, k and v."""

    def spec(role: str, count: int, rows: int) -> TensorSpec:
        dim = (batch, count, rows, head_dim)
        stride = (count * rows * head_dim, rows * head_dim, head_dim, 1)
        return TensorSpec(role, dim, stride, data_type.HALF)

    q, k, v = heads
    return Geometry(
        {
            "q": spec("q", q, queries),
            "k": spec("k", k, keys),
            "v": spec("v", v, keys),
            "o": spec("o", q, queries),
        }
    )


@pytest.mark.parametrize("arch", KNOWN)
def test_few_queries_are_decoded(arch: str) -> None:
    """On every architecture, if the rows of all heads that share keys fit its registers."""
    assert select(PROBLEM, geometry(), KNOWN[arch])[0] is Decode
    assert Decode in select(PROBLEM, geometry(queries=16), KNOWN[arch])
    assert Decode not in select(PROBLEM, geometry(queries=17), KNOWN[arch])
    most = max(tiling.rows for tiling in tilings(PROBLEM, KNOWN[arch]))
    for heads, taken in ((most, True), (most + 1, False)):
        reason = Decode.supports(PROBLEM, geometry(heads=(heads, 1, 1)), KNOWN[arch])
        assert (reason is None) == taken


@pytest.mark.parametrize(
    "batch, heads, queries, keys, plan",
    [
        # Up to 32 rows, whatever there is; more where items are many and long, or have clusters.
        (1, 1, 4, 8192, "decode"),
        (1, 8, 4, 1024, "decode"),
        (16, 8, 8, 8192, "decode"),
        (8, 8, 8, 8192, "decode"),
        (64, 1, 8, 1024, "decode"),
        # Or where parts of them are long, and rows of keys of many heads neighbours.
        (4, 8, 5, 8192, "decode"),
        (1, 8, 8, 65536, "decode"),
        (16, 2, 8, 8192, "fwd_sm90"),
        (1, 8, 8, 8192, "fwd_sm90"),
        (64, 2, 8, 1024, "fwd_sm90"),
        # Above 64, parts take longer than all else.
        (8, 8, 16, 8192, "fwd_sm90"),
        (1, 1, 9, 65536, "fwd_sm90"),
    ],
)
def test_many_rows_are_left_to_hoppers_forward(
    batch: int, heads: int, queries: int, keys: int, plan: str
) -> None:
    """Where that was measured as faster; others have none that is, nor has it for a bias."""
    sizes = geometry(batch=batch, heads=(8 * heads, heads, heads), queries=queries, keys=keys)
    plans = [it.name for it in select(PROBLEM, sizes, HOPPER)]
    assert plans[0] == plan and {*plans[:2]} == {"decode", "fwd_sm90"}
    assert select(PROBLEM, sizes, KNOWN["sm_80"])[0] is Decode
    biased = replace(PROBLEM, edits=(Scale(), Bias(data_type.HALF, contiguous=True)))
    shape = (1, 1, queries, keys), (queries * keys, queries * keys, keys, 1)
    bias = TensorSpec("bias", *shape, data_type.HALF)
    more = replace(sizes, tensors=sizes.tensors | {"bias": bias})
    assert select(biased, more, HOPPER)[0] is Decode


@pytest.mark.parametrize("heads, queries", [(71, 1), (128, 1), (48, 1), (24, 3), (16, 5)])
def test_many_heads_of_few_queries_are_decoded(heads: int, queries: int) -> None:
    """A tile of the forward has 16 rows of a head at least, and at most eight heads."""
    for batch in (1, 64):
        sizes = geometry(batch=batch, heads=(heads, 1, 1), queries=queries, keys=8192)
        assert select(PROBLEM, sizes, HOPPER)[0] is Decode


def test_short_lengths_on_the_device_are_decoded() -> None:
    """Up to 64 rows: Hopper's forward takes longer to find out who has which keys."""
    sizes = geometry(batch=1, heads=(16, 2, 2), queries=8, keys=1024)
    assert select(PROBLEM, sizes, HOPPER)[0] is not Decode
    assert select(PROBLEM, with_lengths(sizes), HOPPER)[0] is Decode


def test_copies_reach_32_rows() -> None:
    """The copy engine brings keys to one or two groups of 16 rows, to more threads do."""
    for queries, groups, boxes in ((2, 1, True), (3, 2, True), (4, 2, True), (5, 4, False)):
        sizes = geometry(batch=1, heads=(8, 1, 1), queries=queries, keys=20_000)
        tiling = Decode(PROBLEM, sizes, HOPPER).tiling
        assert (tiling.row_groups, tiling.boxes, tiling.cluster) == (groups, boxes, 0)
    many = geometry(batch=64, heads=(8, 1, 1), queries=4, keys=1024)
    assert Decode(PROBLEM, many, HOPPER).tiling.cluster == 2


@pytest.mark.parametrize(
    ("problem", "sizes", "said"),
    [
        (PROBLEM, {"queries": 17}, "at most 16 queries; the graph has 17."),
        (PROBLEM, {"heads": (16, 1, 1), "queries": 9}, "at most 128 rows, .*; the graph has 144."),
        (PROBLEM, {"heads": (129, 1, 1)}, "at most 128 rows, .*; the graph has 129."),
        (replace(PROBLEM, head_dim_qk=200), {}, "dimension of q and k must be at most 192; got"),
        (replace(PROBLEM, head_dim_v=136), {}, "dimension of v must be at most 128; got 136."),
        (replace(PROBLEM, access_bytes=2), {}, "16-byte aligned"),
        (replace(PROBLEM, dropout=Philox()), {}, "no dropout"),
        (replace(PROBLEM, masks=(Padding(), BlockMask())), {}, "block mask"),
        (replace(PROBLEM, direction=Direction.BACKWARD), {}, "forward pass only"),
    ],
)
def test_what_is_not_decoded(problem: Problem, sizes: dict[str, int], said: str) -> None:
    """A sentence says why."""
    reason = Decode.supports(problem, geometry(**sizes), HOPPER)
    assert reason is not None and re.search(said, reason)


@pytest.mark.parametrize("arch", KNOWN)
@given(dim_qk=st.integers(1, 24), dim_v=st.integers(1, 16))
def test_tilings_fit(arch: str, dim_qk: int, dim_v: int) -> None:
    """They have room in shared memory, two stages at least, and more rows one after the other."""
    target = KNOWN[arch]
    problem = replace(PROBLEM, head_dim_qk=8 * dim_qk, head_dim_v=8 * dim_v)
    found = tilings(problem, target)
    assert found and all(t.shared_memory(problem) <= target.shared_memory for t in found)
    assert all(t.stages >= 2 and t.warps % t.row_groups == 0 for t in found)
    assert [t.rows for t in found] == sorted({t.rows for t in found})
    assert all(t.row_groups % 4 == 0 and arch == "sm_90a" for t in found if t.warpgroups)


def with_lengths(sizes: Geometry) -> Geometry:
    """The same with lengths of keys on the device."""
    shape = (sizes.batch, 1, 1, 1), (1, 1, 1, 1)
    lengths = TensorSpec("seq_len_kv", *shape, data_type.INT32)
    return replace(sizes, tensors={**sizes.tensors, "seq_len_kv": lengths})


@given(
    heads_q=st.sampled_from((1, 2, 6, 8, 12, 40, 48, 64, 128)),
    groups=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    batch=st.integers(1, 70),
    keys=st.integers(1, 70000),
    lengths=st.booleans(),
)
def test_blocks_run_at_once(
    heads_q: int, groups: tuple[int, int], batch: int, keys: int, lengths: bool
) -> None:
    """Where all share all items, there are no more than run at once, in whole teams, with a part of
    the workspace each; where there is work for all, hardly one is left out that a narrower team
    would use. Else each item has a block, or a cluster, all of which run at once, and needs no
    workspace."""
    assume(heads_q % groups[0] == 0 and heads_q % groups[1] == 0)
    sizes = geometry(
        batch=batch, heads=(heads_q, heads_q // groups[0], heads_q // groups[1]), keys=keys
    )
    plan = Decode(PROBLEM, with_lengths(sizes) if lengths else sizes, HOPPER)
    shared = sizes.heads_together
    assert groups[0] % shared == 0 and groups[1] % shared == 0
    most = HOPPER.multiprocessors * plan.tiling.min_blocks
    width = items_side_by_side(sizes, most)
    assert heads_q // shared % width == 0
    blocks = plan.kernels()[0].grid[0]
    assert 0 < blocks and (plan.tiling.cluster == 1 or blocks <= most)
    if plan.tiling.cluster:
        assert plan._params.items.heads.number == heads_q // shared
        assert blocks == batch * heads_q // shared * plan.tiling.cluster
        assert plan.workspace_size == 0
        return
    assert plan._params.items.pairs.number == width and blocks % width == 0
    assert plan.workspace_size >= blocks * (plan.tiling.part_bytes(PROBLEM) + 8)
    if batch * keys > 128 * most:
        best = max(most // w * w for w in range(1, most + 1) if heads_q // shared % w == 0)
        assert blocks > 0.95 * most or blocks == best


#: Batch, heads of q and k, keys -> blocks of an item, a cluster if several; 0 where all share all.
BLOCKS_OF_AN_ITEM = {
    (1, 64, 8, 1024): 8,
    (1, 64, 8, 512): 4,
    (8, 64, 8, 8192): 2,
    (1, 32, 32, 1024): 2,  # half of the chip waits, for less than others' parts would take
    (1, 32, 32, 2048): 0,
    (1, 64, 8, 4096): 8,
    (
        1,
        4,
        4,
        4096,
    ): 0,  # so few items that parts of all blocks meet sooner than their keys are there
    (1, 4, 4, 2048): 8,
    (1, 5, 5, 4096): 8,
    (10, 1, 1, 8192): 0,
    (11, 1, 1, 8192): 8,  # most of the chip
    (11, 1, 1, 32768): 8,
    (11, 1, 1, 32769): 0,
    (1, 8, 8, 100): 0,  # one tile
    (64, 64, 8, 8192): 1,
    (64, 64, 8, 8193): 0,
    (63, 64, 8, 1024): 1,  # 3.82 for each multiprocessor
    (62, 64, 8, 1024): 0,
    (33, 64, 8, 1024): 1,  # two at once
    (34, 64, 8, 1024): 0,
    (27, 64, 8, 1024): 1,
    (26, 64, 8, 1024): 0,  # 1.58, which would leave too many with one
}


@pytest.mark.parametrize("sizes", BLOCKS_OF_AN_ITEM)
def test_few_items_have_clusters_and_many_blocks_of_their_own(
    sizes: tuple[int, int, int, int],
) -> None:
    """Clusters have as many blocks as have tiles and run at once; the launch says so, and begins
    early."""
    batch, heads, heads_k, keys = sizes
    given = geometry(batch=batch, heads=(heads, heads_k, heads_k), keys=keys)
    plan, blocks = Decode(PROBLEM, given, HOPPER), BLOCKS_OF_AN_ITEM[sizes]
    assert plan.tiling.boxes and plan.tiling.cluster == blocks
    (kernel,) = plan.kernels()
    assert kernel.cluster == max(1, blocks) and kernel.programmatic
    assert kernel.grid[0] % kernel.cluster == 0
    portable = Decode(PROBLEM, given, KNOWN["sm_80"])
    assert not portable.tiling.boxes and not portable.kernels()[0].programmatic


def test_large_parts_meet_in_clusters() -> None:
    """Of more than 16 rows, even where more than half of the multiprocessors have nothing to do
    then, if keys are few; not of narrow heads, whose blocks would read too little at a time."""

    def cluster(heads: int, heads_k: int, queries: int, dim: int = 128, keys: int = 8192) -> int:
        sizes = geometry(
            batch=1, heads=(heads, heads_k, heads_k), queries=queries, keys=keys, head_dim=dim
        )
        problem = replace(PROBLEM, head_dim_qk=dim, head_dim_v=dim)
        return Decode(problem, sizes, HOPPER).tiling.cluster

    assert cluster(64, 8, 2) == 0 and cluster(64, 8, 3) == cluster(64, 8, 4) == 8
    assert cluster(56, 7, 4) == 8 and cluster(48, 6, 4) == cluster(8, 1, 4) == 0
    assert cluster(64, 8, 4, keys=8193) == 0 and cluster(88, 11, 4, keys=8193) == 8
    assert cluster(32, 4, 4, keys=2048) == 8 and cluster(32, 4, 4, keys=2049) == 0
    assert cluster(64, 8, 4, dim=64) == 0


def test_narrow_heads_stand_alone_if_long() -> None:
    """With 64 columns, shares of fewer keys are quicker; not with half as many."""

    def cluster(keys: int, dim: int = 64) -> int:
        sizes = geometry(batch=64, heads=(32, 32, 32), keys=keys, head_dim=dim)
        problem = replace(PROBLEM, head_dim_qk=dim, head_dim_v=dim)
        return Decode(problem, sizes, HOPPER).tiling.cluster

    assert cluster(2047) == 0 and cluster(2048) == 1
    assert cluster(1024, 32) == cluster(1024, 72) == 1


def test_long_unequal_lengths_are_shared() -> None:
    """Who has one item waits for the longest entry: that is for short ones, and for one entry
    alone; for longer ones where there are many. Where there are several items for each, two blocks
    share them."""

    def plan(batch: int, keys: int) -> Decode:
        return Decode(
            PROBLEM, with_lengths(geometry(batch=batch, heads=(64, 8, 8), keys=keys)), HOPPER
        )

    def cluster(batch: int, keys: int) -> int:
        return plan(batch, keys).tiling.cluster

    assert cluster(8, 2048) == 2 and cluster(8, 2049) == 0
    assert cluster(1, 1024) == 8
    assert cluster(17, 1024) == cluster(40, 1024) == cluster(256, 4096) == 1
    assert cluster(16, 1024) == cluster(17, 1025) == cluster(64, 2048) == cluster(256, 4200) == 0
    assert plan(40, 1024).tiling.stages == 2 and plan(256, 4096).tiling.stages == 1
    for batch, blocks in ((15, 1), (16, 2), (64, 2)):
        shared, most = plan(batch, 8192), blocks * HOPPER.multiprocessors
        assert shared.tiling.min_blocks == blocks
        assert 0.95 * most < shared.kernels()[0].grid[0] <= most


@given(
    dims=st.tuples(st.integers(1, 24), st.integers(1, 16)),
    kind=st.sampled_from([(70, 1024, 1, 2), (70, 9000, 0, 2), (1, 9000, 0, 1), (1, 1024, 8, 1)]),
    queries=st.sampled_from([1, 4, 8]), arch=st.sampled_from(["sm_80", "sm_90a"]),
)  # fmt: skip
def test_so_many_blocks_are_on_a_multiprocessor(
    dims: tuple[int, int], kind: tuple[int, int, int, int], queries: int, arch: str
) -> None:
    """Neither fewer nor more: what a launch asks for leaves no room for another one."""
    batch, keys, cluster, blocks = kind
    sizes = geometry(batch=batch, heads=(8, 8, 8), queries=queries, keys=keys)
    problem = replace(PROBLEM, head_dim_qk=8 * dims[0], head_dim_v=8 * dims[1])
    target = KNOWN[arch]
    plan = Decode(problem, with_lengths(sizes), target)
    if target is HOPPER and queries == 1:
        assert (plan.tiling.cluster, plan.tiling.min_blocks) == (cluster, blocks)
    (kernel,), each = plan.kernels(), plan.tiling.min_blocks
    reserved, room = 1024, target.shared_memory + 1024
    assert each * (kernel.shared + reserved) <= room < (each + 1) * (kernel.shared + reserved)


@pytest.mark.parametrize("page, boxes", [(8, False), (16, True), (64, True)])
def test_boxes_lie_in_pages(page: int, boxes: bool) -> None:
    """The copy engine brings 16 rows at a time, if a page has them."""
    sizes = geometry(keys=1024)
    tensors = dict(sizes.tensors)
    count = 2 * 1024 // page
    for role in ("k", "v"):
        dim, stride = (count, 2, page, 128), (2 * page * 128, page * 128, 128, 1)
        tensors[role] = replace(tensors[role], dim=dim, stride=stride)
    entries = (2, 1, 1024 // page, 1)
    for role in PAGE_TABLES.values():
        stride = (1024 // page, 1024 // page, 1, 1)
        tensors[role] = TensorSpec(role, entries, stride, data_type.INT32)
    for role in ("seq_len_q", "seq_len_kv"):
        tensors[role] = TensorSpec(role, (2, 1, 1, 1), (1, 1, 1, 1), data_type.INT32)
    paged = Geometry(tensors, max_seq_kv=1024)
    plan = Decode(replace(PROBLEM, paged_k=True, paged_v=True), paged, HOPPER)
    assert plan.tiling.boxes == boxes
    assert set(plan.box_rows().values()) == ({16} if boxes else set())


@pytest.mark.parametrize("name", DIVIDED)
def test_items_are_divided_as_its_name_says(name: str) -> None:
    """Each case with which a GPU tests a division has that one."""
    multiprocessors, divided, case = DIVIDED[name]
    target = replace(HOPPER, multiprocessors=multiprocessors)
    given = geometry_of(case, make_tensors(case, Library()))
    tiling = Decode(problem_of(case, Direction.FORWARD), given, target).tiling
    assert (tiling.cluster, tiling.min_blocks, tiling.stages) == divided
