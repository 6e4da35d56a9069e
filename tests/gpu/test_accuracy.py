"""How far gradients are from the exact ones, beside a plain computation in the same precision.

``pytest tests/gpu/test_accuracy.py --examples 160 --parts 16 -n 16`` draws more cases, side by
side; the tenths of all ratios are printed at the end.
"""

from __future__ import annotations

import statistics

import ml_dtypes
import pytest
from hypothesis import given, settings

from tests import oracle, tally
from tests.builders import make_tensors
from tests.cases import Case
from tests.definition import cast
from tests.drivers import gpu_library, run_graph
from tests.pages import by_sequence
from tests.plain import GRADIENTS, plain_gradients
from tests.strategies import families

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's autograd, which computes what to compare with, says so once.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

#: Of the largest error to that of a plain computation: at most, and in the median.
MOST, MEDIAN = 3.0, 1.5


def ratios(case: Case) -> dict[str, float]:
    """The largest error of each gradient, divided by that of the plain computation, or by what
    rounding the exact gradient may cost if that is more."""
    tensors = make_tensors(case, gpu_library())
    run_graph(case, tensors)
    arrays = by_sequence(case, {role: t.padded() for role, t in tensors.items()})
    exact, plain = oracle.exact(case, arrays), plain_gradients(case, arrays)
    found = {}
    for role in GRADIENTS:
        errors = [
            float(abs(cast(x, "float64") - exact[role]).max()) for x in (arrays[role], plain[role])
        ]
        info = ml_dtypes.finfo(case.dtype)
        grain = max(
            float(info.eps) / 2 * float(abs(exact[role]).max()), float(info.smallest_subnormal)
        )
        found[role] = errors[0] / max(errors[1], grain)
    return found


@pytest.mark.usefixtures("part")
def test_gradients_are_as_exact_as_plain_ones() -> None:
    """Over random cases, a gradient's largest error is at most three times a plain computation's,
    and one and a half times in the median."""
    pytest.importorskip("torch")
    if not gpu_library().is_torch:
        pytest.skip("PyTorch has no CUDA")
    found: list[float] = []

    @settings(settings.get_profile("gpu"))
    @given(families("gpu", size=12, least=4))
    def measure(family: tuple[Case, ...]) -> None:
        for case in family:
            if not case.stats:
                continue
            for role, ratio in ratios(case).items():
                assert ratio <= MOST, f"{role}: {ratio:.2f} times a plain error; {case!r}"
                tally.measure(role, ratio)
                found.append(ratio)

    measure()
    assert statistics.median(found) <= MEDIAN
