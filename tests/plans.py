"""Plans of a test's own in the place of dlattn's, and dlattn's as classes."""

from __future__ import annotations

import pytest

from dlattn.plans import select as selection
from dlattn.plans.base import Plan

#: Most specialised first.
ALL = tuple(map(selection.plan_named, selection.PLANS))


def put_plans(monkeypatch: pytest.MonkeyPatch, *plans: type[Plan]) -> None:
    """From now on these are all plans, the best first."""
    kinds = {plan.name: plan for plan in plans}
    monkeypatch.setattr(selection, "PLANS", {name: it.__name__ for name, it in kinds.items()})
    monkeypatch.setattr(selection, "plan_named", kinds.__getitem__)
