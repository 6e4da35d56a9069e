"""Merging partial states on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from tests.libraries import Library
from tests.states import States, check_states
from tests.strategies import states as random_states


@settings(max_examples=200)
@given(random_states())
def test_numpy(case: States) -> None:
    """Of NumPy arrays, the union of states is that of the definition in float64."""
    check_states(case, Library())


@settings(max_examples=100)
@given(random_states())
def test_torch(case: States) -> None:
    """Of torch tensors, the union of states is that of the definition in float64."""
    check_states(case, Library(pytest.importorskip("torch")))


def test_jax() -> None:
    """Of JAX arrays, the union is JAX arrays."""
    jax = pytest.importorskip("jax")
    o, lse = np.ones((2, 4, 6, 8), np.float32), np.zeros((2, 6, 4), np.float32)
    union, sums = dlattn.merge_states(*map(jax.numpy.asarray, (o, lse, 3 * o, lse)))
    assert isinstance(union, jax.Array) and isinstance(sums, jax.Array)
    np.testing.assert_allclose(np.asarray(union), 2 * o)
    np.testing.assert_allclose(np.asarray(sums), np.full_like(lse, np.log(2)), rtol=1e-6)


def test_float64() -> None:
    """On the CPU, float64 states merge in float64."""
    rng = np.random.default_rng(0)
    o, lse = rng.standard_normal((2, 1, 3, 2, 5)), rng.standard_normal((2, 1, 2, 3))
    union, sums = dlattn.merge_states(o, lse)
    weights = np.exp(lse - np.log(np.exp(lse).sum(axis=0))).swapaxes(-1, -2)[..., None]
    np.testing.assert_allclose(union, (o * weights).sum(axis=0), rtol=1e-14)
    np.testing.assert_allclose(sums, np.log(np.exp(lse).sum(axis=0)), rtol=1e-14, atol=1e-14)


def test_wide_types_among_narrow_ones() -> None:
    """On the CPU, one float64 tensor suffices for arithmetic in float64: log-sum-exps in it keep
    their digits beside outputs in float16."""
    rng = np.random.default_rng(0)
    o, lse = (
        rng.standard_normal((3, 1, 3, 2, 5)).astype(np.float16),
        rng.standard_normal((3, 1, 2, 3)),
    )
    want = np.log(np.exp(lse).sum(axis=0))
    np.testing.assert_allclose(dlattn.merge_states(o, lse)[1], want, rtol=1e-14, atol=1e-14)
    both = dlattn.merge_states(o[0], lse[0], o[1].astype(np.float64), lse[1])[1]
    np.testing.assert_allclose(both, np.logaddexp(lse[0], lse[1]), rtol=1e-14, atol=1e-14)


def test_log_sum_exps_far_apart() -> None:
    """Neither large nor small log-sum-exps overflow or vanish."""
    o = np.ones((1, 1, 1, 4), np.float32)
    for first, second in ((1e30, 1e30), (-1e30, -1e30), (1e30, -1e30), (-700.0, -701.0)):
        lse = [np.full((1, 1, 1), x, np.float32) for x in (first, second)]
        union, sums = dlattn.merge_states(o, lse[0], 2 * o, lse[1])
        share = 1 / (1 + np.exp(min(first - second, 700.0)))
        np.testing.assert_allclose(union, (1 + share) * o, rtol=1e-5)
        np.testing.assert_allclose(sums, np.logaddexp(first, second), rtol=1e-6)


def test_no_number_is_seen() -> None:
    """A log-sum-exp that is no number makes its row none, too."""
    o, lse = np.ones((1, 1, 2, 4), np.float32), np.zeros((1, 2, 1), np.float32)
    bad = lse.copy()
    bad[0, 1] = np.nan
    for states in ((o, lse, o, bad), (o, bad, o, lse)):
        union, sums = dlattn.merge_states(*states)
        assert np.isnan(union[0, 0, 1]).all() and np.isnan(sums[0, 1, 0])
        assert (union[0, 0, 0] == 1).all() and np.isfinite(sums[0, 0, 0])


O = np.zeros((2, 5, 3, 8), np.float16)
LSE = np.zeros((2, 3, 5), np.float32)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one of two": ({"lse2": None}, "o2 and lse2 are given together"),
    "no sums": ({"lse1": None}, "lse1: expected a tensor, got None"),
    "layout": ({"layout": "sbhd"}, "layout: expected one of"),
    "another layout's": ({"layout": "bhsd"}, r"lse1: expected shape \(2, 5, 3\)"),
    "shape": ({"o2": O[:, :4]}, r"o2: expected shape \(2, 5, 3, 8\), .* got \(2, 4, 3, 8\)"),
    "type": ({"o1": O.astype(np.int32)}, "o1: expected elements of HALF or"),
    "type of sums": ({"lse2": LSE.astype(np.float16)}, "lse2: expected elements of FLOAT"),
    "columns": ({"o1": O.repeat(2, axis=3)[..., ::2]}, "o1: expected a stride of 1"),
    "backwards": ({"o1": O[::-1]}, "o1: expected no negative stride"),
    "no tensor": ({"o2": "o"}, "o2: Expected a tensor"),
    "dimensions": ({"o1": O[0, 0]}, "o1: expected the dimensions of layout 'bshd'"),
    "too many": ({"layout": "thd"}, "o1: expected the dimensions of layout 'thd'"),
    "not a pair": ({"out": O}, r"out: expected the pair \(o, lse\)"),
    "type of out": ({"out": (O.astype(np.float32), LSE)}, r"out\[0\]: expected elements of"),
    "shared memory": (
        {"out": (np.broadcast_to(O[:1].copy(), O.shape), LSE)}, r"out\[0\]: it is written to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """What cannot be merged is refused by the argument's name."""
    changes, message = REFUSED[name]
    given = {"o1": O, "lse1": LSE, "o2": O, "lse2": LSE, **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        dlattn.merge_states(**given)


def test_uneven_batches() -> None:
    """Several dimensions that lead must be one in memory."""
    o = np.zeros((4, 3, 5, 3, 8), np.float16)[::2]
    with pytest.raises(cudnnGraphNotSupportedError, match="not evenly spaced"):
        dlattn.merge_states(o, LSE := np.zeros((2, 3, 3, 5), np.float32), o, LSE)


def test_no_rows() -> None:
    """Without rows there is nothing to do."""
    union, sums = dlattn.merge_states(O[:, :0], LSE[..., :0], O[:, :0], LSE[..., :0])
    assert union.shape == (2, 0, 3, 8) and sums.shape == (2, 3, 0)


def test_no_entries() -> None:
    """Of several dimensions that lead, any may be of size 0, whatever strides say then."""
    torch = pytest.importorskip("torch")
    for lead in ((2, 0), (0, 2), (3, 0, 2)):
        o, lse = torch.zeros(*lead, 5, 3, 8), torch.zeros(*lead, 3, 5)
        union, sums = dlattn.merge_states(o, lse, o, lse)
        assert union.shape == o.shape and sums.shape == lse.shape


def test_results_apart_from_each_other() -> None:
    """Each may lie where a state does, but not where the other one does; in every such call."""
    memory = np.zeros(2 * 5 * 3 * 8, np.float32)
    o, lse = memory.reshape(2, 5, 3, 8), np.zeros((2, 3, 5), np.float32)
    first, second = np.ones_like(o), np.zeros_like(lse)
    for _ in range(2):
        dlattn.merge_states(first, second, first, second, out=(o, lse))
        with pytest.raises(InvalidArgumentError, match="out"):
            inside = memory[:30].reshape(2, 3, 5)
            dlattn.merge_states(first, second, first, second, out=(o, inside))
    dlattn.merge_states(o, lse, first, second, out=(o, lse))
