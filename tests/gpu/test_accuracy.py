"""How far gradients are from the exact ones, beside a plain computation in the same precision.

``pytest tests/gpu/test_accuracy.py --examples 160 --parts 16 -n 16`` draws more cases, side by
side; the tenths of all ratios are printed at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests import oracle, tally
from tests.builders import make_tensors
from tests.cases import Case
from tests.definition import cast
from tests.drivers import gpu_library, run_graph
from tests.noise import noise
from tests.pages import by_sequence
from tests.plain import GRADIENTS, plain_gradients
from tests.strategies import families

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's autograd, which computes what to compare with, says so once.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

#: Of the largest error: at most, to that of a plain computation or to noise, whichever is more; in
#: the median, to the former.
MOST, MEDIAN = 3.0, 1.5


def ratios(case: Case) -> Iterator[tuple[str, float, float]]:
    """Of each gradient the largest error, divided by that of the plain computation; and the same if
    that is more than what roundings of any can reach, else by this: a plain computation may be
    lucky, such as where a row has one key."""
    tensors = make_tensors(case, gpu_library())
    run_graph(case, tensors)
    arrays = by_sequence(case, {role: t.padded() for role, t in tensors.items()})
    exact, plain = oracle.exact(case, arrays), plain_gradients(case, arrays)
    sigma = noise(case, arrays, exact)
    for role in GRADIENTS:
        error, usual = (
            float(abs(cast(x[role], "float64") - exact[role]).max()) for x in (arrays, plain)
        )
        reach = 3**0.5 * float(sigma[role].max())
        if math.isnan(usual):  # of scores that are too large for the type
            usual = math.inf
        else:
            reach = max(usual, reach)
        yield role, error / usual if usual else error and math.inf, error / reach


@pytest.mark.usefixtures("part")
def test_gradients_are_as_exact_as_plain_ones() -> None:
    """Over random cases, a gradient's largest error is at most three times the larger of a plain
    computation's and of what :func:`noise` can reach; and, of those where neither is exact, one
    and a half times a plain computation's in the median."""
    pytest.importorskip("torch")
    if not gpu_library().is_torch:
        pytest.skip("PyTorch has no CUDA")
    found: list[float] = []

    @settings(settings.get_profile("gpu part"))
    @given(families("gpu", size=24, least=12).filter(tally.is_random))
    def measure(family: tuple[Case, ...]) -> None:
        for case in tally.new(family):
            if not case.stats:
                continue
            for role, ratio, of_reach in ratios(case):
                tally.measure(f"{role} of plain or noise", of_reach)
                assert of_reach <= MOST, (
                    f"{role}: {of_reach:.2f} times plain error or noise; {case!r}"
                )
                if 0 < ratio < math.inf:  # neither is exact, and the plain one a number
                    tally.measure(f"{role} of plain", ratio)
                    found.append(ratio)

    measure()
    if not found:
        pytest.skip("no gradient of a case that began in time could be compared")
    assert statistics.median(found) <= MEDIAN
