"""Choosing a plan: the first that supports the problem wins; every refusal is kept as a reason."""

from __future__ import annotations

from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.plans.base import Plan
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.plans.chain import Chain
from dlattn.plans.decode import Decode
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.plans.interpreter import Interpreter
from dlattn.plans.reference import Reference
from dlattn.problem import Geometry, Problem
from dlattn.runtime.target import Target

#: Most specialised first.
PLANS: tuple[type[Plan], ...] = (Decode, FwdSm90, FwdSm80, BwdSm90, BwdSm80, Reference, Chain)


def select(
    problem: Problem, geometry: Geometry, target: Target, engine: str | None = None
) -> list[type[Plan]]:
    """The plans that can run a problem, best first.

    Args:
        engine: keep only plans of this name (``fwd_sm80``) or family (``sm80``); ``DLATTN_ENGINE``.

    Raises:
        cudnnGraphNotSupportedError: none can; the message lists every plan's reason.
    """
    supported: list[type[Plan]] = []
    reasons: list[str] = []
    for plan in PLANS:
        reason = plan.supports(problem, geometry, target)
        if reason is None and engine not in (None, plan.name, plan.name.partition("_")[2]):
            reason = f"DLATTN_ENGINE asks for {engine!r}"
        if reason is None:
            supported.append(plan)
        else:
            reasons.append(f"{plan.name}: {reason}")
    if not supported:
        raise cudnnGraphNotSupportedError(
            f"No plan runs this graph on {target}. " + " ".join(f"[{r}]" for r in reasons)
        )
    return supported


def interpreter(engine: str | None = None) -> type[Interpreter]:
    """What runs programs.

    Raises:
        cudnnGraphNotSupportedError: ``engine``, of ``DLATTN_ENGINE``, is another one.
    """
    if engine not in (None, Interpreter.name):
        raise cudnnGraphNotSupportedError(
            f"Primitive operations that are no attention run on {Interpreter.name} alone, and "
            f"DLATTN_ENGINE asks for {engine!r}; unset it."
        )
    return Interpreter
