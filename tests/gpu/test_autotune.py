"""Plans of every tiling are right on a GPU, and ``autotune`` chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from tests.cases import Case
from tests.cuda_graphs import Pack, Way, run_by
from tests.drivers import check, gpu_library
from tests.gpu.test_cuda_graphs import CASES, Training
from tests.strategies import families

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's autograd, which computes what to compare with, says so once.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


def configured(number: int) -> Way:
    """By the engine and the tiling of this number, counted over all of them, again and again."""

    def run(graph: cudnn.pygraph, pack: Pack, workspace: Any) -> None:
        choices = [
            (engine, {knob.type: setting})
            for engine in range(graph.get_engine_count())
            for knob in graph.get_knobs_for_engine(engine)
            for setting in range(knob.min_value, knob.max_value + 1, knob.stride)
        ] or [(0, {})]
        graph.create_execution_plan(*choices[number % len(choices)])
        index = graph.get_execution_plan_count() - 1
        graph.build_plan_at_index(index)
        size = graph.get_workspace_size_plan_at_index(index)
        scratch = gpu_library().full(size, 0x7F, "uint8") if size else None
        graph.execute_plan_at_index(pack, scratch, index)

    return run


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tilings(case: Case, number: int) -> None:
    """Every way to divide the work gives the same result."""
    check(case, gpu_library(), run_by(configured(number)))


@settings(settings.get_profile("gpu"))
@given(family=families("gpu", size=2), number=st.integers(0, 11))
def test_random(family: tuple[Case, ...], number: int) -> None:
    """So it does for every case."""
    for case in family:
        check(case, gpu_library(), run_by(configured(number)))


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """An empty cache, and what counts the choices that it remembers."""
    monkeypatch.setenv("DLATTN_CACHE_DIR", str(tmp_path))
    return lambda: len([*tmp_path.glob("autotune-*")])


def test_autotune(cache: Callable[[], int]) -> None:
    """Every plan is timed, the fastest runs from then on, and later graphs have it when asked."""
    pair = Training()
    fastest = []
    for (graph, _), pack in zip(pair.graphs, pair.packs(pair.memory), strict=True):
        size = graph.get_autotune_workspace_size()
        scratch = pair.torch.empty(max(16, size), dtype=pair.torch.uint8, device="cuda")
        times = graph.autotune(pack, scratch)
        assert len(times) == graph.get_execution_plan_count() > 1
        assert all(0.5 < us < 1e5 for _, us in times)
        assert [us for _, us in times] == sorted(us for _, us in times)
        print(*(f"{name}: {us:.1f} us" for name, us in times))
        fastest.append(times[0][0])
        graph.execute(pack, scratch)
    pair.check(pair.memory)
    assert cache() == 2
    again = Training([cudnn.heur_mode.AUTOTUNED])
    assert [graph.get_plan_name_at_index(0) for graph, _ in again.graphs] == fastest
