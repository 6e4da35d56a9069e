"""Valid graphs, whose parts a test may change before it validates them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import dlattn as cudnn
from dlattn.plans.select import select
from dlattn.runtime.target import CPU, KNOWN

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT

Q, K, V = (2, 4, 8, 16), (2, 2, 12, 16), (2, 1, 12, 24)
OUT, STATS = (2, 4, 8, 24), (2, 4, 8, 1)


def row_major(dim):
    return tuple(int(np.prod(dim[axis + 1 :])) for axis in range(len(dim)))


def bshd(dim):
    b, h, s, d = dim
    return (s * h * d, d, h * d, 1)


class Forward:
    """A valid forward graph, whose parts a test may change before it validates."""

    def __init__(self, stride=row_major, **types):
        self.graph = cudnn.pygraph(
            io_data_type=HALF, handle=cudnn.create_handle(device="cpu"), **types
        )
        self.q, self.k, self.v = (
            self.graph.tensor(dim, stride(dim), name=name)
            for name, dim in zip("qkv", (Q, K, V), strict=True)
        )

    def sdpa(self, generate_stats=True, **arguments):
        self.o, self.stats = self.graph.sdpa(
            self.q, self.k, self.v, generate_stats=generate_stats, name="sdpa", **arguments
        )
        self.o.set_output(True)
        return self

    def validate(self):
        self.graph.validate()
        return self


class Backward(Forward):
    """A valid backward graph, likewise."""

    def sdpa(self, **arguments):
        made = [self.graph.tensor(dim, name=n) for n, dim in (("o", OUT), ("dO", OUT))]
        self.stats = self.graph.tensor(STATS, name="stats", data_type=FLOAT)
        self.gradients = self.graph.sdpa_backward(
            self.q, self.k, self.v, *made, self.stats, name="bwd", **arguments
        )
        for gradient in self.gradients:
            gradient.set_output(True)
        return self


def lengths(graph, name="seq_len", dim=(2, 1, 1, 1), **attributes):
    return graph.tensor(dim, name=name, **{"data_type": cudnn.data_type.INT32, **attributes})


def plans(arch, head_dim_qk, head_dim_v, *, backward=False, dtype=HALF):
    """The names of the plans that take a problem, best first."""
    graph = cudnn.pygraph(io_data_type=dtype, handle=cudnn.create_handle(device="cpu"))
    q, k = (graph.tensor((2, 4, 64, head_dim_qk), name=name) for name in "qk")
    v, o, dO = (graph.tensor((2, 4, 64, head_dim_v), name=name) for name in ("v", "o", "dO"))
    if backward:
        stats = graph.tensor((2, 4, 64, 1), data_type=FLOAT)
        outputs = graph.sdpa_backward(q, k, v, o, dO, stats)
    else:
        outputs = graph.sdpa(q, k, v, generate_stats=False)[:1]
    for output in outputs:
        output.set_output(True)
    lowered = graph.lowered
    known = {"cpu": CPU, "sm_75": replace(KNOWN["sm_80"], capability=(7, 5)), **KNOWN}
    return [plan.name for plan in select(lowered.problem, lowered.geometry, known[arch])]
