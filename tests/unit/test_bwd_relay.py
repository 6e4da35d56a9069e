"""The relay of the Hopper backward: who leaves a part of dQ, who stores it, who waits for whom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.dtypes import data_type
from dlattn.plans.bwd_relay import LEAST_HEADS, relays
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.problem import Band, Geometry, SoftCap, TensorSpec
from tests.unit.test_backward_plans import HOPPER, geometry, problem

#: ``heads_sooner`` of ``bwd_sm90_item.cuh``.
HEADS_SOONER = 3


def window(
    left: int, right: int, seq: int, heads: int = 8, groups: int = 2, head_dim: int = 64
) -> Geometry:
    """Two batch entries."""
    shape = geometry(2, groups, heads, seq, seq, head_dim)
    return replace(shape, band_left=left, band_right=right)


def plan_of(shape: Geometry, head_dim: int = 64, **changed) -> BwdSm90:
    banded = replace(problem(head_dim), **changed)
    masks = (*banded.masks, Band(left=True, right=True))
    return BwdSm90(replace(banded, masks=masks), shape, HOPPER)


def key_tiles(tile: int, shape: Geometry, tile_q: int, tile_k: int) -> range:
    """Those that meet a query tile."""
    seq, first = shape.seq_q, tile * tile_q
    last = min(first + tile_q, seq) - 1
    first_key = max(0, first - shape.band_left + 1)
    return range(first_key // tile_k, min(seq - 1, last + shape.band_right) // tile_k + 1)


@given(
    left=st.integers(1, 300), right=st.integers(0, 300), seq=st.integers(1, 2000),
    tile_q=st.sampled_from([64, 128]),
)  # fmt: skip
def test_at_most_two_items_meet_a_query_tile(left: int, right: int, seq: int, tile_q: int) -> None:
    """Where a relay runs; and it does run where that holds of a sequence of whole tiles."""
    shape = window(left, right, seq)
    met = [len(key_tiles(tile, shape, tile_q, 128)) for tile in range(-(-seq // tile_q))]
    if relays(problem(64), shape, tile_q, 128):
        assert max(met) <= 2
    elif seq >= 1024:
        assert max(met) > 2


@pytest.mark.parametrize(
    "shape, changed",
    [
        (window(128, 0, 999, heads=2 * LEAST_HEADS - 2), {}),
        (replace(window(128, 0, 999), band_right=None), {}),
        (replace(window(128, 0, 999), band_left=None), {}),
        (window(130, 0, 999), {}),
        (replace(geometry(2, 2, 8, 999, 998, 64), band_left=9, band_right=0), {}),
        (window(128, 0, 999), {"edits": (*problem().edits, SoftCap())}),
    ],
)
def test_others_add_to_sums(shape: Geometry, changed: dict) -> None:
    """Few heads, wide bands, unequal lengths and edits have no relay."""
    assert plan_of(window(128, 0, 999)).tiling.relays
    assert not plan_of(shape, **changed).tiling.relays


def test_lengths_have_no_relay() -> None:
    """A query tile beyond the actual length would be nobody's."""
    shape = window(128, 0, 999)
    lengths = TensorSpec("seq_len_q", (2, 1, 1, 1), (1, 1, 1, 1), data_type.INT32)
    tensors = {**shape.tensors, "seq_len_q": lengths}
    assert not plan_of(replace(shape, tensors=tensors)).tiling.relays


@pytest.mark.parametrize(
    "head_dim, seq_kv, is_one",
    [(64, 77, True), (128, 128, True), (128, 129, False), (192, 77, False)],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_one_key_tile_stores_all_of_dq(
    head_dim: int, seq_kv: int, is_one: bool, ragged: bool
) -> None:
    """Where an item has all keys of its queries, nobody adds to sums, and there are none; whatever
    length or mask leaves queries without keys."""
    given = replace(problem(head_dim), ragged=ragged)
    shape = geometry(8, 8, 8, 4096, seq_kv, head_dim)
    plan = BwdSm90(given, shape, HOPPER)
    assert plan.tiling.relays == is_one
    assert (plan._arrays["dq_accum"] == 0) == is_one
    lengths = TensorSpec("seq_len_kv", (8, 1, 1, 1), (1, 1, 1, 1), data_type.INT32)
    causal = replace(geometry(8, 8, 8, seq_kv, seq_kv, head_dim), band_right=0)
    for others in (
        causal,
        replace(shape, tensors={**shape.tensors, "seq_len_kv": lengths}),
        replace(shape, band_right=0),
        replace(causal, band_right=-1),
    ):
        assert BwdSm90(given, others, HOPPER).tiling.relays == is_one


def roles(item: int, plan: BwdSm90, memory: dict, stored: list) -> list[Iterator[bool]]:
    """The writer and the fetcher of an item; they yield whether what they wait for is there."""
    tiling, params, shape = plan.tiling, plan._params, plan.geometry
    tiles_of_pair = -(-shape.seq_kv // tiling.tile_k)
    pair, own = divmod(item, tiles_of_pair)
    query_tiles = range(-(-shape.seq_q // tiling.tile_q))
    met = {t: key_tiles(t, shape, tiling.tile_q, tiling.tile_k) for t in query_tiles}
    heads, place = params.heads_per_block.number, pair % params.dq_places
    before = pair // params.dq_places * heads * len(query_tiles)

    def steps() -> Iterator[tuple[int, int, bool]]:
        for turn in range(heads + HEADS_SOONER):
            for tile in (t for t in query_tiles if own in met[t]):
                ends = met[tile][-1] == own
                head = turn - HEADS_SOONER if ends else turn
                if 0 <= head < heads:
                    yield head, tile, ends

    def writer() -> Iterator[bool]:
        while memory.get(place, 0) < before:
            yield False
        for head, tile, ends in steps():
            if not ends:
                assert (place, head, tile) not in memory
                memory[place, head, tile] = pair
                yield True

    def fetcher() -> Iterator[bool]:
        while memory.get(place, 0) < before:
            yield False
        count = 0
        for head, tile, ends in steps():
            if not ends:
                continue
            count += 1
            if met[tile][0] < own:
                while (place, head, tile) not in memory:
                    yield False
                assert memory.pop((place, head, tile)) == pair
            stored.append((pair, head, tile))
            yield True
        memory[place] = memory.get(place, 0) + count

    return [writer(), fetcher()]


@given(
    left=st.integers(1, 129), seq=st.integers(1, 1500), groups=st.integers(1, 6),
    head_dim=st.sampled_from([64, 128]), blocks=st.integers(1, 12), places=st.integers(1, 4),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_query_tile_is_stored_once(
    left: int, seq: int, groups: int, head_dim: int, blocks: int, places: int, seed: int
) -> None:
    """Whatever block is how fast: nobody waits for ever, no part is overwritten before it was read,
    and all of dQ is stored, however few the blocks and the places."""
    plan = plan_of(window(left, 0, seq, 4 * groups, groups, head_dim), head_dim)
    assume(plan.tiling.relays)
    plan._params.dq_places = min(places, 2 * groups)
    items = iter(range(2 * groups * -(-seq // 128)))
    memory: dict = {}
    stored: list = []
    draw, running, idle = random.Random(seed), [[] for _ in range(blocks)], 0
    while True:
        for block in running:
            if not block and (item := next(items, None)) is not None:
                block += roles(item, plan, memory, stored)
        everyone = [(block, role) for block in running for role in block]
        if not everyone:
            break
        moved = False
        for block, role in draw.sample(everyone, len(everyone)):
            went = next(role, None)
            if went is None:
                block.remove(role)
            moved |= went is not False
        idle = 0 if moved else idle + 1
        assert idle < 2
    tiles = range(-(-seq // plan.tiling.tile_q))
    assert sorted(stored) == [*product(range(2 * groups), range(4), tiles)]
