"""How kernels number items, and share out key tiles and the sums of dQ, by the divisors that plans
give them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from dlattn.plans.argument import Divisor, ItemsRef
from dlattn.plans.bwd_sm90 import BwdSm90
from tests.unit.test_backward_plans import HOPPER, geometry, problem


def quotient(divisor: Divisor, of: int) -> int:
    """As ``cuda_src/base/divisor.cuh`` computes it."""
    return of * divisor.factor >> divisor.shift


def longest_first(index: int, tiles: int, items: ItemsRef, batch: int) -> tuple[int, int, int]:
    """Tile, head and batch entry, as ``cuda_src/attn/schedule.cuh`` finds them."""
    first_pair = quotient(items.of_wave, index) * items.pairs.number
    is_last = first_pair >= items.heads.number * batch - items.pairs.number
    width = items.last_pairs if is_last else items.pairs
    rest = index - first_pair * tiles
    turn = quotient(width, rest)
    pair = first_pair + rest - turn * width.number
    entry = quotient(items.heads, pair)
    return tiles - 1 - turn, pair - entry * items.heads.number, entry


@given(tiles=st.integers(1, 40), heads=st.integers(1, 12), batch=st.integers(1, 8), data=st.data())
def test_each_item_has_one_number(tiles: int, heads: int, batch: int, data: st.DataObject) -> None:
    """Waves of pairs follow each other; in a wave, the last tiles of all its pairs come first."""
    wave = data.draw(st.integers(1, heads * batch))
    items = ItemsRef.of(tiles=tiles, heads=heads, pairs=heads * batch, wave=wave)
    pairs = list(product(range(batch), range(heads)))
    expected = [
        (tile, head, entry)
        for first in range(0, len(pairs), wave)
        for tile in reversed(range(tiles))
        for entry, head in pairs[first : first + wave]
    ]
    found = [longest_first(i, tiles, items, batch) for i in range(len(expected))]
    assert found == expected


@given(
    batch=st.integers(1, 6), groups=st.sampled_from([1, 2, 3, 8]),
    heads_per_group=st.sampled_from([1, 2, 4]), seq_q=st.integers(1, 3000),
    seq_kv=st.integers(1, 3000), causal=st.booleans(),
    head_dim=st.sampled_from([64, 128, 160, 256]), blocks=st.sampled_from([2, 16, 132]),
)  # fmt: skip
def test_each_sum_is_stored_once(
    batch: int, groups: int, heads_per_group: int, seq_q: int, seq_kv: int, causal: bool,
    head_dim: int, blocks: int,
) -> None:  # fmt: skip
    """The shares of a pair's items, those that go with no item in parts, have all of the pair's
    query tiles, each once; whoever takes parts stops behind the last one."""
    heads = groups * heads_per_group
    shape = geometry(batch, groups, heads, seq_q, seq_kv, head_dim, causal=causal)
    plan = BwdSm90(problem(head_dim), shape, replace(HOPPER, multiprocessors=blocks))
    assume(not plan.tiling.relays)  # where nobody adds to sums
    params, cluster = plan._params, plan.tiling.cluster
    shares, key_tiles = params.shares, -(-seq_kv // plan.tiling.tile_k)
    of_pair = params.heads_per_block.number * shares.query_tiles.number
    items = key_tiles * params.items.heads.number * batch

    def part(first: int, last: int, number: int, each: int) -> tuple[int, int]:
        begin = min(first + number * each, last)
        return begin, min(begin + each, last)

    def stored(item: int, block: int, number: int, each: int) -> list[tuple[int, int, int]]:
        tile, group, entry = longest_first(item, key_tiles, params.items, batch)
        share = (key_tiles - 1 - tile) * cluster + block
        whole = part(0, of_pair, share, shares.tiles)
        return [(entry, group, it) for it in range(*part(*whole, number, each))]

    found: Counter[tuple[int, int, int]] = Counter()
    for item, block in product(range(min(items, params.lone_shares)), range(cluster)):
        found.update(stored(item, block, 0, shares.tiles))
    lone_parts, taken = shares.lone_parts.number, 0
    each = -(-shares.tiles // lone_parts)
    while (item := params.lone_shares + taken // lone_parts // cluster) < items:
        found.update(stored(item, taken // lone_parts % cluster, taken % lone_parts, each))
        taken += 1
    of_all = product(range(batch), range(params.items.heads.number), range(of_pair))
    assert found == Counter(of_all)


class KeyShares:
    """Teams' shares of key tiles, as ``Share`` of ``cuda_src/attn/shares.cuh`` finds them."""

    def __init__(self, teams: int, tiles: int) -> None:
        self.each = quotient(Divisor.of(teams), tiles)
        self.longer = tiles - self.each * teams

    def first_place(self, team: int) -> int:
        return team * self.each + min(team, self.longer)

    def team_of(self, tile: int) -> int:
        after = tile - self.longer * (self.each + 1)
        if after < 0:
            return small_quotient(tile, self.each + 1)
        return self.longer + small_quotient(after, self.each)

    def may_exceed(self, other_teams: int, item_tiles: int) -> bool:
        return item_tiles - 2 >= other_teams * self.each


def small_quotient(of: int, by: int, error: int = 0) -> int:
    """As ``cuda_src/base/divisor.cuh`` computes it, whose first guess may be out by one."""
    near = of // by + error
    rest = of - near * by
    return near + (rest >= by) - (rest < 0)


@given(of=st.integers(0, 2**31 - 1), by=st.integers(1, 2**31 - 1), error=st.integers(-1, 1))
def test_a_quotient_that_is_out_by_one_is_put_right(of: int, by: int, error: int) -> None:
    assert small_quotient(of, by, error) == of // by


@given(teams=st.integers(1, 264), tiles=st.integers(1, 3000), data=st.data())
def test_each_key_tile_has_one_team(teams: int, tiles: int, data: st.DataObject) -> None:
    """Teams follow each other, none has two tiles more than another; who has a tile is found; and
    an item that is said to have few teams has no more."""
    shares = KeyShares(teams, tiles)
    firsts = [shares.first_place(team) for team in range(teams + 1)]
    counts = [after - first for first, after in zip(firsts, firsts[1:], strict=False)]
    assert firsts[0] == 0 and firsts[-1] == tiles and max(counts) - min(counts) <= 1
    owners = [team for team, count in enumerate(counts) for _ in range(count)]
    assert [shares.team_of(tile) for tile in range(tiles)] == owners
    first = data.draw(st.integers(0, tiles - 1))
    last = data.draw(st.integers(first, tiles - 1))
    others = owners[last] - owners[first]
    for most in {16, max(0, others - 1), others}:
        assert shares.may_exceed(most, last - first + 1) or others <= most
