"""The reference engine on a case, without a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlattn.plans.reference import Reference, attention_backward, attention_forward
from dlattn.problem import Direction, offset_role
from dlattn.runtime.target import CPU
from tests.cases import Case
from tests.drivers import (
    BACKWARD,
    FORWARD,
    Tensors,
    dropout_of,
    edits_of,
    forget_dump,
    geometry_of,
    masks_of,
    problem_of,
    run_graph,
    values_of,
)


def run_plan(case: Case, tensors: Tensors) -> None:
    """Runs the reference plan on NumPy tensors; with a function of scores, which only graphs call,
    by a graph."""
    if case.score_mod is not None:
        run_graph(case, tensors)
        return
    for direction, roles in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        if direction is Direction.BACKWARD and not case.stats:
            return
        used = {role: tensors[role] for role in roles if role in tensors}
        if not case.drops:
            used = {role: t for role, t in used.items() if not role.startswith("dropout_")}
        forget_dump(tensors)
        ragged = not set(case.ragged).isdisjoint(used)
        offsets = [name for role in used if (name := offset_role(role)) in tensors]
        used |= {name: tensors[name] for name in offsets}
        plan = Reference(problem_of(case, direction, ragged), geometry_of(case, used), CPU)
        plan.build()
        plan.execute({role: t.tensor.ctypes.data for role, t in used.items()}, 0, 0)


def forward(case: Case, arrays: Mapping[str, Any], compute: Any = np.float64) -> Any:
    """o, stats, score_max and score_sum_exp by the reference engine's function."""
    return attention_forward(
        *(arrays[role] for role in "qkv"),
        edits=edits_of(case),
        masks=masks_of(case),
        values=values_of(case, arrays),
        sink=arrays.get("sink_token"),
        dropout=dropout_of(case),
        compute=compute,
    )


def backward(
    case: Case, arrays: Mapping[str, Any], compute: Any = np.float64, d_bias: Any = None
) -> Any:
    """dQ, dK, dV by the reference engine's functions, from a forward of its own; the gradient of
    the bias is added to ``d_bias``."""
    o, stats, *_ = forward(case, arrays, compute)
    return attention_backward(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        o,
        arrays["dO"],
        stats,
        edits=edits_of(case),
        masks=masks_of(case),
        values=values_of(case, arrays),
        dropout=dropout_of(case),
        d_bias=d_bias,
        compute=compute,
    )
