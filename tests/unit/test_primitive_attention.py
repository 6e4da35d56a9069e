"""Attention among primitive operations: what kernels take, and which node they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.errors import InvalidVariantPackError
from dlattn.graph import placement
from dlattn.problem import Problem, Program
from dlattn.runtime.target import KNOWN
from tests.mha import Mha, arrays, primitives
from tests.unit.producers import late

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
MAX = cudnn.reduction_mode.MAX
NotSupported = cudnn.cudnnGraphNotSupportedError
GRAPH = {"io_data_type": HALF, "intermediate_data_type": FLOAT}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, on which nothing is executed."""
    monkeypatch.setattr(placement, "default_target", lambda: KNOWN["sm_90a"])


def mha(case: Mha) -> Any:
    """The graph, of tensors that were not seen on any device."""
    built = primitives(case, arrays(case))
    for t in built.graph._tensors:
        t.attributes.device = None
    return built


def test_attention_on_a_gpu(on_gpu: None) -> None:
    """Attention has the kernels of sdpa."""
    for case in (
        Mha(dtype="float16", heads_q=2, head_dim_v=16),
        Mha(dtype="bfloat16", causal=0, padding="qk", scale="k", dropout="rng", fill="value"),
        Mha(dtype="float16", bias=(True,) * 4, mask=True, mask_keys=True, dropout="rng"),
    ):
        made = mha(case).graph
        made.create_execution_plans()
        assert made.get_plan_name_at_index(0) in ("fwd_sm90", "fwd_sm80", "decode")
        assert isinstance(made.lowered.problem, Problem)


def scores(made: Any) -> Any:
    """q by k transposed, 1 x 2 heads, 8 x 16."""
    q = made.tensor((1, 2, 8, 32), name="q")
    k = made.tensor((1, 2, 32, 16), (1024, 512, 1, 32), name="k")
    return made.matmul(q, k, name="bmm1")


def ended(made: Any, s: Any) -> Any:
    """Softmax, and the product with v."""
    weights, _ = made.softmax(s, name="softmax")
    v = made.tensor((1, 2, 16, 32), name="v")
    return made.matmul(weights, v, name="bmm2").set_output(True)


def _tanh(made: Any) -> None:
    ended(made, made.tanh(scores(made), name="cap"))


def _no_softmax(made: Any) -> None:
    made.matmul(scores(made), made.tensor((1, 2, 16, 32)), name="bmm2").set_output(True)


def _only_scores(made: Any) -> None:
    scores(made).set_output(True)


def _late_scale(made: Any) -> None:
    biased = made.bias(scores(made), made.tensor((1, 1, 8, 16), name="b"), name="bias")
    ended(made, made.scale(biased, made.tensor_scalar(0.5), name="late"))


def _late_bias(made: Any) -> None:
    p = scores(made)
    row, col = made.gen_index(p, 2), made.gen_index(p, 3)
    masked = made.binary_select(p, made.tensor_scalar(-1e20), made.cmp_ge(row, col))
    ended(made, made.add(masked, made.tensor((1, 1, 8, 16)), name="late"))


def _weak_mask(made: Any) -> None:
    p = scores(made)
    keep = made.cmp_ge(made.gen_index(p, 2), made.gen_index(p, 3))
    ended(made, made.binary_select(p, made.tensor_scalar(-1.0), keep, name="select"))


def _strange_mask(made: Any) -> None:
    p = scores(made)
    row, col = made.gen_index(p, 2), made.gen_index(p, 3)
    ends = made.cmp_lt(made.add(row, col), made.tensor_scalar(9), name="corner")
    ended(made, made.binary_select(p, made.tensor_scalar(-1e20), ends))


def _equal(made: Any) -> None:
    p = scores(made)
    same = made.cmp_eq(made.gen_index(p, 2), made.gen_index(p, 3), name="same")
    ended(made, made.binary_select(p, made.tensor_scalar(-1e20), same))


def _heads(made: Any) -> None:
    made.gen_index(scores(made), 1, name="heads").set_output(True)


def _multiplied(made: Any) -> None:
    ended(made, made.mul(scores(made), made.tensor((1, 1, 8, 16)), name="masked"))


def _s_is_output(made: Any) -> None:
    weights, _ = made.softmax(scores(made), name="softmax")
    weights.set_output(True)
    made.matmul(weights, made.tensor((1, 2, 16, 32)), name="bmm2").set_output(True)


def _after(made: Any) -> None:
    made.relu(ended(made, scores(made)), name="after").set_output(True)


def _columns(made: Any) -> None:
    p = scores(made)
    most = made.reduction(p, MAX, name="columns").set_dim((1, 2, 1, 16))
    made.sub(p, most).set_output(True)


def _others(made: Any) -> None:
    p = scores(made)
    other = made.scale(p, made.tensor_scalar(2.0))
    most = made.reduction(other, MAX).set_dim((1, 2, 8, 1))
    made.sub(p, most, name="shift").set_output(True)


def _unscaled(made: Any) -> None:
    weights, _ = made.softmax(scores(made))
    drawn = made.rng(made.tensor_scalar(1), made.tensor_scalar(2), bernoulli_probability=0.5)
    dropped = made.mul(weights, drawn.set_dim((1, 2, 8, 16)), name="drop")
    made.matmul(dropped, made.tensor((1, 2, 16, 32)), name="bmm2").set_output(True)


def _v_transposed(made: Any) -> None:
    weights, _ = made.softmax(scores(made))
    v = made.transpose(made.tensor((1, 2, 32, 16)), (0, 1, 3, 2))
    made.matmul(weights, v, name="bmm2").set_output(True)


def _rank_three(made: Any) -> None:
    made.matmul(made.tensor((2, 8, 32)), made.tensor((2, 32, 16)), name="bmm").set_output(True)


def _larger(made: Any) -> None:
    ended(made, made.add(scores(made), made.tensor((4, 2, 8, 16)), name="more"))


def _length_without_mask(made: Any) -> None:
    weights, _ = made.softmax(scores(made))
    length = made.tensor((1, 1, 1, 1), data_type=cudnn.data_type.INT32, name="n")
    v = made.tensor((1, 2, 16, 32))
    made.matmul(weights, v, name="bmm2", k_override=length).set_output(True)


def _head_dim(made: Any) -> None:
    length = made.tensor((1, 1, 1, 1), data_type=cudnn.data_type.INT32, name="n")
    q, k = made.tensor((1, 2, 8, 32)), made.tensor((1, 2, 32, 16))
    made.matmul(q, k, k_override=length, name="bmm1").set_output(True)


def _dump_of_nothing(made: Any) -> None:
    drawn = made.rng(
        made.tensor_scalar(1), made.tensor_scalar(2), bernoulli_probability=0.5, name="rng"
    )
    drawn.set_dim((1, 2, 8, 16)).set_output(True)
    ended(made, scores(made))


def _rounded_bias(made: Any) -> None:
    whole = made.identity(made.tensor((1, 1, 8, 16), name="b"), name="whole")
    ended(made, made.bias(scores(made), whole.set_data_type(cudnn.data_type.INT8)))


def _rounded_positions(made: Any) -> None:
    p = scores(made)
    row = made.gen_index(p, 2, name="rows").set_data_type(HALF)
    keep = made.cmp_ge(row, made.gen_index(p, 3))
    ended(made, made.binary_select(p, made.tensor_scalar(-1e20), keep))


def _mask_of_integers(made: Any) -> None:
    weights, _ = made.softmax(scores(made))
    mask = made.tensor((1, 2, 8, 16), data_type=cudnn.data_type.INT32)
    v = made.tensor((1, 2, 16, 32))
    made.matmul(made.mul(weights, mask, name="drop"), v).set_output(True)


def _nine_masks(made: Any) -> None:
    p, low = scores(made), made.tensor_scalar(-1e20)
    for n in range(9):
        mask = made.tensor((1, 1, 8, 16), data_type=cudnn.data_type.BOOLEAN, name=f"mask{n}")
        p = made.binary_select(p, low, mask)
    ended(made, p)


MISFITS = {
    _nine_masks: "matmul 'bmm2' ends an attention with 9 tensors that are added or that mask",
    _mask_of_integers: "mul 'drop' multiplies weights by something else than a mask",
    _rounded_bias: "identity 'whole' rounds to data_type.INT8",
    _rounded_positions: "gen_index 'rows' rounds to data_type.HALF",
    _length_without_mask: "matmul 'bmm2' ends an attention of which a product has the length n",
    _head_dim: "matmul 'bmm1' is given k_override",
    _dump_of_nothing: "rng 'rng' writes rng::Y, by which nothing is dropped",
    _larger: r"add 'more' makes \(4, 2, 8, 16\) of scores of \(1, 2, 8, 16\)",
    _tanh: "tanh 'cap' is no part of attention",
    _no_softmax: "matmul 'bmm2' multiplies neither q by k nor a softmax by v",
    _only_scores: "matmul 'bmm1' writes bmm1::C to memory",
    _late_scale: "scale 'late' scales scores after a bias or a mask",
    _late_bias: "add 'late' adds to scores after a mask",
    _weak_mask: "binary_select 'select' masks with -1.0",
    _strange_mask: "matmul 'bmm2' ends an attention whose masks are neither lengths nor one",
    _equal: "cmp_eq 'same' tests for equality",
    _heads: "gen_index 'heads' makes positions of something else",
    _multiplied: "mul 'masked' multiplies by a tensor",
    _s_is_output: "softmax 'softmax' writes softmax::S to memory",
    _after: "relu 'after' is no part of attention",
    _columns: "reduction 'columns' reduces neither",
    _others: "sub 'shift' subtracts neither",
    _unscaled: "matmul 'bmm2' ends an attention whose dropout is not scaled by 2",
    _v_transposed: "matmul 'bmm2' takes a v that is transposed",
    _rank_three: r"matmul 'bmm' multiplies \(2, 8, 32\) by",
}


@pytest.mark.parametrize("declare", MISFITS, ids=lambda declare: declare.__name__)
def test_misfits(declare: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the first node that does not fit is named, and why; the CPU runs the graph."""
    made = cudnn.pygraph("g", handle=cudnn.create_handle(device="cpu"), **GRAPH)
    declare(made)
    assert isinstance(made.lowered.problem, Program)
    monkeypatch.setattr(placement, "default_target", lambda: KNOWN["sm_90a"])
    made = cudnn.pygraph("g", **GRAPH)
    declare(made)
    with pytest.raises(
        NotSupported, match=f"'g' runs on cuda:0, .* not attention: {MISFITS[declare]}"
    ):
        made.validate()


def test_types_that_kernels_lack(on_gpu: None) -> None:
    """Attention in a type that no kernel has is refused with every plan's reason."""
    with pytest.raises(NotSupported, match="No plan runs this graph"):
        mha(Mha(dtype="float32")).graph.validate()


def gated(gate: Any) -> Any:
    """Attention whose probabilities a tensor multiplies, and what it is by definition."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 4, 6, 8))
    types = dict.fromkeys(
        ("io_data_type", "intermediate_data_type", "compute_data_type"), cudnn.data_type.DOUBLE
    )
    graph = cudnn.pygraph(**types)
    given = (q, k.swapaxes(2, 3), v, gate)
    tensors = [graph.tensor_like(x) for x in given]
    weights, *_ = graph.softmax(graph.matmul(*tensors[:2]))
    o = graph.matmul(graph.mul(weights, tensors[3]), tensors[2]).set_output(True)
    out = np.empty_like(q)
    graph.build()
    graph.execute({**dict(zip(tensors, given, strict=True)), o: out})
    p = np.exp(q @ k.swapaxes(2, 3))
    return out, (p / p.sum(-1, keepdims=True) * gate) @ v


@pytest.mark.parametrize("dim", [(1, 4, 1, 1), (1, 4, 6, 1)])
def test_a_factor_is_no_mask(dim: tuple[int, ...]) -> None:
    """Floats that are one for all keys multiply, and drop nothing."""
    found, wanted = gated(np.random.default_rng(1).random(dim))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_mask_is_of_zeros_and_ones() -> None:
    """Floats with one for each key are a mask; in host memory, of others is told."""
    mask = np.random.default_rng(1).integers(0, 2, (1, 4, 6, 6)).astype(float)
    found, wanted = gated(mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    with pytest.raises(InvalidVariantPackError, match=r"expected 0 where .* got 0.5; give what"):
        gated(0.5 * mask)


def test_numbers_in_packs() -> None:
    """What the graph takes for granted of a number in the pack is checked by ``execute``."""
    case = Mha(causal=0, fill="value", dropout="rng", dtype="float64")
    built = primitives(case, arrays(case))
    built.graph.build()
    o = built.outputs["o"]
    pack = {**built.pack, o: np.empty(o.get_dim())}
    built.graph.execute(pack)
    named = {t.get_name(): t for t in pack}
    for name, wrong, said in (
        ("fill", -5.0, r"fill \(uid \d+\): expected a number of at most -10000"),
        ("fill", np.full((1, 1, 1, 1), -5, np.float32), "got -5.0"),
        ("inverse", 1.5, r"inverse \(uid \d+\): expected 2, the inverse"),
        ("fill", None, "is missing"),
    ):
        with pytest.raises(InvalidVariantPackError, match=said):
            built.graph.execute({**pack, named[name]: wrong})
    for fill in (-1e9, -2e9):
        built.graph.execute({**pack, named["fill"]: late(np.full((1, 1, 1, 1), fill, np.float32))})
    uids = {t.get_uid(): x for t, x in pack.items()}
    built.graph.execute(uids)


@pytest.mark.parametrize("dtype", ["INT32", "INT64"])
def test_masks_of_whole_numbers_in_packs(dtype: str) -> None:
    """What masked scores are set to may be an integer: as a number of the pack, too."""
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 8), dtype=np.float32)
    graph = cudnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT)
    q, v = graph.tensor_like(x), graph.tensor_like(x)
    k = graph.tensor_like(x.swapaxes(2, 3))
    kind = cudnn.data_type[dtype]
    fill = graph.tensor((1, 1, 1, 1), data_type=kind, is_pass_by_value=True, name="fill")
    scores = graph.matmul(q, k)
    keep = graph.cmp_ge(graph.gen_index(scores, 2), graph.gen_index(scores, 3))
    weights, _ = graph.softmax(graph.binary_select(scores, fill, keep))
    o = graph.matmul(weights, v).set_output(True)
    graph.build()
    assert isinstance(graph.lowered.problem, Problem)
    results = []
    for number in (-(10**6), np.int32(-(10**6)), np.array(-(10**6), dtype.lower())):
        results.append(np.empty_like(x))
        graph.execute({q: x, k: x.swapaxes(2, 3), v: x, fill: number, o: results[-1]})
        assert np.array_equal(results[-1], results[0])
    with pytest.raises(InvalidVariantPackError, match=r"fill .* at most -10000, .* got -5; pass"):
        graph.execute({q: x, k: x.swapaxes(2, 3), v: x, fill: -5, o: results[0]})


def test_strides_of_sizes_1_transpose_nothing() -> None:
    """A reshape that swaps the last two axes of k does so whatever the strides of its one head."""
    made = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    q = made.tensor((2, 1, 8, 4))
    # As views of (B, S, 1, D) are.
    k = made.tensor((2, 1, 16, 4), (64, 4, 4, 1))
    k_t = made.reshape(k).set_dim((2, 1, 4, 16)).set_stride((64, 64, 1, 4))
    weights, _ = made.softmax(made.matmul(q, k_t))
    made.matmul(weights, made.tensor((2, 1, 16, 4))).set_output(True)
    made.validate()
    assert isinstance(made.lowered.problem, Problem)


@pytest.mark.parametrize("scaled", ["q", "k"])
@pytest.mark.parametrize("number_first", [False, True])
def test_a_number_that_is_known_is_no_q(scaled: str, number_first: bool) -> None:
    """Where q, or k, has one element as its scale has, packs hold it, and not the scale."""
    made = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    dims = {"q": (1, 1, 1, 1), "k": (1, 1, 1, 3), "v": (1, 1, 3, 2)}
    if scaled == "k":
        dims = {"q": (1, 1, 2, 1), "k": (1, 1, 1, 1), "v": (1, 1, 1, 2)}
    t = {name: made.tensor(dim, name=name).set_alignment(4) for name, dim in dims.items()}
    two = made.tensor_scalar(2.0)
    factors = (two, t[scaled]) if number_first else (t[scaled], two)
    product = made.matmul(*({**t, scaled: made.mul(*factors)}[name] for name in "qk"))
    weights, _ = made.softmax(product)
    o = made.matmul(weights, t["v"]).set_output(True)
    made.build()
    assert isinstance(made.lowered.problem, Problem)
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal(dim).astype(np.float32) for name, dim in dims.items()}
    result = np.zeros(o.get_dim(), np.float32)
    made.execute({**{t[name]: x[name] for name in t}, o: result})
    exponentials = np.exp(2 * x["q"].astype(np.float64) @ x["k"])
    expected = exponentials / exponentials.sum(-1, keepdims=True) @ x["v"]
    np.testing.assert_allclose(result, expected, rtol=1e-5)
