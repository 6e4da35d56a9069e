"""Few queries on Hopper: by the decode, or by the forward, whose tiles their rows may fill."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dlattn.plans.decode_tiling import (
    LONG_KEYS,
    MOST_BOX_ROWS,
    MOST_CLUSTER_ROWS,
    MOST_QUERIES,
    cluster_of,
    items_of,
    rows_of,
)
from dlattn.plans.select import plan_named
from dlattn.problem import Geometry, Problem
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.plans.decode import Decode
    from dlattn.plans.fwd_sm90 import FwdSm90

#: Heads whose queries, 16 or fewer, fill a tile of the forward.
_MOST_HEADS_OF_TILE = 8

#: Items of a multiprocessor from which on those of many keys are shared by so few blocks that their
#: parts cost little; and keys that each has, of so many heads side by side, from which on they cost
#: little beside those.
_HARDLY_SHARED, _LONG_PARTS, _HEADS_BESIDE = 0.45, 1900, 8


def _may_fill_tiles(problem: Problem, target: Target) -> bool:
    """Whether Hopper's forward is faster at some sizes."""
    return target.capability == (9, 0) and not problem.has_bias


def fills_tiles(problem: Problem, geometry: Geometry, target: Target) -> bool:
    """Whether it is at these, of so many rows: the parts of an item that is shared meet in one
    block, which takes the longer the more rows they have. A tile of the forward must have all heads
    that share keys."""
    has_all = geometry.heads_together <= _MOST_HEADS_OF_TILE
    if not (_may_fill_tiles(problem, target) and has_all and rows_of(geometry) > MOST_BOX_ROWS):
        return False
    if rows_of(geometry) > MOST_CLUSTER_ROWS:
        return True
    items = items_of(geometry) / target.multiprocessors
    beside = geometry.heads_q // geometry.heads_together >= _HEADS_BESIDE
    long_parts = beside and items * geometry.seq_kv >= _LONG_PARTS
    has_long, has_many = geometry.seq_kv >= LONG_KEYS, items >= _HARDLY_SHARED
    # Where the device alone knows lengths, the forward takes longer to begin.
    begins_late = (geometry.has_lengths or problem.ragged) and not (has_long or has_many)
    clusters = not problem.ragged and cluster_of(geometry, target) > 0
    return not (has_long and (has_many or long_parts) or begins_late or clusters)


def kernels_of_other(plan: Decode | FwdSm90, name: str) -> list[KernelSource]:
    """Those of the plan of this name, which is faster at other numbers of few queries, or of heads
    that share keys."""
    what = plan.problem, plan.geometry, plan.target
    kind = cast("type[Decode | FwdSm90]", plan_named(name))
    few = plan.geometry.seq_q <= MOST_QUERIES and _may_fill_tiles(plan.problem, plan.target)
    if not few or kind.supports(*what) is not None:
        return []
    other = kind(*what)
    return [*other.sources(), *other.other_tilings()]
