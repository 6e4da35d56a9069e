"""Functions of scores on the reference engine, against the oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.drivers import check, run_graph
from tests.libraries import Library
from tests.score_mod_examples import assert_gradients_are_as_given, examples
from tests.strategies import cases

EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    """Every function is right with everything that it may meet."""
    check(EXAMPLES[name], Library(), run_graph)


@settings(max_examples=150)
@given(cases().filter(lambda case: case.score_mod is not None))
def test_random(case: Case) -> None:
    """Random functions are right in random calls, forward and backward."""
    check(case, Library(), run_graph)


def test_corner_that_only_offsets_tell() -> None:
    """Of ragged tensors the sizes do not say where the bottom right corner is: a diagonal that
    would be there by the sizes is none of lengths (found by chance)."""
    ragged = (*RAGGED_Q, *RAGGED_KV)
    mask = ("logical_not", ("cmp_ge", "row", "col"))
    case = Case(
        batch=3, seq_q=2, seq_kv=7, left=1, right=0, bottom_right=True, len_kv=(7, 7, 1),
        ragged=ragged, lengths_as="offsets", score_mod=("s", mask),
    )  # fmt: skip
    check(case, Library(), run_graph)


def test_corner_of_one_length() -> None:
    """Where lengths of queries are given alone, the corner is where the last key is, whatever a
    function masks."""
    mask = ("cmp_lt", "col", "limit_k")
    case = Case(
        batch=2, seq_q=5, seq_kv=9, right=0, bottom_right=True, len_q=(5, 3), score_mod=("s", mask)
    )
    check(case, Library(), run_graph)


def test_gradients_are_as_given() -> None:
    """See :func:`tests.score_mod_examples.assert_gradients_are_as_given`."""
    assert_gradients_are_as_given(Library(), "float")
