"""Kernels of a corner that is measured from lengths as they were given: they know a number more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlattn.plans.cuda import CudaPlan
from dlattn.plans.decode import Decode
from dlattn.problem import Band, Padding, Problem
from tests.compile.problems import (
    FAMILIES,
    complaints,
    is_too_wide,
    plan_for,
    problems,
    sources_of,
)


def as_given(problem: Problem) -> Problem:
    masks = (replace(x, corner_as_given=True) if isinstance(x, Band) else x for x in problem.masks)
    return replace(problem, masks=tuple(masks))


@pytest.mark.parametrize(
    "family, arch", [(family, arch) for family, archs in FAMILIES.items() for arch in archs]
)
def test_no_spills_and_no_warnings(
    family: type[CudaPlan], arch: str, request: pytest.FixtureRequest
) -> None:
    """They have registers for it, with everything else that there may be."""
    step = request.config.getoption("--kernels")
    banded = [
        as_given(problem)
        for problem in problems(family)
        if any(isinstance(x, Band) for x in problem.masks)
        and not (problem.ragged or is_too_wide(problem, arch))
    ]
    # The rest of a problem is what test_kernels.py compiles.
    step *= 8
    first = FAMILIES[family].index(arch) * step // len(FAMILIES[family])
    found = complaints(sources_of(family, banded[first::step], arch), arch)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_others_are_what_they_were(family: type[CudaPlan]) -> None:
    """Kernels of arguments, and of masks without a corner, are told nothing of it."""
    arch = FAMILIES[family][-1]
    told = {
        is_told
        for problem in problems(family)[: 1 if family is Decode else 4]
        for is_told in (
            "CORNER" in source.text for source in plan_for(family, problem, arch).sources()
        )
    }
    assert told == {False}
    causal = next(x for x in problems(family) if x.masks == (Padding(), Band(False, True)))
    sources = plan_for(family, as_given(causal), arch).sources()
    (main,) = (source for source in sources if source.name == f"dlattn_{family.name}")
    assert "#define DLATTN_CORNER_AS_GIVEN" in main.text
