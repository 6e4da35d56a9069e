"""Where items of the Hopper backward are divided, so that several add to the same dK and dV.

An item has a tile of keys, and all queries of a group of heads that attend to them. That is too
much where blocks end at different times, or those of a pair work on different heads at a time.
"""

from __future__ import annotations

from itertools import product
from math import ceil

from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass

#: Query heads of an item, where several items have a group's.
HEADS = 2
#: Steps of a query tile that a part's beginning and end take, and additions to sums.
FIXED_STEPS = 5
#: In how many parts an item is at the most, and of how many blocks the last items must be for it.
MOST_PARTS, LEAST_LAST = 5, 1 / 4
#: Whether items that are fewer than blocks may have some of a group's heads, too; and their parts
#: at the most. The kernels are those of other items; not yet run so (``bench/NOTES.md``).
DIVIDES_FEW, MOST_PARTS_OF_FEW = False, 16
#: The least part of the whole, and the fewest steps, that are worth the two operations more.
LEAST_GAIN, LEAST_STEPS = 0.008, 8


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


def divided_group(problem: Problem, geometry: Geometry, group: int) -> Division | None:
    """Under a causal mask, items of a pair differ in length, and so soon work on different heads,
    whose sums of dQ then do not fit L2."""
    causal = geometry.band_right is not None and geometry.band_left is None
    if not causal or group == HEADS or group % HEADS or not _may_divide(problem, geometry):
        return None
    return Division(HEADS, 0)


def divided_end(
    problem: Problem, geometry: Geometry, group: int, items: int, at_once: int, steps: int
) -> Division | None:
    """The last items, where they are fewer than blocks: else some would have nothing to do for as
    long as a whole item takes. Of items that are all equally long.

    Args:
        items: how many there are, and how many run beside each other.
        steps: of a query tile, that an item takes.
    """
    last = items % at_once
    few = last < LEAST_LAST * min(items, at_once)
    if geometry.band_right is not None or few or not _may_divide(problem, geometry):
        return None

    def end(division: tuple[int, int]) -> float:
        """In items, if a group is divided into so many, and each of these into so many parts."""
        count = division[0] * division[1]
        fixed = FIXED_STEPS / steps if count > 1 else 0.0
        return ceil(last * count / at_once) * (1 / count + fixed)

    divisions = [(1, parts) for parts in range(1, MOST_PARTS + 1)]
    if DIVIDES_FEW:
        divisors = [n for n in range(1, group + 1) if group % n == 0]
        parts_of_few = range(1, min(MOST_PARTS_OF_FEW, steps // group) + 1)
        # All run at once: where pairs wait for places, shares that go with no part never come.
        divisions += [
            (n, parts)
            for n, parts in product(divisors, parts_of_few)
            if items * n * parts <= at_once
        ]
    divisor, parts = min(divisions, key=end)
    gain = end((1, 1)) - end((divisor, parts))
    if gain < LEAST_GAIN * (items / at_once) or gain * steps < LEAST_STEPS:
        return None
    return Division(group // divisor, items - last, parts)


def _may_divide(problem: Problem, geometry: Geometry) -> bool:
    apart = problem.ragged or problem.paged_k or problem.paged_v or problem.deterministic
    return not (apart or problem.has_blocks) and geometry.heads_k == geometry.heads_v
