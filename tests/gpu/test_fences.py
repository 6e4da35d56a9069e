"""Kernels stay inside the memory that they are given: beside each buffer, none is mapped.

A fault ends the process's CUDA context, so that all GPU tests after it fail, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.cases import Case
from tests.drivers import check, run_graph
from tests.fences import FencedLibrary
from tests.strategies import families

pytestmark = pytest.mark.gpu

_RAGGED = ("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV")

#: Sequences of which tiles lie wholly past their ends, of every way to walk tiles.
SHORT = {
    f"{head_dim} {'full' if right is None else 'causal'} {'ragged' if ragged else 'padded'}": Case(
        dtype="float16", batch=3, heads_q=6, heads_k=2, heads_v=2, seq_q=130, seq_kv=300,
        head_dim_qk=head_dim, head_dim_v=head_dim, scale=0.1, right=right, len_q=(0, 31, 130),
        len_kv=(0, 300, 31), ragged=ragged,
    )
    for head_dim in (64, 128, 200)
    for right in (None, 0)
    for ragged in ((), _RAGGED)
} | {
    "a narrow window of many heads": Case(
        batch=2, heads_q=8, heads_k=2, heads_v=2, seq_q=300, seq_kv=300, left=100, right=0,
        head_dim_qk=64, head_dim_v=64, scale=0.1,
    ),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["behind a fence", "before a fence"])
def fenced(request: pytest.FixtureRequest) -> Iterator[FencedLibrary]:
    library = FencedLibrary(request.param)
    yield library
    library.close()


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
def test_short_sequences(case: Case, fenced: FencedLibrary) -> None:
    """Nothing beside the buffers is touched where sequences are empty or end before a tile."""
    check(case, fenced, run_graph)


@pytest.mark.parametrize("at_end", [False, True])
def test_random(at_end: bool) -> None:
    """Nothing beside the buffers of random cases is touched."""

    @settings(settings.get_profile("gpu"))
    @given(families("gpu", size=6))
    def run(family: tuple[Case, ...]) -> None:
        for case in family:
            library = FencedLibrary(at_end)
            check(case, library, run_graph)
            library.close()

    run()
