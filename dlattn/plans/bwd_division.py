"""Where items of the Hopper backward are divided, so that several add to the same dK and dV.

An item has a tile of keys, and all queries of a group of heads that attend to them. That is too
much where blocks end at different times, or those of a pair work on different heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil

from dlattn.plans.bwd_waves import last_end, next_begin, ragged_wave
from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass

#: Sums of dQ, in MiB, that items at work may add to under a causal mask before L2 loses some; and
#: by how much each MiB more slows all down.
ROOM_FOR_SUMS, SLOWER_BY_MIB = 28.5, 0.009
#: Pairs whose items run beside each other, on average, where each pair has more than blocks.
LEAST_PAIRS = 0.75
#: In a fixed order, how many times as many sums are at work, because items wait for each other; and
#: steps that each part of a group waits for those before it.
MORE_IN_ORDER, TURN_STEPS = 3, 0.9
#: Heads of an item that has a part of a group: larger sums of more cost what fewer additions gain.
MOST_HEADS = 3
#: Steps of a query tile that a part's beginning and end take, and additions to sums.
FIXED_STEPS = 5
#: In how many parts an item is at the most, where all items are fewer than blocks, and where the
#: last ones are; and below which part of the blocks these are few.
MOST_PARTS_OF_FEW, MOST_PARTS, LEAST_LAST = 16, 5, 1 / 4
#: The least part of the whole, where the last ones are few and not, and the fewest steps, that are
#: worth the two operations more; and the fewest where all items are fewer than blocks.
LEAST_GAIN_OF_LAST, LEAST_GAIN, LEAST_STEPS, LEAST_STEPS_OF_FEW = 0.1, 0.008, 8, 3
#: Of parts of groups, steps that an item's beginning and end take, and additions to sums; and in
#: ragged problems, how many times as soon the last item must end, beside the fewest steps.
ITEM_STEPS, SUM_STEPS, LEAST_RAGGED_GAIN = 1.5, 1.0, 1.02
#: Items of all blocks, of so many the estimate is that they end evenly.
MANY_ROUNDS = 4
#: Of parts under a causal mask, steps that sums of dK and dV take to be cleared, added to once more
#: and stored: in any case, and for each tile of 256 columns; that a block takes longer which has
#: several; how many must be gained; and how many parts a block may have.
ROW_STEPS, TILE_STEPS, ROUND_STEPS, LEAST_CAUSAL_STEPS, MOST_ROUNDS = 2.0, 0.05, 1.25, 1, 4


@dataclass(frozen=True)
class Division:
    """Which items are parts, and of what.

    Attributes:
        heads: query heads of each item.
        whole_items: how many items come before those that are in parts, or have parts of groups.
        parts: parts of its queries that each of the others is in.
    """

    heads: int
    whole_items: int
    parts: int = 1


def divided_group(
    problem: Problem,
    geometry: Geometry,
    group: int,
    tiles: tuple[int, int],
    at_once: int,
    sum_bytes: int,
) -> Division | None:
    """Under a causal mask, items of a pair differ in length, and so soon work on different heads,
    whose sums of dQ may not fit L2; and whole groups may be too few items, there, in a window, and
    in a fixed order, in which queries are not divided. By an estimate of when the last item ends.

    Args:
        tiles: queries and keys of a tile.
        at_once: how many items run beside each other.
        sum_bytes: of a head's dQ, in fp32.
    """
    if group == 1 or not _may_divide(problem, geometry, by_heads=True):
        return None
    longest, _ = _sequences(geometry, *tiles)
    causal = geometry.band_right is not None and geometry.band_left is None
    items_of_heads = geometry.heads_q * longest.count * longest.key_tiles
    in_order = problem.deterministic and longest.key_tiles > 1
    if causal and items_of_heads <= at_once and not in_order:
        return None  # divided_causal() may divide queries, too
    full = geometry.band_left is None and geometry.band_right is None
    few = items_of_heads // group <= at_once
    alone = few and longest.key_tiles > 1 and (problem.deterministic or not full)
    if not (causal or alone):
        return None

    beside = at_once * (MORE_IN_ORDER if problem.deterministic else 1) / longest.key_tiles
    beside = max(LEAST_PAIRS, beside)

    # Where blocks have one item, nothing hides the operations more.
    of_sums = few * _steps_of_sums(problem, items_of_heads // group)

    def end(heads: int) -> float:
        items = items_of_heads // heads
        fixed = ITEM_STEPS + (SUM_STEPS if heads < group else 0)
        if problem.deterministic:
            fixed += TURN_STEPS * (group // heads - 1)
        at_work = min(geometry.heads_q * longest.count, heads * beside)
        steps = items * (heads * longest.mean_steps + fixed) * _slowed(at_work * sum_bytes)
        most = max(heads * longest.most_steps + fixed, steps / at_once)
        return most + of_sums * (heads < group)

    heads = min((n for n in _divisors(group) if n <= MOST_HEADS or n == group), key=end)
    if heads == group or (few and end(group) - end(heads) < LEAST_CAUSAL_STEPS):
        return None
    return Division(heads, 0)


def _steps_of_sums(problem: Problem, items: int) -> float:
    """What it takes to clear sums of dK and dV, to add to them once more and to store them."""
    columns = problem.head_dim_qk + problem.head_dim_v
    return ROW_STEPS + TILE_STEPS * items * columns / 256


def _divisors(group: int) -> list[int]:
    return [n for n in range(1, group + 1) if group % n == 0]


def _slowed(sum_bytes: float) -> float:
    """By how much items take longer that add to so many bytes of sums at a time."""
    return 1 + SLOWER_BY_MIB * max(0.0, sum_bytes / 2**20 - ROOM_FOR_SUMS)


def divided_causal(
    problem: Problem,
    geometry: Geometry,
    group: int,
    heads: int,
    tiles: tuple[int, int],
    at_once: int,
) -> Division | None:
    """Items under a causal mask, where they are so few that the longest would end long after the
    others: by when the last one ends, if the block that is free first takes the next.

    Args:
        heads: of an item, all of a group or some.
        tiles: queries and keys of a tile.
        at_once: how many items run beside each other.
    """
    if geometry.band_right is None or geometry.band_left is not None:
        return None
    pairs = geometry.batch * geometry.heads_q // heads
    items = pairs * ceil(geometry.seq_kv / tiles[1])
    # Where there are more items, pairs wait for places of sums: shares that go with no part would
    # never come. And of those that lengths make empty, nobody knows.
    most = at_once if geometry.has_lengths else 2 * at_once
    if items > most or not _may_divide(problem, geometry):
        return None

    steps = _steps_of_key_tiles(geometry, *tiles)
    of_sums = _steps_of_sums(problem, items)

    def costs(divisor: int, parts: int) -> tuple[float, float]:
        """Steps that each part takes more, and all together."""
        divided = heads < group or divisor * parts > 1
        in_rounds = items * divisor * parts > at_once
        fixed = ITEM_STEPS + divided * SUM_STEPS
        return fixed, divided * of_sums + in_rounds * ROUND_STEPS

    def least_end(division: tuple[int, int]) -> float:
        """If blocks shared all steps evenly, or had one part each."""
        divisor, parts = division
        fixed, more = costs(divisor, parts)
        longest = ceil(max(steps) / parts) * heads // divisor
        shared = pairs * (heads * sum(steps) + divisor * parts * len(steps) * fixed) / at_once
        return max(longest + fixed, shared) + more

    def end(division: tuple[int, int]) -> float:
        """If those heads are divided into so many, and each of these into so many parts."""
        divisor, parts = division
        fixed, more = costs(divisor, parts)
        of_parts = (
            (count * (part + 1) // parts - count * part // parts) * heads // divisor + fixed
            for count, _, part in product(steps, range(pairs * divisor), range(parts))
        )
        return last_end(of_parts, at_once) + more

    divisions = [
        (n, parts)
        for n, parts in product(_divisors(heads), range(1, MOST_PARTS_OF_FEW + 1))
        if items * n <= 2 * at_once and items * n * parts <= MOST_ROUNDS * at_once
    ]
    whole = end((1, 1))
    # Of several that end at the same time, the one in the fewest parts of queries.
    best = whole, 1, 1
    for least, (divisor, parts) in sorted((least_end(it), it) for it in divisions):
        if least > best[0]:
            break
        best = min(best, (end((divisor, parts)), parts, divisor))
    ends, parts, divisor = best
    if whole - ends < LEAST_CAUSAL_STEPS:
        return None
    return Division(heads // divisor, 0, parts)


def _steps_of_key_tiles(geometry: Geometry, tile_q: int, tile_k: int) -> list[int]:
    """Tiles of queries that attend to each tile of keys under a causal mask."""
    shift = geometry.seq_kv - geometry.seq_q if geometry.bottom_right else 0
    shift += geometry.band_right or 0
    tiles = ceil(geometry.seq_q / tile_q)
    return [
        max(0, tiles - max(0, first - shift) // tile_q)
        for first in range(0, geometry.seq_kv, tile_k)
    ]


def divided_end(
    problem: Problem, geometry: Geometry, group: int, items: int, at_once: int, steps: int
) -> Division | None:
    """The last items, where they are fewer than blocks: else some would have nothing to do for as
    long as a whole item takes. Under a full mask, where items are equal.

    Args:
        items: how many there are, and how many run beside each other.
        steps: of a query tile, that an item takes.
    """
    last = items % at_once
    # Nobody knows which have keys.
    unknown = geometry.has_lengths and items > last
    equal = geometry.band_left is None and geometry.band_right is None
    if last == 0 or unknown or not equal or not _may_divide(problem, geometry):
        return None

    def end(division: tuple[int, int]) -> float:
        """In items, if a group is divided into so many, and each of these into so many parts."""
        count = division[0] * division[1]
        fixed = FIXED_STEPS / steps if count > 1 else 0.0
        return ceil(last * count / at_once) * (1 / count + fixed)

    divisions = [(1, parts) for parts in range(1, MOST_PARTS + 1)]
    parts_of_few = range(1, min(MOST_PARTS_OF_FEW, steps // group) + 1)
    # All run at once: where pairs wait for places, shares that go with no part never come.
    divisions += [
        (n, parts)
        for n, parts in product(_divisors(group), parts_of_few)
        if items * n * parts <= at_once
    ]
    divisor, parts = min(divisions, key=end)
    gain = end((1, 1)) - end((divisor, parts))
    fewest = LEAST_STEPS if items > last else LEAST_STEPS_OF_FEW
    few = last < LEAST_LAST * min(items, at_once)
    least_gain = LEAST_GAIN_OF_LAST if few else LEAST_GAIN
    if gain < least_gain * (items / at_once) or gain * steps < fewest:
        return None
    return Division(group // divisor, items - last, parts)


def divided_ragged_group(
    problem: Problem,
    geometry: Geometry,
    group: int,
    tiles: tuple[int, int],
    at_once: int,
    sum_bytes: int,
) -> Division | None:
    """Of a ragged problem, where items of whole groups would be too few, or those of the longest
    sequence too long, or sums of dQ too large for L2: by an estimate of when the last item ends.

    Args:
        tiles: queries and keys of a tile.
        at_once: how many items run beside each other.
        sum_bytes: of a head's dQ, in fp32.
    """
    if not _may_divide(problem, geometry):
        return None
    longest, others = _sequences(geometry, *tiles)

    def end(heads: int) -> float:
        groups = geometry.heads_q // heads
        fixed = ITEM_STEPS + (SUM_STEPS if heads < group else 0)
        longest_item = heads * longest.most_steps + fixed
        if not (others.count or longest.differ):
            return ceil(groups * longest.count * longest.key_tiles / at_once) * longest_item
        of_longest, of_others = (
            groups * it.key_tiles * (heads * it.mean_steps + fixed) for it in (longest, others)
        )
        steps = longest.count * of_longest + others.count * of_others
        if longest.differ:
            # Sequences of one tile have next to no sums.
            of_few = groups * longest.count * longest.key_tiles
            at_work = at_once if others.key_tiles > 1 else min(at_once, of_few)
            steps *= _slowed(heads * at_work / longest.key_tiles * sum_bytes)
        shortest = others if others.count else longest
        last_item = heads * shortest.mean_steps + fixed
        # The longest item of the last wave begins when the waves before have been taken.
        width = ragged_wave(groups, at_once, longest.key_tiles)
        waves = ceil(groups / width) - 1
        begins = 0.0
        if longest.differ and waves * width * longest.key_tiles > MANY_ROUNDS * at_once:
            begins = of_longest * waves / (waves + 1) / at_once
        elif longest.differ:
            own = (heads * steps + fixed for steps in longest.steps() for _ in range(width))
            begins = next_begin([*own] * waves, at_once)
        rounds = ceil(groups * sum(it.count * it.key_tiles for it in (longest, others)) / at_once)
        return max(begins + longest_item, steps / at_once + last_item / 2, rounds * last_item)

    heads = min(_divisors(group), key=end)
    ends = end(heads), end(group)
    if ends[0] * LEAST_RAGGED_GAIN > ends[1] or ends[1] - ends[0] < LEAST_STEPS:
        return None
    return Division(heads, 0)


@dataclass(frozen=True)
class _Sequences:
    """Equal sequences of a ragged problem.

    Attributes:
        count: how many.
        key_tiles: items of one, for each group of heads.
        most_steps: tiles of queries that attend to a tile of keys, at the most.
        mean_steps: on average.
    """

    count: int
    key_tiles: int
    most_steps: int
    mean_steps: float

    @property
    def differ(self) -> bool:
        """Whether items of a sequence differ in length."""
        return self.mean_steps < self.most_steps

    def steps(self) -> Iterator[float]:
        """Of each item, where they differ, in their order."""
        tiles = self.key_tiles
        return (self.most_steps * (tiles - tile) / tiles for tile in range(tiles))


def _sequences(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[_Sequences, _Sequences]:
    """The longest ones, and the others. Only the sum of the lengths is known: all but one are taken
    for equal, which is the least work beside the longest one."""
    left, right = geometry.band_left, geometry.band_right
    count = geometry.batch - 1

    def of_rows(count: int, rows_q: int, rows_kv: int) -> _Sequences:
        key_tiles, most = max(1, -(-rows_kv // tile_k)), -(-rows_q // tile_q)
        if left is not None and right is not None:
            most = min(most, -(-(left + right + tile_k) // tile_q) + 1)
            return _Sequences(count, key_tiles, most, most)
        full = left is None and right is None
        mean = most if full else most * (key_tiles + 1) / (2 * key_tiles)
        return _Sequences(count, key_tiles, most, mean)

    def others(most_tokens: int | None, longest: int) -> int:
        if most_tokens is None or count == 0:
            return longest
        return min(longest, max(0, most_tokens - longest) // count)

    longest = geometry.seq_q, geometry.seq_kv
    shorter = tuple(map(others, (geometry.most_tokens_q, geometry.most_tokens_kv), longest))
    if shorter == longest:
        return of_rows(1 + count, *longest), of_rows(0, *longest)
    return of_rows(1, *longest), of_rows(count, *shorter)


def may_divide(problem: Problem) -> bool:
    """Whether items of some sizes of a problem are divided."""
    return not (problem.paged_k or problem.paged_v or problem.has_blocks)


def _may_divide(problem: Problem, geometry: Geometry, *, by_heads: bool = False) -> bool:
    # In a fixed order, items take turns to add by their heads alone.
    unordered = problem.deterministic and not (problem.ragged or by_heads)
    return may_divide(problem) and not unordered and geometry.heads_k == geometry.heads_v
