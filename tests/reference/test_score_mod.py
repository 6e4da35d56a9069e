"""Functions of scores on the reference engine, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn as cudnn
from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.corners import LENGTHS, check_primitives, check_score_mod
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


@pytest.mark.parametrize("check", [check_score_mod, check_primitives])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_corner_of_lengths_beyond_the_tensors(check: Callable[..., None], lengths: str) -> None:
    """Lengths that are more than there are rows mask none, and the corner that is measured from
    them lies beyond the scores."""
    check(Library(), "double", LENGTHS[lengths])


@pytest.mark.parametrize("asked", [cudnn.data_type.NOT_SET, cudnn.data_type.INT64])
def test_selected_numbers_are_whole(asked: cudnn.data_type) -> None:
    """Of documents whose numbers float32 rounds to one, each attends to itself alone, where a
    function has chosen the numbers, too."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 2, 8)).astype(np.float32)
    rows = np.array([2**24, 2**24 + 1], np.int32).reshape(1, 1, 2, 1)
    columns = rows.reshape(1, 1, 1, 2)

    def score_mod(graph: Any, score: Any) -> Any:
        there = graph.cmp_ge(rows_t, graph.tensor_scalar(0))
        chosen = graph.binary_select(rows_t, graph.tensor_scalar(-1), there, asked)
        low = graph.tensor_scalar(float("-inf"))
        return graph.binary_select(score, low, graph.cmp_eq(chosen, columns_t))

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    arrays = (q, k, v, rows, columns)
    *inputs, rows_t, columns_t = tensors = [graph.tensor_like(x) for x in arrays]
    o, _ = graph.sdpa(*inputs, is_inference=True, score_mod=score_mod)
    o.set_output(True)
    graph.build()
    found = np.empty_like(v)
    graph.execute({**dict(zip(tensors, arrays, strict=True)), o: found})
    np.testing.assert_array_equal(found, v)


def test_gradients_are_as_given() -> None:
    """See :func:`tests.score_mod_examples.assert_gradients_are_as_given`."""
    assert_gradients_are_as_given(Library(), "float")
