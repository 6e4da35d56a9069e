"""The reference engine's backward: it is the derivative of the forward, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings

from dlattn.plans.reference import attention_backward, attention_forward
from dlattn.plans.rows import sink_gradient
from dlattn.problem import Edit, Values, Where
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import values_of
from tests.engine import backward, forward, run_plan
from tests.libraries import Library
from tests.pages import by_sequence
from tests.reference.examples import CASE, Cube, Weave
from tests.strategies import cases

#: Doubles throughout, and logits that central differences can follow.
_smooth = cases(
    dtype="float64", stats="float64", scale=0.3, scale_as="value", logits=1.0, tails="huge"
)


def _arrays(case: Case) -> dict[str, Any]:
    arrays = {role: t.padded() for role, t in make_tensors(case, Library()).items()}
    arrays = by_sequence(case, arrays)
    return {role: x if role == "block_mask" else x.astype(np.float64) for role, x in arrays.items()}


def _directions(case: Case, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    roles = [*"qkv", *(["sink_token"] if case.sink is not None else [])]
    directions = {role: rng.standard_normal(case.dims()[role]) for role in roles}
    if case.d_bias:
        directions["bias"] = rng.standard_normal(case.bias_dim())
    return directions


@settings(max_examples=60)
@given(_smooth)
def test_adjoint(case: Case) -> None:
    """<dO, J t> = <J^T dO, t> for any direction t; J t by central differences."""
    arrays, direction, step = _arrays(case), _directions(case, case.seed), 1e-5
    ahead, behind = (
        forward(case, arrays | {role: arrays[role] + sign * d for role, d in direction.items()}).o
        for sign in (step, -step)
    )
    moved = sum(
        ((ahead - behind)[b, :, :m] / (2 * step) * arrays["dO"][b, :, :m]).sum()
        for b, m in enumerate(case.lengths_q())
    )
    d_bias = np.zeros(case.bias_dim()) if case.d_bias else None
    gradients = dict(zip("qkv", backward(case, arrays, d_bias=d_bias), strict=True))
    if d_bias is not None:
        gradients["bias"] = d_bias
    if case.sink is not None:
        o, stats, *_ = forward(case, arrays)
        gradients["sink_token"] = sink_gradient(
            o, arrays["dO"], stats, arrays["sink_token"], len_q=values_of(case, arrays).len_q
        )
    pulled = sum((gradients[role] * d).sum() for role, d in direction.items())
    size = sum(np.abs(gradients[role] * d).sum() for role, d in direction.items())
    assert abs(moved - pulled) <= 1e-7 * (1 + size)


def test_adjoint_of_any_edit_and_mask() -> None:
    """The chain of gradients of edits that the engine has never heard of is their derivative."""
    case, step = replace(CASE, heads_k=4, heads_v=4), 1e-6
    arrays, direction = _arrays(case), _directions(case, 1)
    features: dict[str, Any] = {"edits": (Cube(), Cube()), "masks": (Weave(),)}
    q, k, v, d_o = (arrays[role] for role in ("q", "k", "v", "dO"))
    ahead, behind = (
        attention_forward(*(arrays[role] + sign * direction[role] for role in "qkv"), **features)[0]
        for sign in (step, -step)
    )
    o, stats, *_ = attention_forward(q, k, v, **features)
    gradients = attention_backward(q, k, v, o, d_o, stats, **features)
    pulled = sum((g * direction[role]).sum() for g, role in zip(gradients, "qkv", strict=True))
    assert np.isclose((d_o * (ahead - behind)).sum() / (2 * step), pulled, rtol=1e-6)


@dataclass(frozen=True)
class _Reciprocal(Edit):
    """An edit without a derivative at 0."""

    @property
    def cpp(self) -> str:
        return "Reciprocal"

    def apply(self, score: Any, where: Where, values: Values) -> Any:
        return 1 / score

    def backward(self, grad: Any, score: Any, where: Where, values: Values) -> Any:
        return -grad / score**2


def test_masked_scores_have_no_gradient() -> None:
    """A masked score takes part in nothing, even where an edit has no derivative."""
    case = replace(CASE, heads_k=4, heads_v=4)
    q, k, v, d_o = (_arrays(case)[role] for role in ("q", "k", "v", "dO"))
    k[:, :, 0::3] = 0  # head 0 of batch entry 0 drops keys 0, 3, 6 in its first row
    q, d_o, k, v = (x[:1, :1] for x in (q[:, :, :1], d_o[:, :, :1], k, v))
    features: dict[str, Any] = {"edits": (_Reciprocal(),), "masks": (Weave(),)}
    o, stats, *_ = attention_forward(q, k, v, **features)
    gradients = attention_backward(q, k, v, o, d_o, stats, **features)
    assert all(np.isfinite(x).all() for x in (o, stats, *gradients))


@settings(max_examples=60)
@given(_smooth.map(lambda case: replace(case, softcap=None)))
def test_gradients_of_a_shift(case: Case) -> None:
    """Adding one vector to every key moves no weight, if no soft cap bends the scores, so key
    gradients of a head sum to 0; adding one to every value moves o by it, so value gradients sum to
    dO's rows that attend at all.

    A sink, which has neither key nor value, would stay behind, and so would what is dropped.
    """
    case = replace(case, sink=None, dropout=None, rng_dump=False)
    arrays = _arrays(case)
    _, d_k, d_v = backward(case, arrays)
    assert np.abs(d_k.sum(2)).max() <= 1e-12 * (1 + np.abs(d_k).sum())
    alive = np.isfinite(forward(case, arrays)[1])
    d_o = np.where(alive, arrays["dO"], 0).sum(2)
    by_head = d_o.reshape(case.batch, case.heads_v, -1, case.head_dim_v).sum(2)
    assert np.abs(d_v.sum(2) - by_head).max() <= 1e-12 * (1 + np.abs(d_v).sum())


@settings(max_examples=40)
@given(_smooth)
def test_shared_heads(case: Case) -> None:
    """A shared key or value head gets the sum of what its copies would get."""
    arrays = _arrays(case)
    copies = {
        role: arrays[role].repeat(case.heads_q // heads, axis=1)
        for role, heads in (("k", case.heads_k), ("v", case.heads_v))
    }
    _, *shared = backward(case, arrays)
    alone = backward(replace(case, heads_k=case.heads_q, heads_v=case.heads_q), arrays | copies)[1:]
    for got, parts in zip(shared, alone, strict=True):
        sums = parts.reshape(case.batch, got.shape[1], -1, *parts.shape[2:]).sum(2)
        assert np.abs(got - sums).max() <= 1e-12 * (1 + np.abs(parts).sum())


@settings(max_examples=60)
@given(cases(stats="float32"))
def test_what_is_not_attended_gets_zero(case: Case) -> None:
    """Gradients past the lengths, and of rows that attend to nothing, are written as 0."""
    tensors = make_tensors(case, Library())
    run_plan(case, tensors)
    out = by_sequence(case, {role: t.padded() for role, t in tensors.items()})
    for b, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
        assert (out["dQ"][b, :, m:] == 0).all()
        assert (out["dK"][b, :, n:] == 0).all() and (out["dV"][b, :, n:] == 0).all()
    dead = out["stats"][..., 0] == -np.inf
    assert (out["dQ"][dead] == 0).all()
