"""Backwards among primitive operations: what kernels take, and which node they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.errors import InvalidVariantPackError
from dlattn.graph import placement
from dlattn.plans.chain import links
from dlattn.problem import Problem, Program, Stored, StoredSigns
from dlattn.runtime.target import KNOWN
from tests.callers import Caller
from tests.mha import Built, Mha, primitives
from tests.mha_backward import MhaBackward, Primitives, inputs
from tests.mha_bprop import Bprop

NotSupported = cudnn.cudnnGraphNotSupportedError
HALF = {"dtype": "float16", "head_dim_qk": 64, "head_dim_v": 64}
FULL = (True, True, True, True)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, on which nothing is executed."""
    monkeypatch.setattr(placement, "default_target", lambda: KNOWN["sm_90a"])


def given(case: MhaBackward) -> dict[str, Any]:
    arrays = inputs(case, Caller("numpy"))
    return arrays | {"s": np.zeros(case.of.scores_dim, case.of.numpy)}


def anywhere(built: Built) -> Any:
    """A graph, of tensors that were not seen on any device."""
    for t in built.graph._tensors:
        t.attributes.device = None
    return built.graph


def test_plans_on_a_gpu(on_gpu: None) -> None:
    """The flash form has the kernels of ``sdpa_backward``; S is made, and read, by a chain."""
    case = MhaBackward(Mha(**HALF, causal=0, dropout="rng", scale="scores"), again=True)
    masked = replace(case.of, bias=FULL, mask=True, mask_keys=True)
    for of in (case.of, masked):
        it = replace(case, of=of, d_bias=True)
        found = anywhere(Primitives(it, given(it)).declared())
        found.create_execution_plans()
        assert found.get_plan_name_at_index(0) == "bwd_sm90"
    graphs = [primitives(case.of, given(case), opaque=True), Bprop(case, given(case)).declared()]
    for built in graphs:
        graph = anywhere(built)
        graph.create_execution_plans()
        assert graph.get_plan_name_at_index(0) == "chain"
        assert graph.get_workspace_size() > 0


def test_o_of_a_function_is_made(on_gpu: None) -> None:
    """The forward that a backward without o begins with has the forward's function of scores, and
    so its kernel; and gives no gradients."""
    of = Mha(**HALF, bias=FULL, mask=True, mask_keys=True, stats=True, softmax="node")
    case = MhaBackward(of, d_bias=True, delta="p")
    backward = anywhere(Primitives(case, given(case)).declared())
    forward = anywhere(primitives(of, given(case))).lowered.problem
    first, last = links(backward.lowered.problem, backward.lowered.geometry)
    assert first.problem.edits[1] == forward.edits[1]
    assert first.problem.masks == forward.masks
    assert not first.problem.score_gradients and len(last.problem.score_gradients) == 1
    backward.create_execution_plans()
    assert backward.get_plan_name_at_index(0) == "chain"


def test_type_of_d_bias() -> None:
    """dBias has the graph's io type unless it is set, whatever the bias has: beside a mask, too."""
    for mask in (False, True):
        case = MhaBackward(Mha(**HALF, bias=FULL, mask=mask, nans=False), d_bias=True)
        arrays = given(case)
        arrays["bias"] = arrays["bias"].astype(np.float32)
        built = Primitives(case, arrays).declared()
        built.graph.build()
        assert built.outputs["dBias"].get_data_type() is cudnn.data_type.HALF


def test_s_beside_statistics(on_gpu: None) -> None:
    """What kernels make S from need not be made twice."""
    case = Mha(**HALF, seq_q=300, softmax="node", stats=True)
    graph = anywhere(primitives(case, given(MhaBackward(case)), opaque=True))
    graph.create_execution_plans()
    assert graph.get_plan_name_at_index(0) == "fwd_sm90"


def test_problem_of_s() -> None:
    """S has the place of scores, and its signs that of a keep mask; the scale is of gradients."""
    case = MhaBackward(Mha(**HALF, dropout="rng", scale="scores", causal=2), again=True)
    problem = Bprop(case, given(case)).declared().graph.lowered.problem
    assert isinstance(problem, Problem)
    assert isinstance(problem.edits[1], Stored) and isinstance(problem.dropout, StoredSigns)
    assert [type(mask).__name__ for mask in problem.masks] == ["Padding", "Band"]


def test_dp_is_opaque() -> None:
    """dP may be declared as an output that nobody else reads; it is not written."""
    case = MhaBackward(Mha(scale="scores"))
    for form in (Primitives, Bprop):
        built = form(case, given(case)).declared()
        (dq,) = (node for node in built.graph._nodes if node.name == "dQ")
        dq.inputs["A"].set_output(True).set_reordering_type(cudnn.tensor_reordering.F16x16)
        assert isinstance(built.graph.lowered.problem, Problem)


def replaced(name: str, by: Callable[..., Any]) -> Callable[..., Any]:
    """A change of the node of a name."""

    def change(graph: Any, operation: str, operands: Any, named: Any) -> Any:
        return by(graph, *operands) if named.get("name") == name else None

    return change


def _other(graph: Any) -> Any:
    """Like q, k, v and dO, which are of one shape."""
    return graph.tensor((2, 4, 16, 64), name="other")


#: Case, form, node -> what is in its place, and the message.
MISFITS: list[tuple[dict[str, Any], type[Primitives], str, Callable[..., Any], str]] = [
    ({}, Primitives, "exp", lambda g, x: g.tanh(x, name="exp"), "tanh 'exp' is no part"),
    (
        {}, Primitives, "times_p", lambda g, a, b: g.add(a, b, name="times_p"),
        "add 'times_p' adds neither",
    ),
    (
        {}, Primitives, "delta", lambda g, x, m: g.reduction(x, cudnn.reduction_mode.MAX, name="d"),
        "reduction 'd' reduces by something else than a sum",
    ),
    (
        {}, Primitives, "dQ", lambda g, a, b: g.matmul(a, _other(g), name="dQ"),
        "matmul 'dQ' multiplies by something else than k",
    ),
    (
        {}, Primitives, "dK", lambda g, a, b: g.matmul(a, _other(g), name="dK"),
        "matmul 'dK' multiplies by something else than q",
    ),
    (
        {}, Primitives, "dV", lambda g, a, b: g.matmul(a, _other(g), name="dV"),
        "matmul 'dV' multiplies by something else than dO",
    ),
    (
        {}, Primitives, "do_o", lambda g, a, b: g.mul(b, b, name="do_o"),
        "matmul 'dQ' ends a backward whose sums of rows are not of dO times o",
    ),
    (
        {"scale": "scores"}, Primitives, "scale_by_attn", lambda g, x, y: g.identity(x),
        "matmul 'dK' is not scaled as a gradient is",
    ),
    (
        {"dropout": "rng"}, Primitives, "drop_dP", lambda g, x, y: g.identity(x),
        "matmul 'dK' drops something else than dV does",
    ),
    (
        {"dropout": "rng"}, Primitives, "delta_inverse", lambda g, x, y: g.identity(x),
        "matmul 'dV' ends a backward whose dropout is not scaled by 2",
    ),
    (
        {"bias": FULL}, Primitives, "dBias",
        lambda g, x, m: g.reduction(g.scale(x, g.tensor_scalar(2.0)), m, name="dBias"),
        "reduction 'dBias' is not scaled as a gradient is",
    ),
    (
        {}, Primitives, "p_transposed", lambda g, x, order: g.identity(x.set_output(True)),
        "exp 'exp' writes exp::OUT_0 to memory|matmul 'dV' multiplies something else",
    ),
    (
        {"dropout": "rng"}, Bprop, "p", lambda g, s: g.identity(s),
        "matmul 'dK' is of an S whose signs are a mask; take abs of it",
    ),
    (
        {"dropout": "rng"}, Bprop, "is_kept", lambda g, s, zero: g.cmp_lt(s, zero, name="lost"),
        "cmp_lt 'lost' compares something else",
    ),
    (
        {}, Bprop, "p_dp", lambda g, p, dp: g.mul(dp, dp, name="p_dp"),
        "mul 'p_dp' multiplies by a tensor",
    ),
]  # fmt: skip


@pytest.mark.parametrize("parts, form, name, by, said", MISFITS, ids=lambda x: str(x)[:20])
def test_misfits(
    parts: dict[str, Any],
    form: type[Primitives],
    name: str,
    by: Callable[..., Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, the first node that does not fit is named, and why; the CPU runs what has no S."""
    of = {"heads_k": 4, "heads_v": 4, "seq_q": 16, "seq_kv": 16, "head_dim_v": 64, **parts}
    case = MhaBackward(Mha(**HALF | of), v="transpose", d_bias=True)
    arrays = given(case)
    built = form(case, arrays, replaced(name, by)).declared()
    if form is Primitives:
        assert isinstance(built.graph.lowered.problem, Program)
    else:
        with pytest.raises(NotSupported, match=f"in the layout F16x16.*{said}"):
            built.graph.validate()
    monkeypatch.setattr(placement, "default_target", lambda: KNOWN["sm_90a"])
    graph = anywhere(form(case, arrays, replaced(name, by)).declared())
    with pytest.raises(NotSupported, match=f"runs on cuda:0, .* not attention: (?:{said})"):
        graph.validate()


def test_numbers_in_packs() -> None:
    """What the graph takes for granted of numbers in the pack is checked by ``execute``."""
    of = Mha(dropout="rng", fill="value", dtype="float64", seed=1)
    for form, name, wrong, said in (
        (Primitives, "inverse", 1.5, "inverse .* expected 2, by the probability to keep"),
        (Primitives, "keep", 0.3, "keep .* expected 0.5, by the probability to keep"),
        (Bprop, "inverse", -2.0, "inverse .* expected a number above 0"),
        (Bprop, "zero", 0.1, "zero .* expected 0, for what is masked"),
    ):
        case = MhaBackward(of)
        built = form(case, given(case)).declared()
        (number,) = (t for t in built.pack if t.get_name() == name)
        assert set(built.run(Caller("numpy"))) == {"dQ", "dK", "dV"}
        with pytest.raises(InvalidVariantPackError, match=said):
            built.graph.execute({**built.pack, number: wrong}, np.empty(1 << 20, np.uint8))
