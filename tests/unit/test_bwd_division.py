"""Items of the Hopper backward in parts: which, how many, and that nobody waits for ever."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.plans import bwd_sm90
from dlattn.plans.bwd_sm90 import BwdSm90
from tests.unit.test_backward_plans import HOPPER, geometry, problem


@given(
    batch=st.integers(1, 20),
    groups=st.integers(1, 20),
    heads_per_group=st.sampled_from([1, 2, 3, 4, 8]),
    seq_q=st.integers(1, 20_000),
    seq_kv=st.integers(1, 20_000),
    head_dim=st.sampled_from([64, 128, 256]),
    causal=st.booleans(),
)
def test_shares_go_with_parts_that_come_after_what_they_wait_for(
    batch: int, groups: int, heads_per_group: int, seq_q: int, seq_kv: int, head_dim: int,
    causal: bool,
) -> None:  # fmt: skip
    """A part stores a share only of items all of whose pair's parts have been taken before."""
    heads = groups * heads_per_group
    tensors = geometry(batch, groups, heads, seq_q, seq_kv, head_dim, causal=causal)
    plan = BwdSm90(problem(head_dim), tensors, HOPPER)
    assume(not plan.tiling.relays)  # without shares
    params, wave_items = plan._params, plan._wave_items
    items = batch * heads // params.heads_per_block.number * -(-seq_kv // plan.tiling.tile_k)
    whole, parts = params.whole_items, params.items.parts.number

    def last_part(item: int) -> int:
        return item if item < whole else whole + (item - whole + 1) * parts - 1

    taken = last_part(items - 1) + 1
    assert 0 <= params.lone_shares <= max(0, taken - params.dq_lag)
    for share in {0, params.lone_shares // 2, params.lone_shares - 1} & set(
        range(params.lone_shares)
    ):
        end_of_wave = min(items, (share // wave_items + 1) * wave_items)
        assert last_part(end_of_wave - 1) < share + params.dq_lag
    # Every pair that waits for a place does so for shares that go with parts taken before its own.
    for pair in {params.dq_places, batch * heads // params.heads_per_block.number - 1}:
        before = pair - params.dq_places
        if not 0 <= before < pair < batch * heads // params.heads_per_block.number:
            continue
        width = params.items.pairs.number
        end = (before // width + 1) * width * plan._key_tiles
        assert end <= params.lone_shares
        assert end - 1 + params.dq_lag < pair // width * width * plan._key_tiles


def test_who_is_divided() -> None:
    """Groups under a causal mask; the last items of a full mask, if they are few for the blocks."""

    def params(batch: int, groups: int, heads: int, seq: int, *, causal: bool) -> tuple[int, ...]:
        plan = BwdSm90(problem(), geometry(batch, groups, heads, seq, seq, causal=causal), HOPPER)
        its = plan._params
        return its.heads_per_block.number, its.whole_items, its.items.parts.number

    assert params(1, 8, 64, 4096, causal=True) == (2, 0, 1)
    assert params(1, 8, 64, 4096, causal=False) == (8, 256, 1)
    assert params(4, 16, 16, 4096, causal=False) == (1, 15 * 132, 3)
    assert params(4, 16, 16, 4096, causal=True) == (1, 64 * 32, 1)
    assert params(32, 16, 16, 512, causal=False) == (1, 2048, 1)
    assert params(1, 16, 16, 4096, causal=False) == (1, 512, 1)
    # The last 28 of 160, after one round; but not the last four of 4096, after 31.
    assert params(1, 4, 4, 5000, causal=False) == (1, 132, 4)
    assert params(16, 16, 16, 2048, causal=False) == (1, 4096, 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_few_groups_of_windows_are_divided(deterministic: bool) -> None:
    """Whole groups that are fewer items than blocks are divided by heads, in a fixed order, too."""

    def heads(groups: int, seq: int) -> int:
        shape = replace(geometry(2, groups, 4 * groups, seq, seq), band_left=300, band_right=0)
        its = BwdSm90(problem(deterministic=deterministic), shape, HOPPER)._params
        assert its.items.parts.number == 1
        return its.heads_per_block.number

    assert [heads(2, seq) for seq in (600, 4096, 16384)] == [1, 4, 4]


@pytest.mark.parametrize(
    "head_dim, group, heads",
    [(128, 8, 2), (128, 7, 1), (128, 9, 3), (128, 3, 3), (128, 5, 1), (128, 12, 3), (64, 8, 8),
     (64, 7, 7), (64, 71, 1)],
)  # fmt: skip
def test_sums_of_groups_fit_l2(head_dim: int, group: int, heads: int) -> None:
    """Of a group, under a causal mask, an item has as many heads as leave L2 room for all sums; or
    more, where its beginning and end would be much of it."""
    shape = geometry(8, 4, 4 * group, 4096, 4096, head_dim, causal=True)
    assert BwdSm90(problem(head_dim), shape, HOPPER)._params.heads_per_block.number == heads


def test_in_a_fixed_order_heads_alone_are_divided() -> None:
    """Parts of groups take turns to add; parts of queries would have none."""

    def divided(heads: int, seq: int, *, causal: bool) -> tuple[int, int]:
        shape = geometry(4, 4, heads, seq, seq, causal=causal)
        its = BwdSm90(problem(deterministic=True), shape, HOPPER)._params
        return its.heads_per_block.number, its.items.parts.number

    assert divided(28, 4096, causal=True) == (1, 1)
    assert divided(28, 1024, causal=True) == (7, 1)
    assert divided(28, 4096, causal=False) == (7, 1)
    assert divided(4, 128, causal=False) == (1, 1)
    # Few groups.
    assert divided(12, 500, causal=True) == divided(12, 500, causal=False) == (1, 1)


def test_short_groups_are_items_enough() -> None:
    """Where the longest items would end late, under a causal mask, they have fewer heads."""

    def heads(batch: int, seq: int) -> int:
        shape = geometry(batch, 8, 32, seq, seq, causal=True)
        return BwdSm90(problem(), shape, HOPPER)._params.heads_per_block.number

    assert [heads(1, seq) for seq in (512, 1024, 4096)] == [1, 1, 2]
    assert [heads(32, seq) for seq in (512, 1024, 4096)] == [4, 4, 2]


def test_few_items_fill_blocks() -> None:
    """Of few keys and many queries, most blocks have a part, of some heads of a group or of some
    of its queries: and under a full mask there is a block for each part, because parts wait for
    each other."""

    def work(
        groups: int, seq_q: int, seq_kv: int, heads: int = 16, causal: bool = False
    ) -> tuple[int, int]:
        shape = geometry(1, groups, heads, seq_q, seq_kv, causal=causal)
        plan = BwdSm90(problem(), shape, HOPPER)
        its, tiles = plan._params, -(-seq_q // plan.tiling.tile_q)
        items = heads // its.heads_per_block.number * -(-seq_kv // plan.tiling.tile_k)
        parts = items * its.items.parts.number
        blocks = min(parts, HOPPER.multiprocessors) if causal else parts
        assert plan.main_kernel(items).grid == (blocks, 1, 1)
        return parts, its.heads_per_block.number * -(-tiles // its.items.parts.number)

    assert work(1, 4096, 100) == (128, 8)
    assert work(2, 4096, 100) == (128, 8)
    assert work(2, 256, 1024) == (128, 4)
    assert work(16, 1024, 1024) == (128, 16)
    # Under a causal mask, the longest item.
    assert work(4, 1024, 1024, 4, causal=True) == work(4, 1024, 1024, 4) == (128, 4)
    assert work(8, 1024, 1024, 8, causal=True) == (128, 8)
    assert work(16, 1024, 1024, causal=True) == (128, 16)
    assert work(4, 4096, 4096, 4, causal=True) == (256, 32)
    assert work(1, 20_000, 20_000, 1, causal=True) == (471, 105)
    assert work(8, 3000, 3000, 8, causal=True) == (192, 47)


@given(
    pairs=st.integers(1, 24),
    group=st.sampled_from([1, 2, 4, 7]),
    seq=st.integers(129, 20_000),
    head_dim=st.sampled_from([64, 96, 128]),
)
def test_causal_parts_end_sooner(pairs: int, group: int, seq: int, head_dim: int) -> None:
    """When blocks take parts one after another, the last one ends sooner than of whole items; and
    no more is divided than has sums of dQ at a time."""
    shape = geometry(1, pairs, pairs * group, seq, seq, head_dim, causal=True)
    plan = BwdSm90(problem(head_dim), shape, HOPPER)
    if plan._params.items.parts.number == 1:
        return
    assert plan._params.whole_items == 0 and plan._params.dq_places == plan._pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bwd_sm90, "divided_causal", lambda *_: None)
        whole = BwdSm90(plan.problem, shape, HOPPER)
    assert end_of_causal_items(plan) < end_of_causal_items(whole)


def end_of_causal_items(plan: BwdSm90) -> int:
    """When the last part ends, in steps of a tile of queries, if it takes two more."""
    params, (tile_q, tile_k) = plan._params, (plan.tiling.tile_q, plan.tiling.tile_k)
    parts, heads = params.items.parts.number, params.heads_per_block.number
    last, ends = -(-plan.geometry.seq_q // tile_q), [0] * HOPPER.multiprocessors
    for key in range(0, plan.geometry.seq_kv, tile_k):
        count = last - key // tile_q
        for part in [*range(parts)] * plan._pairs:
            tiles = count * (part + 1) // parts - count * part // parts
            heapq.heapreplace(ends, ends[0] + heads * tiles + 2)
    return max(ends)


def test_blocks_of_few_items_begin_early() -> None:
    """While the kernel before ends; but not where blocks take several items, nor in clusters."""

    def is_early(batch: int, seq: int, head_dim: int = 128) -> bool:
        shape = geometry(batch, 16, 16, seq, seq, head_dim)
        main = BwdSm90(problem(head_dim), shape, HOPPER).kernels()[1]
        assert main.source.name == "dlattn_bwd_sm90"
        return main.programmatic

    assert is_early(1, 1024)
    assert not is_early(2, 1024)
    assert not is_early(1, 512, 256)
