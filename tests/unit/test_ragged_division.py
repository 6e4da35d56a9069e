"""Ragged Hopper backward: items of some heads of a group, which add to sums of dK and dV."""

from __future__ import annotations

import heapq
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlattn.plans import bwd_division, bwd_sm90
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.problem import Band, Direction, Padding
from tests.unit.test_ragged_plans import HOPPER, geometry, problem

LENGTHS = st.lists(st.integers(0, 3000), min_size=1, max_size=30)
#: Heads of keys, and query heads of each.
GROUPS, HEADS_PER_GROUP = st.integers(1, 6), st.sampled_from((1, 2, 3, 4, 6, 8, 16))


def plan_of(*, causal: bool = False, deterministic: bool = False, **sizes) -> BwdSm90:
    """A plan that may divide groups."""
    wanted = replace(problem(Direction.BACKWARD), deterministic=deterministic)
    shape = geometry(Direction.BACKWARD, **sizes)
    if causal:
        wanted = replace(wanted, masks=(Padding(), Band(left=False, right=True)))
        shape = replace(shape, band_right=0)
    return BwdSm90(wanted, shape, HOPPER)


def sizes_of(lengths: list[int], groups: int, heads_per_group: int) -> dict[str, int]:
    heads, longest = groups * heads_per_group, max(1, *lengths, 0)
    return {"batch": len(lengths), "groups": groups, "heads": heads, "seq": longest}


def numbered(plan: BwdSm90, lengths: list[int]) -> list[tuple[int, int, int, int]]:
    """Bundle, entry, tile of keys and number of heads of each item, in the order of
    ``ragged.cuh``."""
    params, tiling = plan._params, plan.tiling
    groups = plan.geometry.heads_q // params.heads_per_block.number
    room = -(-plan.geometry.seq_q // tiling.tile_q)
    last_first = plan.ragged.items.last_first
    items, first_bundle = [], 0
    for entry in sorted(range(len(lengths)), key=lambda b: (-lengths[b], b)):
        tiles = max(1, -(-lengths[entry] // tiling.tile_k))
        bundled = min(groups, room // max(1, -(-lengths[entry] // tiling.tile_q)))
        for first in range(0, groups, params.items.pairs.number):
            for tile in reversed(range(tiles)) if last_first else range(tiles):
                for head in range(first, min(first + params.items.pairs.number, groups)):
                    items.append((first_bundle + head // bundled, entry, tile, head))
        first_bundle += -(-groups // bundled)
    return items


@given(
    lengths=LENGTHS, groups=GROUPS, heads_per_group=HEADS_PER_GROUP, causal=st.booleans(),
    deterministic=st.booleans(), in_places=st.booleans(),
)  # fmt: skip
def test_items_wait_for_smaller_numbers(
    lengths, groups, heads_per_group, causal, deterministic, in_places
) -> None:
    """For the sums that they store as dQ, for the place of their own, and for the turn to add to
    sums of dK and dV, which goes with the heads of a group."""
    sizes = sizes_of(lengths, groups, heads_per_group)
    with pytest.MonkeyPatch.context() as patch:
        if in_places:
            patch.setattr(BwdSm90, "_own_sums", False)
        plan = plan_of(causal=causal, deterministic=deterministic, **sizes)
    params, items = plan._params, numbered(plan, lengths)
    assert len(items) <= plan.ragged.items.most
    numbers: dict[int, list[int]] = {}
    for number, (bundle, *_) in enumerate(items):
        numbers.setdefault(bundle, []).append(number)
    assert sorted(numbers) == list(range(len(numbers))) and len(numbers) <= plan._pairs
    if plan.tiling.relays:  # there are no sums of dQ
        numbers = {}
    assert params.dq_places > 0 or params.dq_lag >= len(numbers)
    places = params.dq_places or len(numbers)
    for bundle, own in numbers.items():
        for earlier in (bundle - params.dq_lag, bundle - places):
            assert earlier < 0 or max(numbers[earlier]) < min(own)
        storing = bundle - places + params.dq_lag
        assert storing < params.dq_lag or storing >= bundle or max(numbers[storing]) < min(own)
    number_of = {item[1:]: number for number, item in enumerate(items)}
    assert len(number_of) == len(items)
    in_turn = heads_per_group // params.heads_per_block.number
    for (entry, tile, head), number in number_of.items():
        assert head % in_turn == 0 or number_of[entry, tile, head - 1] < number


@given(
    lengths=LENGTHS, groups=GROUPS, heads_per_group=HEADS_PER_GROUP,
    more=st.sampled_from((0, 0, 1, 1000, None)), deterministic=st.booleans(),
)  # fmt: skip
def test_sums_of_all_tokens_have_room(
    lengths, groups, heads_per_group, more, deterministic
) -> None:
    """Whatever sequences the tokens that were promised are divided into, every tile of keys has
    sums of its own, in memory that is linear in the tokens."""
    most = None if more is None else max(1, sum(lengths) + more)
    sizes = sizes_of(lengths, groups, heads_per_group)
    plan = plan_of(deterministic=deterministic, **sizes, most_tokens=most)
    if not plan.tiling.adds_keys:
        assert plan._key_sums == 0 and plan._params.heads_per_block.number == heads_per_group
        return
    tile_k, first_tile, numbers = plan.tiling.tile_k, 0, []
    for length in lengths:
        tiles = max(1, -(-length // tile_k))
        numbers += [
            (first_tile + tile) * groups + head for tile in range(tiles) for head in range(groups)
        ]
        first_tile += tiles
    assert first_tile <= plan.ragged.key_tiles
    size = 4 * (2 * 128 * tile_k + (32 if deterministic else 0))
    assert sorted(set(numbers)) == sorted(numbers) and (max(numbers) + 1) * size <= plan._key_sums
    rows = len(lengths) * max(1, *lengths, 0) if most is None else most
    assert plan._key_sums <= size / tile_k * groups * (rows + tile_k * len(lengths))


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_of_divided_groups(deterministic: bool) -> None:
    """One more than of whole groups makes rows of the sums, of all key tiles that there may be; the
    kernels before count them and clear the sums, so that nobody else does."""
    sizes = {"batch": 5, "groups": 2, "heads": 32, "seq": 1000, "most_tokens": 2000}
    plan = plan_of(deterministic=deterministic, **sizes)
    names = [kernel.source.name for kernel in (*plan.first_kernels(), *plan.kernels())]
    assert names == [
        f"dlattn_{name}" for name in ("ragged", "bwd_delta", "bwd_sm90", "bwd_key_rows")
    ]
    assert plan.kernels()[-1].grid == (8, 2, 5)
    assert plan.cleared_bytes == 0
    assert ", true>;" in plan.first_kernels()[0].source.text
    plan.ragged.describe(plan._params)
    assert plan._params.ragged.key_tiles == 5 + 2000 // 128
    plan.place_workspace(1 << 20)
    ragged = plan._params.ragged
    arrays = {
        ragged.items: 16 * (1 + plan.ragged.items.most), ragged.mapped: 40 * 5,
        ragged.entries: (16 + 4) * 5, ragged.bundles: 4 * plan._pairs,
        plan._params.seq_len_q.data: 4 * 5, plan._params.seq_len_kv.data: 4 * 5,
    }  # fmt: skip
    begins = sorted(arrays)
    assert all(a + arrays[a] <= b for a, b in zip(begins, begins[1:], strict=False))
    assert begins[-1] + arrays[begins[-1]] <= (1 << 20) + plan.workspace_size
    assert ragged.items % 16 == 0


def test_who_is_divided() -> None:
    """Groups, where items of all their heads are too few, or those of the longest sequence too
    long; and not where there are items enough."""

    def heads_of_item(**sizes) -> int:
        plan = plan_of(**sizes)
        group = sizes["heads"] // sizes["groups"]
        assert plan.tiling.adds_keys == (plan._params.heads_per_block.number < group)
        return plan._params.heads_per_block.number

    long_and_short = {"batch": 65, "seq": 4096, "most_tokens": 4096 + 64 * 256}
    assert heads_of_item(groups=1, heads=16, **long_and_short) == 4
    assert heads_of_item(groups=1, heads=16, causal=True, **long_and_short) == 2
    assert heads_of_item(groups=1, heads=16, batch=64, seq=4096) == 16
    assert heads_of_item(groups=16, heads=16, **long_and_short) == 1
    assert heads_of_item(groups=1, heads=16, batch=1, seq=4096) == 4
    assert heads_of_item(groups=1, heads=16, causal=True, batch=1, seq=4096) == 1


@given(
    longest=st.integers(1, 9000), others=st.integers(0, 4000), count=st.integers(0, 100),
    groups=st.sampled_from((1, 2, 4, 8)), heads_per_group=HEADS_PER_GROUP, causal=st.booleans(),
)  # fmt: skip
def test_divided_items_end_sooner(longest, others, count, groups, heads_per_group, causal) -> None:
    """When blocks take items one after another, the last one ends sooner than of whole groups, or
    hardly later: of sequences of which all but the longest are equal."""
    lengths = [longest] + [min(others, longest)] * count
    sizes = sizes_of(lengths, groups, heads_per_group)
    with pytest.MonkeyPatch.context() as patch:
        # What is divided for the sake of L2 may end later here.
        patch.setattr(bwd_division, "SLOWER_BY_MIB", 0.0)
        plan = plan_of(causal=causal, **sizes, most_tokens=sum(lengths))
        if not plan.tiling.adds_keys:
            return
        patch.setattr(bwd_sm90, "divided_ragged_group", lambda *_: None)
        whole = BwdSm90(plan.problem, plan.geometry, HOPPER)
    assert end_of_items(plan, lengths, 2.5) <= 1.1 * end_of_items(whole, lengths, 1.5)


def end_of_items(plan: BwdSm90, lengths: list[int], fixed: float) -> float:
    """When the last one ends, in steps of a query tile."""
    tile_q, tile_k = plan.tiling.tile_q, plan.tiling.tile_k
    heads = plan._params.heads_per_block.number
    causal = plan.geometry.band_right is not None
    ends = [0.0] * HOPPER.multiprocessors
    for _, entry, tile, _ in numbered(plan, lengths):
        first = tile * tile_k // tile_q if causal else 0
        steps = heads * max(0, ceil(lengths[entry] / tile_q) - first)
        heapq.heapreplace(ends, ends[0] + steps + fixed)
    return max(ends)
