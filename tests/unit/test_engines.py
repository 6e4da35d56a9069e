"""What tests on a GPU of one family of kernels run by others: as little as can be. A family that
refuses what it could do would leave them green, and untested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings

import dlattn
from dlattn.calls.cache import forget_calls
from tests import pairs
from tests.cases import Case
from tests.serial import taken
from tests.strategies import families, for_hopper


@pytest.mark.parametrize(("engine", "backwards"), [("sm90", 18), ("sm80", 28)])
def test_pairs_by_their_family(engine: str, backwards: int) -> None:
    """All forwards of its rows, and all backwards but those that two levels together exclude."""
    found = [taken(engine, case) for case in pairs.cases(pairs.LEFT_BY[engine])]
    assert all(forward for forward, _ in found)
    assert sum(backward for _, backward in found) >= backwards


@pytest.mark.parametrize("engine", pairs.LEFT_BY)
def test_levels_that_a_family_leaves_alone(engine: str) -> None:
    """It refuses each of them, with all else plain: what it takes is left out of no row."""
    for feature, levels in pairs.LEFT_BY[engine].items():
        for level in levels:
            assert not all(taken(engine, pairs.FEATURES[feature][level](pairs.PLAIN)))


@pytest.mark.parametrize("engine", ["sm90", "sm80"])
def test_random_cases_by_their_family(engine: str) -> None:
    """Of random graphs that tests give to a family, most are its own."""
    found: list[bool] = []

    @settings(max_examples=30, derandomize=True, phases=[Phase.generate])
    @given(families("gpu", size=2))
    def look(family: tuple[Case, ...]) -> None:
        for case in family:
            found.extend(taken(engine, for_hopper(case) if engine == "sm90" else case))

    look()
    assert sum(found) >= 0.65 * len(found)


@pytest.mark.parametrize("primitive", [False, True])
def test_an_engine_that_there_is_not(monkeypatch: pytest.MonkeyPatch, primitive: bool) -> None:
    """The error says that the name is unknown, and which are known, of graphs and of functions;
    known ones are told why they do not run it."""
    x = np.ones((1, 4, 2, 8))

    def run() -> None:
        if not primitive:
            dlattn.attention(x, x, x)
            return
        graph = dlattn.pygraph(io_data_type=x.dtype, compute_data_type=x.dtype)
        a = graph.tensor_like(x)
        graph.add(a, a).set_output(True).set_data_type(x.dtype)
        graph.validate()

    for engine, said in (
        ("fwd_sm70", "'fwd_sm70', .* a plan, decode, .*, or a family of them, sm80, sm90"),
        ("sm80", "on reference alone" if primitive else "No plan runs this graph on cpu"),
    ):
        monkeypatch.setenv("DLATTN_ENGINE", engine)
        forget_calls()
        with pytest.raises(dlattn.cudnnGraphNotSupportedError, match=said):
            run()
