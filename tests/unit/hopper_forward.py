"""A plan of Hopper's forward, which is not compiled."""

from __future__ import annotations

from dataclasses import replace

from dlattn.dtypes import data_type
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import Band, Direction, Geometry, Padding, Problem, Scale, TensorSpec
from dlattn.runtime.target import KNOWN

HOPPER = KNOWN["sm_90a"]


def plan(
    batch: int = 1, heads_q: int = 16, heads_k: int = 2, seq_q: int = 100, seq_kv: int = 16384,
    head_dim: int = 128, left: int | None = None, right: int | None = None, corner: bool = True,
    multiprocessors: int = HOPPER.multiprocessors, lengths: bool = False,
) -> FwdSm90:  # fmt: skip
    """Of contiguous tensors, with bounds of a band that ends in the bottom right corner, or begins
    in the top left one; and with lengths on the device, if asked for."""

    def spec(role: str, heads: int, rows: int) -> TensorSpec:
        size = (batch, heads, rows, head_dim)
        stride = (heads * rows * head_dim, rows * head_dim, head_dim, 1)
        return TensorSpec(role, size, stride, data_type.HALF)

    tensors = {role: spec(role, heads_k, seq_kv) for role in "kv"}
    tensors |= {role: spec(role, heads_q, seq_q) for role in "qo"}
    if lengths:
        one_each = TensorSpec("", (batch, 1, 1, 1), (1, 1, 1, 1), data_type.INT32)
        names = ("seq_len_q", "seq_len_kv")
        tensors |= {name: replace(one_each, name=name) for name in names}
    bands = (left, right) != (None, None)
    masks = (Padding(), *([Band(left is not None, right is not None)] if bands else []))
    scale = (Scale(positive=True),)
    problem = Problem(Direction.FORWARD, data_type.HALF, head_dim, head_dim, scale, masks)
    geometry = Geometry(tensors, 0.1, left, right, bottom_right=corner)
    return FwdSm90(problem, geometry, replace(HOPPER, multiprocessors=multiprocessors))
