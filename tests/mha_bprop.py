"""Backwards of attention from S, cuDNN's Mha-bprop, and graphs of which one node is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import dlattn as cudnn
from dlattn.errors import InvalidGraphError
from dlattn.problem import Problem
from tests.callers import Caller
from tests.mha import P_KEEP, Built, primitives, transposed
from tests.mha_backward import ADD, MhaBackward, Primitives, in_float64, inputs
from tests.mha_checks import assert_near


class Bprop(Primitives):
    """The graph of cuDNN's Mha-bprop, which takes S in the place of o and statistics."""

    def declared(self, keep_p: bool = False) -> Built:
        """The graph; with an S that anybody may read, it is not run as attention."""
        t, of, case = self.built.inputs, self.of, self.case
        q, d_o = t["q"], t["dO"]
        k, _ = transposed(self.built, "k", of.k, keep_p)
        _, vt = transposed(self.built, "v", case.v, keep_p)
        s, drops = t["s"], of.dropout is not None
        if not keep_p:
            s.set_reordering_type(cudnn.tensor_reordering.F16x16)
        p_t = self.swapped(s, "s_transposed")
        if drops:
            p_t = self.node("mul", p_t, self.number(1 / P_KEEP, "inverse"), name="scale_kept")
            p_t = self.node("abs" if case.late else "relu", p_t, name="kept")
        dv = self.node("matmul", p_t, d_o, name="dV", **self.lengths(m="k", k="q"))
        dp = self.node("matmul", d_o, vt, name="dP", padding=3.0, **self.lengths(m="q", n="k"))
        p, zero = s, self.number(0.0, "zero")
        if drops:
            p = self.node("abs", s, name="p")
            kept = self.node("cmp_gt", s, zero, name="is_kept")
            dp = self.node("mul", dp, self.number(1 / P_KEEP, "inverse"), name="scale_dP")
            dp = self.node("binary_select", dp, zero, kept, name="drop_dP")
        delta = self.node("reduction", self.node("mul", p, dp, name="p_dp"), ADD, name="delta")
        less = self.node("sub", dp, self.rows(delta), name="less_delta")
        ds = self.node("mul", less, p, name="times_p")
        return self.ended(q, k, ds, dv, zero)


def plain_bprop(case: MhaBackward) -> MhaBackward:
    """Products are told lengths only where gradients are masked by them; a mask of the user's is in
    S alone."""
    again = case.again and not (case.of.mask or case.of.mask_keys)
    return replace(case, again=again, of=replace(case.of, overrides=case.of.overrides and again))


def check_bprop(case: MhaBackward, caller: Caller) -> None:
    """Fails unless a forward leaves in S what the backward needs: o and gradients are nearly those
    of float64 on the CPU."""
    case = plain_bprop(case)
    of = case.of
    try:
        given = inputs(case, caller)
        forward = primitives(of, given, opaque=True)
        made = forward.run(caller)
        given["s"] = caller.tensor(made["s"].astype(of.numpy))
        backward = Bprop(case, given).declared()
        got = backward.run(caller)
        for graph in (forward.graph, backward.graph):
            assert isinstance(graph.lowered.problem, Problem)
        expected = in_float64(case)
        assert_near(of.dtype, {"o": expected.pop("o")}, made)
        assert expected.keys() == got.keys()
        assert_near(of.dtype, expected, got)
    except BaseException:
        print(f"check_bprop({case!r}, Caller({caller.name!r}, {caller.device!r}))")
        raise


class Change:
    """One node of a graph, by its number, made wrong: as :class:`Primitives` takes it.

    Attributes:
        kind: its result is ``"scaled"``, ``"negated"``, ``"dropped"`` (its first operand),
            ``"other"`` (of another operation), of operands that are ``"swapped"``, or of which one
            is ``"rewired"`` to an earlier result.
        which: the number of that.
    """

    def __init__(self, kind: str, number: int, which: int = 0) -> None:
        self.kind, self.number, self.which = kind, number, which
        self.results: list[Any] = []

    def __call__(self, graph: Any, operation: str, operands: Any, named: Any) -> Any:
        self.number -= 1
        if self.number != -1:
            made = getattr(graph, operation)(*operands, **named)
        else:
            made = self._changed(graph, operation, operands, named)
        self.results.append(made)
        return made

    def _changed(self, graph: Any, operation: str, operands: Any, named: Any) -> Any:
        if self.kind == "rewired" and self.results and operation != "rng":
            earlier = self.results[self.which % len(self.results)]
            is_second = self.which % 2 and operation in ("mul", "sub", "matmul", "binary_select")
            operands = list(operands)
            operands[int(bool(is_second))] = earlier
        if self.kind == "dropped":
            return graph.identity(operands[0])
        if self.kind == "swapped" and operation not in ("transpose", "reduction", "reshape", "exp"):
            operands = (*operands[:2][::-1], *operands[2:])
        if self.kind == "other":
            operation = _OTHERS.get(operation, operation)
            if operation == "reduction":
                operands = (operands[0], cudnn.reduction_mode.AVG)
        made = getattr(graph, operation)(*operands, **named)
        if self.kind == "negated":
            return graph.neg(made)
        return graph.scale(made, graph.tensor_scalar(1.5)) if self.kind == "scaled" else made


#: Operation -> one that takes the same operands. Of S whose signs are a mask, abs is what is kept.
_OTHERS = {
    **{"mul": "add", "sub": "add", "scale": "sub", "div": "mul", "bias": "sub", "exp": "identity"},
    **{"abs": "neg", "relu": "neg", "cmp_gt": "cmp_lt", "reduction": "reduction"},
}


def check_change(case: MhaBackward, form: type[Primitives], change: Callable[[], Change]) -> bool:
    """Fails if a graph that a change makes wrong is run as attention, and gives something else than
    its operations one by one. Returns whether it is run as attention."""
    caller = Caller("numpy")
    case = plain_bprop(replace(case, late=case.late and form is Primitives))
    # Packs hold k and v as they are declared. A wrong graph may show what masks are to hide.
    case = replace(case, of=replace(case.of, seed=3 * case.of.seed + 1, nans=False))
    given = inputs(case, caller)
    if form is Bprop:
        made = primitives(case.of, given, opaque=True).run(caller)
        given["s"] = made["s"].astype(case.of.numpy)
    found = form(case, given, change()).declared()
    try:
        got = found.run(caller)
    except (InvalidGraphError, cudnn.cudnnGraphNotSupportedError):
        return False
    if not isinstance(found.graph.lowered.problem, Problem):
        return False
    expected = form(case, given, change()).declared(keep_p=True).run(caller)
    if form is Primitives and case.delta == "p":
        # Of statistics that are not those of the scores, such a graph may say anything.
        rows = expected["p"].sum(-1)
        if not np.isclose(rows, np.round(rows)).all() or rows.max(initial=0) > 1.5:
            return True
    assert_near("float64", {role: expected[role] for role in got}, got)
    return True
