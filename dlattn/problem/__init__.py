"""What we know: a problem, its run-time geometry, and the edits and masks it is made of."""

from dlattn.problem.dropout import Dropout, GivenMask, Philox, philox_dropout_mask
from dlattn.problem.mask import Band, Mask, Padding
from dlattn.problem.problem import Direction, Geometry, Problem, TensorSpec
from dlattn.problem.score import Alibi, Bias, Edit, Scale, SoftCap, Values, Where, alibi_slopes

__all__ = [
    "Alibi",
    "Band",
    "Bias",
    "Direction",
    "Dropout",
    "Edit",
    "Geometry",
    "GivenMask",
    "Mask",
    "Padding",
    "Philox",
    "Problem",
    "Scale",
    "SoftCap",
    "TensorSpec",
    "Values",
    "Where",
    "alibi_slopes",
    "philox_dropout_mask",
]
