"""How many (batch, head) pairs the Hopper backward takes at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import ceil

#: Pairs of a wave of a ragged problem.
MOST_RAGGED_PAIRS = 8
#: How many key tiles make a pair's items differ; and how wide a wave then is at least, of the
#: wanted width: in narrow ones, sums are waited for that the longest items still add to.
MANY_TILES, LEAST_WIDTH = 9, 0.9


def even_wave(pairs: int, wanted: float, most: int | None = None, least: float = 0.5) -> int:
    """The number of pairs a wave that leaves the fullest one at the end, where long items may be
    fewer than blocks; of several, the nearest to the wanted number.

    Args:
        most: pairs.
        least: of the wanted number; the most is twice as many.
    """
    narrowest = min(pairs, max(1, ceil(least * wanted)))
    widest = max(narrowest, min(ceil(2 * wanted), pairs, most or pairs))

    def emptiest(width: int) -> tuple[float, float]:
        return -pairs % width / width, abs(width - wanted)

    return min(range(narrowest, widest + 1), key=emptiest)


def ragged_wave(groups: int, blocks: int, tiles: int) -> int:
    """How many of a batch entry's groups of heads are taken at a time, in a ragged problem."""
    wanted = min(MOST_RAGGED_PAIRS, max(1, 3 * blocks // (2 * tiles)))
    return even_wave(groups, wanted, MOST_RAGGED_PAIRS)


def pairs_of_causal_waves(pairs: int, tiles: int, blocks: int, wanted: float) -> int:
    """How many pairs are taken at a time, whose key tiles are the shorter the later they come."""
    least = LEAST_WIDTH if tiles >= MANY_TILES else 0.5
    width = even_wave(pairs, wanted, least=least)
    if pairs * tiles > 4 * blocks:
        return width
    # There are so few items that it matters where each ends.
    divisors = (n for n in range(max(1, ceil(least * wanted)), pairs + 1) if pairs % n == 0)
    ends = {n: _end_of_items(pairs, tiles, blocks, n) for n in (width, *divisors)}
    return min(n for n, end in ends.items() if end <= 1.02 * min(ends.values()))


def _end_of_items(pairs: int, tiles: int, blocks: int, pairs_per_wave: int) -> float:
    """When the last item ends, in steps of a tile of queries; an item also begins and ends."""
    return last_end(
        (
            tiles - tile + 1
            for first in range(0, pairs, pairs_per_wave)
            for tile in range(tiles)
            for _ in range(min(pairs_per_wave, pairs - first))
        ),
        blocks,
    )


def last_end(steps: Iterable[float], blocks: int) -> float:
    """When the last of some items ends, if the block that is free first takes the next.

    Args:
        steps: that each takes, in their order.
    """
    return max(_ends(steps, blocks))


def next_begin(steps: Iterable[float], blocks: int) -> float:
    """When an item behind those begins."""
    return min(_ends(steps, blocks))


def _ends(steps: Iterable[float], blocks: int) -> list[float]:
    ends = [0.0] * blocks
    for own in steps:
        heapq.heapreplace(ends, ends[0] + own)
    return ends
