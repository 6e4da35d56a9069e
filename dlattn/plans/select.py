"""Choosing a plan: the first that supports the problem wins; every refusal is a reason.

A graph that was built before names its plan, and then no other is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.plans.base import Plan
from dlattn.problem import Geometry, Problem
from dlattn.runtime.target import Target

if TYPE_CHECKING:
    from dlattn.plans.interpreter import Interpreter

#: A plan's name, which is its module's, and its class; most specialised first, which is best unless
#: it gives way.
PLANS = {
    "decode": "Decode",
    "fwd_sm90": "FwdSm90",
    "fwd_sm80": "FwdSm80",
    "bwd_sm90": "BwdSm90",
    "bwd_sm80": "BwdSm80",
    "reference": "Reference",
    "chain": "Chain",
}


def plan_named(name: str) -> type[Plan]:
    """The class of a plan of :data:`PLANS`."""
    plan: type[Plan] = getattr(import_module(f"dlattn.plans.{name}"), PLANS[name])
    return plan


def select(
    problem: Problem, geometry: Geometry, target: Target, engine: str | None = None
) -> list[type[Plan]]:
    """The plans that can run a problem, best first.

    Args:
        engine: keep only plans of this name (``fwd_sm80``) or family (``sm80``); ``DLATTN_ENGINE``.

    Raises:
        cudnnGraphNotSupportedError: none can; the message lists every plan's reason. Or the engine
            has no plan's or family's name; it lists these.
    """
    _check_name(engine)
    what = (problem, geometry, target)
    asked = [name for name in PLANS if engine in (None, name, _family(name))]
    supported = [plan for plan in map(plan_named, asked) if plan.supports(*what) is None]
    if len(supported) > 1 and supported[0].gives_way(supported[1].name, *what):
        supported[:2] = supported[1::-1]
    if supported:
        return supported
    refused = f"DLATTN_ENGINE asks for {engine!r}"
    reasons = [f"[{name}: {plan_named(name).supports(*what) or refused}]" for name in PLANS]
    raise cudnnGraphNotSupportedError(f"No plan runs this graph on {target}. {' '.join(reasons)}")


def interpreter(engine: str | None = None) -> type[Interpreter]:
    """What runs programs.

    Raises:
        cudnnGraphNotSupportedError: ``engine``, of ``DLATTN_ENGINE``, is another one, or unknown.
    """
    from dlattn.plans.interpreter import Interpreter

    _check_name(engine)
    if engine not in (None, Interpreter.name):
        raise cudnnGraphNotSupportedError(
            f"Primitive operations that are no attention run on {Interpreter.name} alone, and "
            f"DLATTN_ENGINE asks for {engine!r}; unset it."
        )
    return Interpreter


def _family(name: str) -> str:
    return name.partition("_")[2]


def _check_name(engine: str | None) -> None:
    families = sorted({_family(name) for name in PLANS} - {""})
    if engine not in (None, *PLANS, *families):
        raise cudnnGraphNotSupportedError(
            f"DLATTN_ENGINE is {engine!r}, but expected a plan, {', '.join(PLANS)}, or a family of "
            f"them, {', '.join(families)}; unset it to let dlattn choose."
        )
