"""Where items of the Hopper backward are divided, so that several add to the same dK and dV.

An item has a tile of keys, and all queries of a group of heads that attend to them. That is too
much where blocks end at different times, or those of a pair work on different heads at a time.
"""

from __future__ import annotations

from math import ceil

from dlattn.problem import Geometry, Problem
from dlattn.records import dataclass

#: Query heads of an item, where several items have a group's.
HEADS = 2
#: Steps of a query tile that a part's beginning and end take, and additions to sums.
FIXED_STEPS = 5
#: In how many parts an item is at the most, and of how many blocks the last items must be for it.
MOST_PARTS, LEAST_LAST = 5, 1 / 4
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

    def end(parts: int) -> float:
        fixed = FIXED_STEPS / steps if parts > 1 else 0.0
        return ceil(last * parts / at_once) * (1 / parts + fixed)

    parts = min(range(1, MOST_PARTS + 1), key=end)
    gain = end(1) - end(parts)
    if gain < LEAST_GAIN * (items / at_once) or gain * steps < LEAST_STEPS:
        return None
    return Division(group, items - last, parts)


def _may_divide(problem: Problem, geometry: Geometry) -> bool:
    apart = problem.ragged or problem.paged_k or problem.paged_v or problem.deterministic
    return not (apart or problem.has_blocks) and geometry.heads_k == geometry.heads_v
