"""cuDNN's notes on plans: what they do besides computing, and how they compute."""

from __future__ import annotations

from dlattn.graph.vocabulary import behavior_note, numerical_note
from dlattn.plans.base import Plan, Runnable
from dlattn.problem import Direction


def behavior_notes(plan: Runnable) -> set[behavior_note]:
    """CUDA plans are compiled at run time, and those that tell their operations can be added to
    CUDA graphs."""
    if plan.target.kind != "cuda":
        return set()
    notes = {behavior_note.RUNTIME_COMPILATION}
    if type(plan).operations is not Runnable.operations:
        notes.add(behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API)
    return notes


def numerical_notes(plan: Runnable) -> set[numerical_note]:
    """CUDA plans use tensor cores; a backward adds in any order unless asked for a fixed one."""
    if plan.target.kind != "cuda" or not isinstance(plan, Plan):
        return set()
    notes = {numerical_note.TENSOR_CORE}
    if plan.problem.direction is Direction.BACKWARD and not plan.problem.deterministic:
        notes.add(numerical_note.NONDETERMINISTIC)
    return notes
