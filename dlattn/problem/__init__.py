"""What we know: a problem, its run-time geometry, and the edits and masks it is made of."""

from typing import TYPE_CHECKING

from dlattn.lazy import exports

if TYPE_CHECKING:
    from dlattn.problem.dropout import Dropout as Dropout
    from dlattn.problem.dropout import FlashDropout as FlashDropout
    from dlattn.problem.dropout import GivenMask as GivenMask
    from dlattn.problem.dropout import Philox as Philox
    from dlattn.problem.dropout import StoredSigns as StoredSigns
    from dlattn.problem.dropout import philox_dropout_mask as philox_dropout_mask
    from dlattn.problem.mask import BLOCK as BLOCK
    from dlattn.problem.mask import Band as Band
    from dlattn.problem.mask import BlockMask as BlockMask
    from dlattn.problem.mask import Mask as Mask
    from dlattn.problem.mask import Padding as Padding
    from dlattn.problem.pointwise import POINTWISE as POINTWISE
    from dlattn.problem.pointwise import Arithmetic as Arithmetic
    from dlattn.problem.pointwise import Pointwise as Pointwise
    from dlattn.problem.primitives import evaluate as evaluate
    from dlattn.problem.problem import PAGE_TABLES as PAGE_TABLES
    from dlattn.problem.problem import QUERY_ROLES as QUERY_ROLES
    from dlattn.problem.problem import RAGGED_ROLES as RAGGED_ROLES
    from dlattn.problem.problem import Direction as Direction
    from dlattn.problem.problem import Geometry as Geometry
    from dlattn.problem.problem import Problem as Problem
    from dlattn.problem.problem import TensorSpec as TensorSpec
    from dlattn.problem.problem import cu_seqlens_role as cu_seqlens_role
    from dlattn.problem.problem import offset_role as offset_role
    from dlattn.problem.program import Program as Program
    from dlattn.problem.program import Step as Step
    from dlattn.problem.program import Value as Value
    from dlattn.problem.score import Alibi as Alibi
    from dlattn.problem.score import Bias as Bias
    from dlattn.problem.score import Edit as Edit
    from dlattn.problem.score import Scale as Scale
    from dlattn.problem.score import SoftCap as SoftCap
    from dlattn.problem.score import Stored as Stored
    from dlattn.problem.score import Values as Values
    from dlattn.problem.score import Where as Where
    from dlattn.problem.score import alibi_slopes as alibi_slopes
    from dlattn.problem.score_blocks import ScoreBlocks as ScoreBlocks
    from dlattn.problem.score_blocks import skipped_blocks as skipped_blocks
    from dlattn.problem.score_program import SCORE_GRADIENT_ROLES as SCORE_GRADIENT_ROLES
    from dlattn.problem.score_program import SCORE_MOD_ROLES as SCORE_MOD_ROLES
    from dlattn.problem.score_program import Read as Read
    from dlattn.problem.score_program import ScoreGradient as ScoreGradient
    from dlattn.problem.score_program import ScoreProgram as ScoreProgram

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "dlattn.problem.dropout": """
            Dropout FlashDropout GivenMask Philox StoredSigns philox_dropout_mask
        """,
        "dlattn.problem.mask": "BLOCK Band BlockMask Mask Padding",
        "dlattn.problem.pointwise": "POINTWISE Arithmetic Pointwise",
        "dlattn.problem.primitives": "evaluate",
        "dlattn.problem.problem": """
            PAGE_TABLES QUERY_ROLES RAGGED_ROLES Direction Geometry Problem TensorSpec
            cu_seqlens_role offset_role
        """,
        "dlattn.problem.program": "Program Step Value",
        "dlattn.problem.score": """
            Alibi Bias Edit Scale SoftCap Stored Values Where alibi_slopes
        """,
        "dlattn.problem.score_blocks": "ScoreBlocks skipped_blocks",
        "dlattn.problem.score_program": """
            SCORE_GRADIENT_ROLES SCORE_MOD_ROLES Read ScoreGradient ScoreProgram
        """,
    },
)
