"""``debug_softmax``: a forward's probabilities before dropout, signed where it drops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dlattn
from tests import oracle
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import run_graph
from tests.libraries import Library
from tests.unit.valid_graphs import FLOAT, HALF, Forward

CASE = Case(
    dtype="float64", stats="float64", batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=140,
    seq_kv=50, head_dim_qk=16, head_dim_v=8, scale=0.3, dropout=0.4, dropout_algorithm="flash",
    debug_softmax=True, right=3, bottom_right=True, len_q=(140, 9), len_kv=(33, 50),
)  # fmt: skip


def run(case: Case) -> dict[str, np.ndarray]:
    tensors = make_tensors(case, Library())
    run_graph(case, tensors)
    return {role: t.tensor.copy() for role, t in tensors.items()}


@pytest.mark.parametrize("dropout", [0.4, "bool"])
def test_it_makes_the_output(dropout: float | str) -> None:
    """What is not negative, scaled and times v, is o; magnitudes of a row are 1 in sum."""
    case = replace(CASE, dropout=dropout)
    arrays = run(case)
    signed = arrays["debug_softmax"][:, :, :140, :50]
    v = np.nan_to_num(arrays["v"]).repeat(2, axis=1)
    made = np.maximum(signed, 0) * case.dropout_scale() @ v
    assert abs(made - arrays["o"]).max() < 1e-12
    sums, alive = abs(signed).sum(-1), np.isfinite(arrays["stats"][..., 0])
    assert abs(sums[alive] - 1).max() < 1e-12 and not sums[~alive].any()
    assert 0 < alive.mean() < 1


def test_signs_are_those_of_the_mask() -> None:
    """At every position, attended or not; what is beyond the sequences is +0."""
    signed = run(CASE)["debug_softmax"]
    assert signed.shape == (2, 4, 256, 128)
    mask = dlattn.philox_dropout_mask(0.4, *CASE.philox(), CASE.scores_dim(), "flash")
    assert (np.signbit(signed[:, :, :140, :50]) == ~mask).all()
    signed[:, :, :140, :50] = 0
    assert not signed.any() and not np.signbit(signed).any()


def test_the_oracle_refuses_what_is_wrong() -> None:
    """One wrong sign, one wrong probability, one number beyond a length."""
    arrays = run(CASE)
    oracle.assert_debug_softmax(CASE, arrays, arrays["debug_softmax"])
    for at, factor, more in (
        ((0, 1, 139, 7), -1, 0),
        ((0, 1, 139, 7), 1 + 1e-12, 0),
        ((1, 0, 9, 0), 1, 1),
    ):
        wrong = arrays["debug_softmax"].copy()
        wrong[at] = wrong[at] * factor + np.copysign(more, wrong[at])
        with pytest.raises(AssertionError, match="debug_softmax"):
            oracle.assert_debug_softmax(CASE, arrays, wrong)


def test_shape_of_the_scores() -> None:
    """A tensor of the shape of the scores gets what the rounded one has there."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 140, 8)) for _ in range(3))
    found = []
    for rows in (256, 140):
        graph = dlattn.pygraph()
        t = [graph.tensor_like(x) for x in (q, k, v)]
        p = graph.tensor((2, 2, rows, rows), data_type=np.float64)
        o, stats = graph.sdpa(*t, debug_softmax=p, generate_stats=True, dropout=(0.4, 1, 2))
        memory = np.full((2, 2, rows, rows), 7.0)
        pack = {o.set_output(True): np.empty_like(v), p.set_output(True): memory}
        pack[stats.set_output(True)] = np.empty((2, 2, 140, 1), np.float32)
        graph.build()
        graph.execute({**dict(zip(t, (q, k, v), strict=True)), **pack})
        found.append(memory)
    np.testing.assert_array_equal(found[0][..., :140, :140], found[1])


def test_refusals() -> None:
    """It needs statistics, q's type, and the shape of the scores or the rounded one."""
    made = Forward()
    wanted = made.graph.tensor((2, 4, 128, 128), name="P", data_type=HALF)
    with pytest.raises(RuntimeError, match="generate_stats=True"):
        made.sdpa(debug_softmax=wanted, is_inference=True, generate_stats=None)
    for dim, dtype, error, said in (
        ((2, 4, 8, 13), HALF, ValueError, r"P has dim .* expected \(2, 4, 128, 128\)"),
        ((2, 4, 128, 128), FLOAT, dlattn.cudnnGraphNotSupportedError, "of one type"),
    ):
        made = Forward()
        wanted = made.graph.tensor(dim, name="P", data_type=dtype)
        made.sdpa(debug_softmax=wanted, generate_stats=True, is_inference=None)
        with pytest.raises(error, match=said):
            made.validate()
