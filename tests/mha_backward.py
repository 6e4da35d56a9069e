"""Random backwards of attention written as primitive operations, beside ``sdpa_backward`` of the
same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

import dlattn as cudnn
from dlattn.problem import Problem
from tests.callers import Caller
from tests.mha import P_KEEP, SCALE, Built, Mha, added, arrays, masked, sdpa, transposed
from tests.mha_checks import as_measured, assert_near, widened

ADD = cudnn.reduction_mode.ADD


@dataclass(frozen=True)
class MhaBackward:
    """One backward of primitive operations; its repr is one line that evaluates to it.

    Attributes:
        of: the attention.
        v: how v is transposed, as k is.
        late: dropout's scale multiplies what is left of dP less delta times its inverse, as in
            cuDNN; else dP at once.
        by: what transposes probabilities: ``"transpose"`` or ``"reshape"``.
        d_bias: the gradient of the bias is an output, if there is one.
        again: gradients of scores are masked, too.
        delta: sums of the rows of dO times ``"o"``, or of ``"p"`` times dP.
    """

    of: Mha = Mha()
    v: str = "declared"
    late: bool = True
    by: str = "transpose"
    d_bias: bool = False
    again: bool = False
    delta: str = "o"

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"MhaBackward({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"


def inputs(case: MhaBackward, caller: Caller, made: dict[str, Any] | None = None) -> dict[str, Any]:
    """The inputs: role -> tensor, o and the statistics as ``sdpa`` makes them of given arrays."""
    of = case.of
    given = {role: caller.tensor(x) for role, x in (made or with_gradient(case)).items()}
    d_o = given.pop("dO")
    built = sdpa(replace(of, stats=True, softmax="node"), given)
    row_type = np.float64 if of.dtype == "float64" else np.float32
    built.outputs["stats"].set_data_type(row_type)
    found = built.run(caller)
    # Of rows without keys the operations one by one would be NaN: whatever is larger than scores.
    stats = np.where(found["stats"] < -1e19, 1e30, found["stats"])
    rows = {"o": found["o"].astype(of.numpy), "stats": stats.astype(row_type)}
    return given | {"dO": d_o} | {role: caller.tensor(x) for role, x in rows.items()}


def with_gradient(case: MhaBackward) -> dict[str, Any]:
    """The arrays of the attention, and dO."""
    of = case.of
    dim = (*of.scores_dim[:3], of.head_dim_v)
    d_o = np.random.default_rng(of.seed + 1).standard_normal(dim)
    return {**arrays(of), "dO": d_o.astype(of.numpy)}


def in_float64(case: MhaBackward) -> dict[str, Any]:
    """What o and the gradients of the same numbers are in float64 on the CPU, of one bias."""
    of, made = widened(case.of, with_gradient(case))
    wide = replace(case, of=of)
    exact = inputs(wide, Caller("numpy"), made)
    gradients = sdpa_backward(wide, exact).run(Caller("numpy"))
    d_bias = gradients.pop("dBias", None)
    if d_bias is not None and case.of.bias is not None:
        shared = tuple(axis for axis, whole in enumerate(case.of.bias) if not whole)
        terms = d_bias.sum(axis=shared, keepdims=True) if case.of.has_function else d_bias
        gradients["dBias"] = terms
    return {"o": exact["o"], **gradients}


def sdpa_backward(case: MhaBackward, given: dict[str, Any]) -> Built:
    """The graph of one ``sdpa_backward``."""
    of = case.of
    built = Built(replace(of, k="natural"), given)
    graph, t = built.graph, built.inputs
    dropout: Any = None
    if of.dropout == "rng":
        dropout = (1 - P_KEEP, t["seed"], t["offset"])
    if of.dropout == "mask":
        dropout = (t["keep"], 1 / P_KEEP, P_KEEP)
    scale = None
    if of.scale is not None:
        scale = built.number(SCALE, True, "scale") if of.scale_by == "value" else SCALE
    d_bias, more = None, added(of, t)
    wants_bias = case.d_bias and of.bias is not None
    if wants_bias and of.has_function:
        more["score_mod_gradients"] = [t["bias"]]
    elif wants_bias:
        d_bias = graph.tensor(t["bias"].get_dim(), data_type=of.data_type, name="dBias")
    alignment = cudnn.diagonal_alignment
    gradients = graph.sdpa_backward(
        *(t[role] for role in ("q", "k", "v", "o", "dO", "stats")),
        attn_scale=scale,
        dBias=d_bias,
        **more,
        use_padding_mask=bool(of.padding),
        seq_len_q=t.get("len_q"),
        seq_len_kv=t.get("len_k"),
        diagonal_band_right_bound=of.causal,
        diagonal_band_left_bound=of.window,
        diagonal_alignment=alignment.BOTTOM_RIGHT if of.bottom_right else alignment.TOP_LEFT,
        dropout=dropout,
    )
    roles = ("dQ", "dK", "dV", "dBias")
    built.outputs = dict(zip(roles, gradients, strict=False))
    if d_bias is not None:
        built.outputs["dBias"] = d_bias
    for output in built.outputs.values():
        output.set_output(True)
    return built


class Primitives:
    """The graph of primitive operations.

    Attributes:
        change: what is added to the graph in the place of a node, or None: for wrong graphs.
    """

    def __init__(
        self, case: MhaBackward, given: dict[str, Any], change: Callable[..., Any] | None = None
    ) -> None:
        self.case, self.of = case, case.of
        self.built = Built(
            case.of,
            given,
            views=("k",) * (case.of.k == "declared") + ("v",) * (case.v == "declared"),
        )
        self.graph = self.built.graph
        self.change = change
        self.factors: dict[str, Any] = {}

    def node(self, operation: str, *operands: Any, **named: Any) -> Any:
        made = self.change and self.change(self.graph, operation, operands, named)
        return made or getattr(self.graph, operation)(*operands, **named)

    def number(self, value: float, name: str) -> Any:
        """One tensor for each number."""
        by_value = self.of.fill == "value" and self.of.dropout == "rng"
        if name not in self.factors:
            self.factors[name] = self.built.number(value, by_value, name)
        return self.factors[name]

    def swapped(self, x: Any, name: str) -> Any:
        if self.case.by == "transpose":
            return self.node("transpose", x, (0, 1, 3, 2), name=name)
        b, h, sq, skv = self.of.scores_dim
        viewed = self.node("reshape", x, name=name).set_dim((b, h, skv, sq))
        return viewed.set_stride((h * sq * skv, sq * skv, 1, skv))

    def lengths(self, **sides: str) -> dict[str, Any]:
        t = self.built.inputs
        if not self.of.overrides:
            return {}
        return {f"{axis}_override": t.get(f"len_{side}") for axis, side in sides.items()}

    def scaled(self, x: Any, name: str) -> Any:
        of = self.of
        if of.scale is None:
            return x
        if "scale" not in self.factors:
            value = 1 / SCALE if of.scale_by == "div" else SCALE
            self.factors["scale"] = self.built.number(value, of.scale_by == "value", "scale")
        operation = "div" if of.scale_by == "div" else "scale"
        return self.node(operation, x, self.factors["scale"], name=name)

    def dropped(self, x: Any, mask: Any, name: str) -> Any:
        return x if mask is None else self.node("mul", x, mask, name=name)

    def rows(self, x: Any) -> Any:
        return x.set_dim((*self.of.scores_dim[:3], 1))

    def heads(self, x: Any, heads: int, name: str) -> Any:
        if heads == self.of.heads_q:
            return x
        b, _, rows, columns = self.full[name]
        dim = (b, heads, rows, columns)
        if self.case.by == "transpose":
            return self.node("reduction", x, ADD, name=f"{name}_heads").set_dim(dim)
        # Groups on an axis of their own.
        shape = cudnn.reshape_mode.LOGICAL
        x = self.node("reshape", x, name=f"{name}_groups", reshape_mode=shape)
        x.set_dim((b, heads, self.of.heads_q // heads, rows, columns))
        x = self.node("reduction", x, ADD, name=f"{name}_heads").set_dim((b, heads, 1, *dim[2:]))
        return self.node("reshape", x, name=f"{name}_joined", reshape_mode=shape).set_dim(dim)

    @property
    def full(self) -> dict[str, tuple[int, ...]]:
        of = self.of
        dim = (of.batch, of.heads_q, of.seq_kv)
        return {"dK": (*dim, of.head_dim_qk), "dV": (*dim, of.head_dim_v)}

    def probabilities(self, kt: Any, q: Any) -> Any:
        t, of = self.built.inputs, self.of
        q = self.scaled(q, "scale_q") if of.scale == "q" else q
        kt = self.scaled(kt, "scale_k") if of.scale == "k" else kt
        scores = self.node("matmul", q, kt, name="bmm1", padding=-5.0, **self.lengths(m="q", n="k"))
        if of.scale == "scores":
            scores = self.scaled(scores, "scale_scores")
        if of.bias is not None:
            scores = self.node("bias", scores, t["bias"], name="add_bias")
        scores = masked(self.built, scores)
        return self.node("exp", self.node("sub", scores, t["stats"], name="less"), name="exp")

    def declared(self, keep_p: bool = False) -> Built:
        """The graph; with probabilities as an output, it is not run as attention."""
        t, of, case = self.built.inputs, self.of, self.case
        drops = of.dropout is not None
        q, d_o = t["q"], t["dO"]
        k, kt = transposed(self.built, "k", of.k, keep_p)
        _, vt = transposed(self.built, "v", case.v, keep_p)
        p = self.probabilities(kt, q)
        mask = None
        if of.dropout == "rng":
            mask = self.node(
                "rng", t["seed"], t["offset"], bernoulli_probability=P_KEEP, name="rng"
            )
            mask.set_dim(of.scores_dim)
        elif drops:
            mask = t["keep"]
        kept = self.dropped(p, mask, "drop")
        if drops:
            kept = self.node("mul", kept, self.number(1 / P_KEEP, "inverse"), name="scale_kept")
        turned = self.swapped(kept, "p_transposed")
        dv = self.node("matmul", turned, d_o, name="dV", **self.lengths(m="k", k="q"))
        dp = self.node("matmul", d_o, vt, name="dP", padding=3.0, **self.lengths(m="q", n="k"))
        dp = self.dropped(dp, mask, "drop_dP")
        if drops and not case.late:
            dp = self.node("mul", dp, self.number(1 / P_KEEP, "inverse"), name="scale_dP")
        of_o = case.delta == "o"
        delta = self.node("mul", *((d_o, t["o"]) if of_o else (p, dp)), name="do_o")
        delta = self.rows(self.node("reduction", delta, ADD, name="delta"))
        if drops and case.late and of_o:
            delta = self.node("scale", delta, self.number(P_KEEP, "keep"), name="delta_inverse")
        ds = self.node("sub", dp, delta, name="less_delta")
        ds = self.node("mul", ds, p, name="times_p")
        if drops and case.late:
            ds = self.node("mul", ds, self.number(1 / P_KEEP, "inverse"), name="scale_dS")
        built = self.ended(q, k, ds, dv, self.graph.tensor_scalar(0.0))
        if keep_p:
            built.outputs["p"] = p.set_output(True)
        return built

    def ended(self, q: Any, k: Any, ds: Any, dv: Any, zero: Any) -> Built:
        """From the gradient of scores to the outputs."""
        t, of, case = self.built.inputs, self.of, self.case
        outputs = {}
        if case.d_bias and of.bias is not None:
            outputs["dBias"] = self.node("reduction", ds, ADD, name="dBias")
            outputs["dBias"].set_dim(t["bias"].get_dim())
        ds = self.scaled(ds, "scale_by_attn")
        if case.again:
            ds = masked(self.built, ds, zero)
        turned = self.swapped(ds, "ds_transposed")
        dk = self.node("matmul", turned, q, name="dK", **self.lengths(m="k", k="q"))
        dq = self.node("matmul", ds, k, name="dQ", **self.lengths(m="q", k="k"))
        outputs |= {
            "dQ": dq,
            "dK": self.heads(dk, of.heads_k, "dK"),
            "dV": self.heads(dv, of.heads_v, "dV"),
        }
        self.built.outputs = {role: x.set_output(True) for role, x in outputs.items()}
        return self.built


def check_backward(case: MhaBackward, caller: Caller) -> None:
    """Fails unless primitives are lowered to the problem of ``sdpa_backward``, and give, on the
    CPU, its very bits, and anywhere nearly what it gives in float64 on the CPU."""
    try:
        given = inputs(case, caller)
        wanted, found = sdpa_backward(case, given), Primitives(case, given).declared()
        expected, got = wanted.run(caller), found.run(caller)
        problem = found.graph.lowered.problem
        assert isinstance(problem, Problem)
        assert problem == as_measured(wanted.graph.lowered.problem, case.of)
        assert expected.keys() == got.keys()
        for role, x in expected.items():
            if found.graph.lowered.target.kind == "cpu":
                np.testing.assert_array_equal(got[role], x, err_msg=role)
        exact = in_float64(case)
        assert_near(case.of.dtype, {role: exact[role] for role in got}, got)
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


def check_backward_meaning(case: MhaBackward, caller: Caller) -> None:
    """Fails unless the operations one by one, in float64, are what ``sdpa_backward`` computes."""
    given = inputs(case, caller)
    wanted = sdpa_backward(case, given)
    found = Primitives(case, given).declared(keep_p=True)
    expected, got = wanted.run(caller), found.run(caller)
    assert not isinstance(found.graph.lowered.problem, Problem)
    for role, x in expected.items():
        np.testing.assert_allclose(got[role], x, 1e-9, 1e-9, err_msg=f"{case!r}: {role}")
