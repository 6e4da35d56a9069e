"""Plans one after another, where a graph does not hold what kernels need in between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from dlattn.dtypes import data_type, itemsize
from dlattn.plans.base import Plan
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.reference import Reference
from dlattn.problem import (
    SCORE_GRADIENT_ROLES,
    Direction,
    Geometry,
    Problem,
    ScoreBlocks,
    ScoreProgram,
    TensorSpec,
)
from dlattn.records import dataclass
from dlattn.runtime.launch import Operation
from dlattn.runtime.target import Target

#: What may be a link, most specialised first.
_KINDS: tuple[type[Plan], ...] = (FwdSm90, FwdSm80, BwdSm90, BwdSm80, Reference)

#: Where tensors and workspaces begin in the workspace: at multiples of so many bytes.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Link:
    """One of the problems that a chain solves."""

    problem: Problem
    geometry: Geometry

    def choose(self, target: Target) -> type[Plan] | str:
        """The first plan that can run it, or why none can."""
        reasons = []
        for kind in _KINDS:
            reason = kind.supports(self.problem, self.geometry, target)
            if reason is None:
                return kind
            reasons.append(f"{kind.name}: {reason}")
        return " ".join(reasons)


def links(problem: Problem, geometry: Geometry) -> list[Link]:
    """What is to be run one after another; nothing where one plan has all that it needs.

    A forward that writes probabilities makes them from statistics, whether these are wanted or
    not. A backward without o computes it first; of probabilities that a forward stored, which come
    without statistics, these, too, and o without dropout's scale, so that the numbers of a graph
    need not be inverted.
    """
    tensors, double = geometry.tensors, data_type.DOUBLE in (problem.dtype, problem.compute)
    batch, heads, seq_q, _ = tensors["q"].dim
    row_type = data_type.DOUBLE if double else data_type.FLOAT
    stats = _packed("stats", (batch, heads, seq_q, 1), row_type)
    if problem.direction is Direction.FORWARD:
        if "debug_softmax" not in tensors or problem.stats is not None:
            return []
        whole = replace(geometry, tensors={**tensors, "stats": stats})
        return [Link(replace(problem, stats=row_type), whole)]
    if "o" in tensors:
        return []
    made = {"o": _packed("o", (batch, heads, seq_q, problem.head_dim_v), problem.dtype)}
    unread = ["stats", "dO", "dQ", "dK", "dV", "dBias", "dropout_scale_inv", "rng_dump"]
    unread += SCORE_GRADIENT_ROLES
    scale = geometry.dropout_scale
    if "stats" not in tensors:
        made["stats"] = stats
        unread.append("dropout_scale")
        scale = 1.0
    given = {role: spec for role, spec in tensors.items() if role not in unread}
    forward = replace(
        _without_slopes(problem),
        direction=Direction.FORWARD,
        stats=row_type if "stats" in made else None,
        d_bias=None,
        score_gradients=(),
        deterministic=False,
    )
    return [
        Link(forward, replace(geometry, tensors=given | made, dropout_scale=scale)),
        Link(
            replace(problem, stats=problem.stats or row_type),
            replace(geometry, tensors={**tensors, **made}),
        ),
    ]


def _without_slopes(problem: Problem) -> Problem:
    """With functions of scores as a forward has them."""
    edits = (it.of_forward if isinstance(it, ScoreProgram) else it for it in problem.edits)
    masks = (
        replace(it, program=it.program.of_forward) if isinstance(it, ScoreBlocks) else it
        for it in problem.masks
    )
    return replace(problem, edits=tuple(edits), masks=tuple(masks))


def _packed(name: str, dim: tuple[int, ...], dtype: data_type) -> TensorSpec:
    stride = tuple(math.prod(dim[axis + 1 :]) for axis in range(4))
    return TensorSpec(name, dim, stride, dtype)


class Chain(Plan):
    """Runs its links in order; what one leaves for the next, and the workspace that they share, are
    in the workspace."""

    name = "chain"

    def __init__(self, problem: Problem, geometry: Geometry, target: Target) -> None:
        super().__init__(problem, geometry, target)
        chosen = ((link, link.choose(target)) for link in links(problem, geometry))
        self.plans: list[Any] = [
            kind(link.problem, link.geometry, target)
            for link, kind in chosen
            if not isinstance(kind, str)
        ]

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        chain = links(problem, geometry)
        if not chain:
            return "it joins plans for graphs that lack what one needs; this graph lacks nothing."
        chosen = (link.choose(target) for link in chain)
        return next((reason for reason in chosen if isinstance(reason, str)), None)

    @cached_property
    def _places(self) -> dict[str, int]:
        """Where in the workspace is what no graph holds; the links' own workspace has no role."""
        places, end = {}, 0
        for plan in self.plans:
            for role, spec in plan.geometry.tensors.items():
                if role not in self.geometry.tensors and role not in places:
                    places[role] = end
                    size = math.prod(spec.dim) * itemsize(spec.dtype)
                    end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return {**places, "": end}

    @cached_property
    def workspace_size(self) -> int:
        # A workspace begins at a multiple of 16 bytes.
        return _ALIGNMENT + self._places[""] + max(plan.workspace_size for plan in self.plans)

    def build(self) -> None:
        for plan in self.plans:
            plan.build()

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        for plan, its, scratch in self._calls(pointers, workspace):
            plan.execute(its, scratch, stream)

    @contextmanager
    def operations(
        self, pointers: Mapping[str, int], workspace: int
    ) -> Iterator[Sequence[Operation]]:
        with ExitStack() as plans:
            calls = self._calls(pointers, workspace)
            each = [
                plans.enter_context(plan.operations(its, scratch)) for plan, its, scratch in calls
            ]
            yield [operation for operations in each for operation in operations]

    def _calls(
        self, pointers: Mapping[str, int], workspace: int
    ) -> Iterator[tuple[Any, dict[str, int], int]]:
        """Each plan, its addresses, and its workspace."""
        first = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        made = {role: first + place for role, place in self._places.items()}
        for plan in self.plans:
            its = {role: pointers.get(role) or made[role] for role in plan.geometry.tensors}
            yield plan, its, made[""]
