"""What we know: a problem, its run-time geometry, and the edits and masks it is made of."""

from dlattn.problem.dropout import (
    Dropout,
    FlashDropout,
    GivenMask,
    Philox,
    StoredSigns,
    philox_dropout_mask,
)
from dlattn.problem.mask import BLOCK, Band, BlockMask, Mask, Padding
from dlattn.problem.pointwise import POINTWISE, Arithmetic, Pointwise
from dlattn.problem.primitives import evaluate
from dlattn.problem.problem import (
    PAGE_TABLES,
    QUERY_ROLES,
    RAGGED_ROLES,
    Direction,
    Geometry,
    Problem,
    TensorSpec,
    cu_seqlens_role,
    offset_role,
)
from dlattn.problem.program import Program, Step, Value
from dlattn.problem.score import (
    Alibi,
    Bias,
    Edit,
    Scale,
    SoftCap,
    Stored,
    Values,
    Where,
    alibi_slopes,
)
from dlattn.problem.score_blocks import ScoreBlocks, skipped_blocks
from dlattn.problem.score_program import SCORE_MOD_ROLES, Read, ScoreProgram

__all__ = [
    "BLOCK",
    "PAGE_TABLES",
    "POINTWISE",
    "QUERY_ROLES",
    "RAGGED_ROLES",
    "SCORE_MOD_ROLES",
    "Alibi",
    "Arithmetic",
    "Band",
    "Bias",
    "BlockMask",
    "Direction",
    "Dropout",
    "Edit",
    "FlashDropout",
    "Geometry",
    "GivenMask",
    "Mask",
    "Padding",
    "Philox",
    "Pointwise",
    "Problem",
    "Program",
    "Read",
    "Scale",
    "ScoreBlocks",
    "ScoreProgram",
    "SoftCap",
    "Step",
    "Stored",
    "StoredSigns",
    "TensorSpec",
    "Value",
    "Values",
    "Where",
    "alibi_slopes",
    "cu_seqlens_role",
    "evaluate",
    "offset_role",
    "philox_dropout_mask",
    "skipped_blocks",
]
