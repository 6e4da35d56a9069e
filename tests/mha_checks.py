"""Attention written as primitive operations is that of ``sdpa``, and of float64."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from dlattn.problem import Band, Problem
from tests.callers import Caller
from tests.mha import MASKS, Mha, arrays, primitives, sdpa, selected

#: Of results: relative, and of the largest of all.
_TOLERANCES = {
    "float64": (1e-6, 1e-6),
    "float32": (1e-3, 1e-4),
    "float16": (2e-2, 1e-2),
    "bfloat16": (1e-1, 6e-2),
}


def assert_near(dtype: str, expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Within what rounding to a type may do."""
    relative, absolute = _TOLERANCES[dtype]
    most = max(float(abs(x).max()) for x in expected.values())
    for role, x in expected.items():
        np.testing.assert_allclose(got[role], x, relative, absolute * most, err_msg=role)


def with_one_bias(case: Mha, given: dict[str, Any]) -> tuple[Mha, dict[str, Any]]:
    """The same of arrays in which a bias, -inf where it is masked, is all that several tensors
    say."""
    if not case.has_function:
        return case, given
    bias = np.where(selected(case, given), given.get("bias", 0.0), -np.inf).astype(case.numpy)
    others = {role: x for role, x in given.items() if role not in MASKS}
    one = replace(case, bias=(True,) * 4, mask=False, mask_keys=False)
    return one, {**others, "bias": bias}


def widened(case: Mha, made: dict[str, Any]) -> tuple[Mha, dict[str, Any]]:
    """A case of the same numbers in float64, of one bias, and its arrays."""
    floats = {role: x.astype(np.float64) for role, x in made.items() if x.dtype == case.numpy}
    return with_one_bias(replace(case, dtype="float64"), made | floats)


@lru_cache(maxsize=1)
def in_float64(case: Mha) -> Any:
    """What o is in float64 on the CPU, of one bias."""
    return sdpa(*widened(case, arrays(case))).run(Caller("numpy"))["o"]


def as_measured(problem: Any, case: Mha) -> Problem:
    """The problem of ``sdpa``, but that operations measure a corner from lengths as they are."""
    measured = case.bottom_right and bool(case.padding)
    masks = (
        replace(mask, corner_as_given=measured) if isinstance(mask, Band) else mask
        for mask in problem.masks
    )
    return replace(problem, masks=tuple(masks))


def check_mha(case: Mha, caller: Caller) -> None:
    """Fails unless primitives are lowered to the problem of ``sdpa``, and give its very bits; those
    of a function of scores are nearly what one bias is in float64 on the CPU."""
    try:
        given = {role: caller.tensor(x) for role, x in arrays(case).items()}
        wanted, found = sdpa(case, given), primitives(case, given)
        expected, got = wanted.run(caller), found.run(caller)
        problem = found.graph.lowered.problem
        assert isinstance(problem, Problem)
        assert problem == as_measured(wanted.graph.lowered.problem, case)
        assert expected.keys() == got.keys()
        for role, x in expected.items():
            np.testing.assert_array_equal(got[role], x, err_msg=role)
        if case.has_function:
            exact = in_float64(replace(case, softmax="node", stats=False))
            assert_near(case.dtype, {"o": exact}, got)
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


def check_meaning(case: Mha, caller: Caller) -> None:
    """Fails unless the operations one by one, in float64, are what ``sdpa`` computes, in every row
    that attends to something."""
    given = {role: caller.tensor(x) for role, x in arrays(case).items()}
    wanted, found = sdpa(case, given), primitives(case, given, keep_s=True)
    expected, got = wanted.run(caller), found.run(caller)
    assert not isinstance(found.graph.lowered.problem, Problem)
    attends = expected.get("stats")
    attends = np.ones((*case.scores_dim[:3], 1), bool) if attends is None else attends > -1e19
    for role, x in expected.items():
        close = np.isclose(got[role], x, rtol=1e-5 if role != "o" else 1e-11, atol=1e-12)
        assert (close | ~attends).all(), f"{case!r}: {role}"
