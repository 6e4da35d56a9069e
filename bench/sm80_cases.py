"""The shapes on which the portable engine is measured and tuned, and how its plans are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlattn.dtypes import data_type, from_any
from dlattn.plans.cuda import CudaPlan
from dlattn.problem import Band, Direction, Geometry, Padding, Problem, Scale, TensorSpec
from dlattn.runtime.target import cuda_target

TOKENS, HIDDEN = 16384, 2048
#: Lengths of sequences, unless told otherwise.
SEQS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Shape:
    """One dense self-attention; BSHD storage."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} h{self.heads} s{self.seq} d{self.head_dim} {mask}"

    def flops(self, direction: Direction) -> float:
        """Of the attended area only: 2 products forward, 5 backward."""
        area = self.batch * self.heads * self.seq**2 * (0.5 if self.causal else 1.0)
        return (4 if direction is Direction.FORWARD else 10) * area * self.head_dim


def shapes(head_dims: tuple[int, ...] = (64, 128), seqs: Sequence[int] = SEQS) -> list[Shape]:
    """16k tokens of width 2048, in sequences of these lengths."""
    return [
        Shape(TOKENS // seq, HIDDEN // head_dim, seq, head_dim, causal)
        for head_dim in head_dims
        for seq in seqs
        for causal in (True, False)
    ]


def make_tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random q k v dO and buffers for everything else, by role."""

    def bshd() -> torch.Tensor:
        size = (shape.batch, shape.seq, shape.heads, shape.head_dim)
        return torch.randn(size, device="cuda", dtype=dtype).transpose(1, 2)

    tensors = {role: bshd() for role in ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")}
    stats = torch.empty(shape.batch, shape.heads, shape.seq, 1, device="cuda")
    return {**tensors, "stats": stats}


def prepare(
    plan_class: type[CudaPlan], shape: Shape, tensors: dict[str, torch.Tensor], tiling: Any = None
) -> Callable[[], None]:
    """A built plan as a call without arguments, on torch's current stream."""
    direction = Direction.FORWARD if plan_class.name.startswith("fwd") else Direction.BACKWARD
    roles = ("q", "k", "v", "o", "stats")
    if direction is Direction.BACKWARD:
        roles += ("dO", "dQ", "dK", "dV")
    specs = {
        role: TensorSpec(role, tuple(t.shape), tuple(t.stride()), from_any(t.dtype))
        for role, t in tensors.items()
        if role in roles
    }
    problem = Problem(
        direction,
        specs["q"].dtype,
        shape.head_dim,
        shape.head_dim,
        (Scale(positive=True),),
        (Padding(), Band(left=False, right=True)) if shape.causal else (Padding(),),
        data_type.FLOAT,
    )
    geometry = Geometry(specs, shape.head_dim**-0.5, band_right=0 if shape.causal else None)
    plan = plan_class(problem, geometry, cuda_target(torch.cuda.current_device()), tiling)
    plan.build()
    workspace = torch.empty(max(1, plan.workspace_size), device="cuda", dtype=torch.uint8)
    pointers = {role: tensors[role].data_ptr() for role in specs}
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> None:
        plan.execute(pointers, workspace.data_ptr(), stream)

    return call
