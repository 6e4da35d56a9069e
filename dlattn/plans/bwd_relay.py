"""Where the Hopper backward's items relay dQ (``cuda_src/kernels/bwd_sm90_relay.cuh``)."""

from __future__ import annotations

from dlattn.problem import Geometry, Problem, Scale

#: In a window, with fewer heads an item, it would wait for the part of the item before.
LEAST_HEADS = 4


def may_relay(problem: Problem) -> bool:
    """Whether items of some sizes of a problem do."""
    others = problem.paged_k or problem.paged_v or problem.has_blocks
    others = others or any(it.left and not it.right for it in problem.bands)
    return not (others or problem.edits != (Scale(positive=True),) or problem.dropout)


def relays(problem: Problem, geometry: Geometry, tile_q: int, tile_k: int) -> bool:
    """Whether one key tile has all keys of its queries, or those of each packed sequence; or
    every query has a key and at most two key tiles meet a query tile, in a narrow window whose
    keys several heads share."""
    if not may_relay(problem) or geometry.heads_k != geometry.heads_v:
        return False
    if 0 < geometry.seq_kv <= tile_k:
        return True
    left, right = geometry.band_left, geometry.band_right
    if problem.ragged or geometry.has_lengths or geometry.seq_q != geometry.seq_kv:
        return False
    if left is None or right is None or left < 1 or right < 0:
        return False
    if geometry.heads_q < LEAST_HEADS * geometry.heads_k:
        return False
    tiles = range(0, tile_k, tile_q)
    return all(
        (first + tile_q - 1 + right) // tile_k - (first + 1 - left) // tile_k <= 1
        for first in tiles
    )
