"""What the Hopper backward has no tiling for."""

from __future__ import annotations

from dlattn.dtypes import data_type
from dlattn.problem import GivenMask, Problem

#: fp16 probabilities, 2^12 times as large (``raised`` in ``bwd_tile.cuh``), times this stay finite.
MOST_SLOPE = 8


def register_refusal(problem: Problem) -> str | None:
    """What no tiling has registers for, or numbers, or ``None``."""
    widest = problem.head_dim_qk + problem.head_dim_v > 384
    crowded = problem.keeps_scores and problem.adds_to_scores
    reads_to_drop = isinstance(problem.dropout, GivenMask)
    if problem.dtype is data_type.HALF and problem.steepest > MOST_SLOPE:
        return (
            f"nothing tells that a score_mod's derivative is at most {MOST_SLOPE}; of others, "
            "weights may be too large for fp16, to which they are rounded here. bf16 has room."
        )
    if problem.dropout and problem.bends_scores:
        return (
            "dropout marks weights by their signs, which a score_mod may change; one whose "
            "derivative is 1 leaves them."
        )
    if widest and problem.bends_scores and problem.gathers:
        return (
            "a score_mod that reads tensors and bends scores takes more registers than head "
            "dimensions above 384 in sum leave."
        )
    if problem.dropout and problem.has_blocks:
        return "dropout and block_mask together take more registers than its loaders have."
    if widest and problem.dropout and crowded:
        return (
            "dropout beside both a soft cap and a bias or slopes takes more registers than "
            "head dimensions above 384 in sum leave."
        )
    if widest and problem.paged_v and crowded:
        return (
            "pages beside both a soft cap and a bias or slopes take more registers than "
            "head dimensions above 384 in sum leave."
        )
    if reads_to_drop and problem.keeps_scores and (widest or problem.head_dim_v > 192):
        return (
            "dropout by a mask beside a soft cap takes more registers than head dimensions "
            "above 384 in sum, or of v above 192, leave."
        )
    masks = problem.score_blocks is not None and problem.score_blocks.elements
    if widest and problem.has_blocks and (problem.deterministic or problem.adds_to_scores or masks):
        return (
            "head dimensions above 384 in sum leave no registers for block_mask together with "
            "use_deterministic_algorithm, or with a bias or slopes."
        )
    if problem.has_blocks and problem.head_dim_v > 192 and not widest:
        return "head dimensions of v far above those of q leave no registers for block_mask."
    return None
