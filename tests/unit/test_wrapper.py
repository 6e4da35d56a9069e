"""``Graph``: declared in a with block, called like a function."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import dlattn as cudnn
from dlattn.graph import wrapper
from dlattn.plans.reference import Reference
from tests.plans import put_plans

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
DIM = (2, 3, 5, 8)
SCALE = 0.35


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(DIM).astype(np.float32) for _ in range(3)]


def attention(q, k, v, scale=SCALE):
    """softmax(q k^T * scale) v and its log-sum-exp, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.exp(scale * q @ k.swapaxes(2, 3))
    total = scores.sum(-1, keepdims=True)
    return scores / total @ v, np.log(total)


def declared(qkv, names=("q", "k", "v"), stats=True, **arguments):
    """A built fp32 graph of q, k and v with outputs called o and stats."""
    inputs = [f"SDPA::{name}" for name in names]
    outputs = ["o", "stats"] if stats else ["o"]
    arguments = {"inputs": inputs, "outputs": outputs, **arguments}
    with cudnn.Graph(io_data_type=FLOAT, **arguments) as graph:
        q, k, v = qkv
        o, lse = graph.sdpa(q=q, k=k, v=v, attn_scale=SCALE, generate_stats=stats, name="SDPA")
        o.set_output(True).set_name("o")
        if stats:
            lse.set_output(True).set_name("stats")
    return graph


def assert_close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=1e-5, atol=1e-5)


# Calls --------------------------------------------------------------------------------------------


def test_several_outputs_are_a_list(qkv):
    """A positional call returns its outputs in the order asked for."""
    o, stats = declared(qkv)(*qkv)
    expected = attention(*qkv)
    assert_close(o, expected[0])
    assert_close(stats, expected[1])
    stats, o = declared(qkv, outputs=["stats", "o"])(*qkv)
    assert_close(o, expected[0])


def test_one_output_is_itself(qkv):
    """A single output is not wrapped."""
    assert_close(declared(qkv, stats=False)(*qkv), attention(*qkv)[0])


def test_inputs_in_any_order(qkv):
    """The order of inputs is the user's."""
    q, k, v = qkv
    graph = declared(qkv, names=("v", "q", "k"))
    assert_close(graph(v, q, k)[0], attention(q, k, v)[0])


def test_calls_with_other_data(qkv):
    """The tensors of the declaration are examples: any others of their form will do."""
    graph = declared(qkv)
    others = [x + 1 for x in qkv]
    assert_close(graph(*others)[0], attention(*others)[0])


def to_numpy(x):
    return np.asarray(x)


def to_torch(x):
    return pytest.importorskip("torch").from_numpy(x)


def to_jax(x):
    return pytest.importorskip("jax").numpy.asarray(x)


@pytest.mark.parametrize("convert", [to_numpy, to_torch, to_jax])
def test_outputs_come_back_in_the_callers_framework(qkv, convert):
    """NumPy, torch and JAX callers get arrays of their own kind, in both kinds of call."""
    q, k, v = map(convert, qkv)
    graph = declared((q, k, v))
    outputs = graph(q, k, v)
    given = graph({"SDPA::q": q, "SDPA::k": k, "SDPA::v": v})
    assert {type(x) for x in (*outputs, given["o"], given["stats"])} == {type(q)}
    for o in (outputs[0], given["o"]):
        assert_close(o, attention(*qkv)[0])


def test_bfloat16_of_jax(qkv):
    """A bf16 result crosses to JAX as bf16."""
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x, jax.numpy.bfloat16) for x in qkv)
    with cudnn.Graph(inputs=["n::q", "n::k", "n::v"], outputs=["n::O"]) as graph:
        o, _ = graph.sdpa(q, k, v, attn_scale=SCALE, is_inference=True, name="n")
        o.set_output(True)
    result = graph(q, k, v)
    assert result.dtype == ml_dtypes.bfloat16
    expected = attention(*(np.asarray(x, np.float32) for x in (q, k, v)))[0]
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=2e-2, atol=2e-2)


def test_calls_by_key(qkv):
    """Keys may be ports, positions, names, uids and graph tensors; the same dict comes back."""
    q, k, v = qkv
    with cudnn.Graph(io_data_type=FLOAT) as graph:
        q_tensor = graph.tensor_like(q)
        k_tensor = graph.tensor_like(k, name="keys").set_uid(70)
        o, stats = graph.sdpa(q_tensor, k_tensor, v, attn_scale=SCALE, generate_stats=True)
        o.set_output(True)
        stats.set_output(True).set_uid(80)
    expected = attention(q, k, v)
    mine = np.zeros(DIM, np.float32)
    for q_key in (q_tensor, "sdpa.0::q", "sdpa.0::0"):
        for k_key in (k_tensor, "keys", 70, np.int64(70), "sdpa.0::k"):
            given = {q_key: q, k_key: k, "sdpa.0::v": v, o: mine, 80: None, None: None}
            returned = graph(given)
            assert returned is given and given[o] is mine
            assert_close(mine, expected[0])
            assert_close(given[80], expected[1])


def test_tensors_declared_by_hand(qkv):
    """Tensors of g.tensor() are known to dict calls without any io names."""
    q, k, v = qkv
    with cudnn.Graph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu")) as graph:
        tensors = [graph.tensor(DIM, name=name) for name in ("a", "b", "c")]
        o, _ = graph.sdpa(*tensors, attn_scale=graph.tensor_scalar(SCALE), generate_stats=False)
        o.set_output(True)
    assert_close(graph({"a": q, "b": k, "c": v})["sdpa.0::O"], attention(q, k, v)[0])


def test_one_object_in_two_places_is_one_tensor(qkv):
    """q used as k and v too is declared once and given once."""
    q = qkv[0]
    with cudnn.Graph(io_data_type=FLOAT, inputs=["n::k"], outputs=["n::O"]) as graph:
        o, _ = graph.sdpa(q, q, q, attn_scale=SCALE, generate_stats=False, name="n")
        o.set_output(True)
    assert_close(graph(q), attention(q, q, q)[0])


def test_objects_name_their_tensors(qkv):
    """The objects of the declaration can be listed as inputs, inside the block and after it."""
    q, k, v = qkv
    graph = declared(qkv, inputs=[v, k, q])
    assert_close(graph(v, k, q)[0], attention(q, k, v)[0])
    graph.set_io_tuples([k, q, v], ["stats", "o"])
    assert_close(graph(k, q, v)[1], attention(q, k, v)[0])


@pytest.mark.parametrize("listed", [False, True])
def test_declaring_does_not_keep_memory(qkv, listed):
    """Once built, a graph holds none of the tensors that it was declared from, or that it lists."""
    temporary = [x.copy() for x in qkv]
    gone = [weakref.ref(x) for x in temporary]
    graph = declared(temporary, **({"inputs": [*temporary]} if listed else {}))
    del temporary
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert_close(graph(*qkv)[0], attention(*qkv)[0])


def test_lengths_and_scale_as_tensors(qkv):
    """Optional tensors are operands like the others."""
    q, k, v = qkv
    lengths = np.array([5, 2], np.int32).reshape(2, 1, 1, 1)
    scale = np.full((1, 1, 1, 1), SCALE, np.float32)
    inputs = ["n::q", "n::k", "n::v", "n::seq_len_kv", "n::attn_scale"]
    with cudnn.Graph(io_data_type=FLOAT, inputs=inputs, outputs=["n::O"]) as graph:
        o, _ = graph.sdpa(
            q,
            k,
            v,
            attn_scale=scale,
            use_padding_mask=True,
            seq_len_kv=lengths,
            generate_stats=False,
            name="n",
        )
        o.set_output(True)
    o = graph(q, k, v, lengths, scale)
    assert_close(o[:1], attention(q[:1], k[:1], v[:1])[0])
    assert_close(o[1:], attention(q[1:], k[1:, :, :2], v[1:, :, :2])[0])


def test_tensors_of_a_function_of_scores(qkv):
    """What score_mod declares is called as other tensors are: by name, uid, tensor or object, in
    dicts and among the inputs."""
    rng = np.random.default_rng(1)
    table, row = (
        rng.standard_normal(dim).astype(np.float32) for dim in ((1, 3, 5, 5), (1, 1, 1, 5))
    )
    made = []

    def score_mod(inner, score):
        made.append(inner.tensor_like(table, name="table"))
        made.append(inner.tensor(row.shape, data_type=FLOAT, name="row"))
        return inner.mul(inner.add(score, made[0]), inner.add(made[1], inner.tensor_scalar(1.0)))

    inputs = [*(f"n::{name}" for name in "qkv"), table, "row"]
    with cudnn.Graph(io_data_type=FLOAT, inputs=inputs, outputs=["n::O"]) as graph:
        o, _ = graph.sdpa(*qkv, is_inference=True, score_mod=score_mod, name="n")
        o.set_output(True)
    q, k, v = (x.astype(np.float64) for x in qkv)
    scores = np.exp((q @ k.swapaxes(2, 3) + table) * (row + 1))
    expected = scores / scores.sum(-1, keepdims=True) @ v
    assert_close(graph(*qkv, table, row), expected)
    for t, x in zip(made, (table, row), strict=True):
        others = dict(zip(inputs[:3], qkv, strict=True)) | {made[0]: table, made[1]: row}
        del others[t]
        for key in (t, t.get_name(), t.get_uid()):
            assert_close(graph(others | {key: x})["n::O"], expected)


# Refusals -----------------------------------------------------------------------------------------


def test_errors_of_the_block_propagate():
    """An exception inside the block is the user's, and nothing is built."""
    with pytest.raises(KeyError), cudnn.Graph() as graph:
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="once its with block has ended"):
        graph()


@pytest.mark.parametrize(
    "name", ["validate", "build", "build_plans", "execute", "populate_cuda_graph", "key"]
)
def test_what_a_graph_does_itself(qkv, name):
    """The steps of a ``pygraph`` are not the caller's to take (``RuntimeError``, as in cuDNN)."""
    with pytest.raises(RuntimeError, match=f"so it has no {name}"):
        getattr(declared(qkv), name)
    assert not hasattr(declared(qkv), "no_such_thing")


def test_declaring_outside_the_block(qkv):
    """Operations before and after the block are refused."""
    for graph in (cudnn.Graph(), declared(qkv)):
        with pytest.raises(ValueError, match="inside its with block"):
            graph.sdpa(*qkv, generate_stats=False)
    with pytest.raises(ValueError, match="one with block"), declared(qkv):
        pass


def test_node_names_are_unique(qkv):
    """Ports would be ambiguous otherwise."""
    with pytest.raises(ValueError, match="Two nodes are named 'n'"), cudnn.Graph() as graph:
        for _ in range(2):
            graph.sdpa(*qkv, generate_stats=False, name="n")


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (["SDPA::q", "SDPA::k"], ["o", "stats"], "leave out 'SDPA::v'"),
        (["SDPA::q", "SDPA::k", "SDPA::v"], ["o"], "leave out 'stats'"),
        (
            ["SDPA::q", "SDPA::k", "SDPA::v", "SDPA::q"],
            ["o", "stats"],
            "'SDPA::q' more than once; .* list it once",
        ),
        (["SDPA::q", "SDPA::k", "SDPA::x"], ["o", "stats"], "'SDPA::x' is not a tensor"),
        (["SDPA::q", "SDPA::k", "SDPA::v", "o"], ["stats"], "inputs has 'o'"),
        (["SDPA::q", "SDPA::k", "SDPA::v"], ["o", 1], "outputs has 'SDPA::q'"),
        (["SDPA::q", "SDPA::k", "SDPA::v"], None, "both inputs and outputs"),
    ],
)
def test_io_names_must_cover_the_graph(qkv, inputs, outputs, said):
    """Every tensor with memory is listed once, on its own side."""
    with pytest.raises(ValueError, match=said):
        declared(qkv, inputs=inputs, outputs=outputs)


def test_virtual_tensors_cannot_be_listed(qkv):
    """Stats that were not made an output have no memory to give."""
    with (
        pytest.raises(ValueError, match="'n::Stats' is virtual"),
        cudnn.Graph(inputs=["n::q", "n::k", "n::v"], outputs=["n::O", "n::Stats"]) as graph,
    ):
        o, _ = graph.sdpa(*qkv, generate_stats=True, name="n")
        o.set_output(True)


def test_wrong_calls(qkv):
    """Missing names, wrong counts, unknown keys and missing inputs are said as such."""
    nameless = declared(qkv, inputs=None, outputs=None)
    with pytest.raises(ValueError, match="needs to know the order"):
        nameless(*qkv)
    graph = declared(qkv)
    with pytest.raises(ValueError, match=r"Expected 3 tensors \('SDPA::q', .* got 2"):
        graph(*qkv[:2])
    with pytest.raises(ValueError, match="'SDPA::x' is not a tensor"):
        graph({"SDPA::x": qkv[0]})
    with pytest.raises(RuntimeError, match="lacks the inputs 'SDPA::k', 'SDPA::v'"):
        graph({"SDPA::q": qkv[0]})
    with pytest.raises(ValueError, match="SDPA::k .* expected elements"):
        graph(qkv[0], qkv[1].astype(np.float64), qkv[2])


@pytest.mark.parametrize("position", range(3))
def test_inputs_that_are_none(qkv, position):
    """None for an input is an input left out, whichever it is and however the graph is called."""
    graph, names = declared(qkv), [f"SDPA::{name}" for name in "qkv"]
    given = [None if n == position else x for n, x in enumerate(qkv)]
    for call in (given, [dict(zip(names, given, strict=True))]):
        with pytest.raises(RuntimeError, match=f"lacks the inputs '{names[position]}'; add"):
            graph(*call)


def test_several_keys_of_one_tensor(qkv):
    """They may hold one object, and each gets the output; with different ones a call is refused."""
    q, k, v = qkv
    graph = declared(qkv)
    others = {"SDPA::k": k, "SDPA::v": v}
    given = graph(others | {"SDPA::q": q, "SDPA::0": q, "o": None, "SDPA::O": None})
    assert given["o"] is given["SDPA::O"]
    assert_close(given["o"], attention(*qkv)[0])
    for other in (q + 1, None):
        with pytest.raises(ValueError, match="'SDPA::q' and 'SDPA::0' are both 'SDPA::q', and the"):
            graph(others | {"SDPA::q": q, "SDPA::0": other})


def test_handles(qkv):
    """None and "auto" follow the current stream; other strings mean nothing."""
    for handle in (None, "auto", cudnn.create_handle()):
        graph = declared(qkv, handle=handle)
        assert_close(graph(*qkv, handle=handle)[0], attention(*qkv)[0])
    with pytest.raises(RuntimeError, match="handle must be"):
        cudnn.Graph(handle="default")


# Workspace ----------------------------------------------------------------------------------------


class Hungry(Reference):
    """The reference engine, asking for memory that it does not use."""

    name = "hungry"
    workspace_size = 4096
    workspaces: list[int] = []

    def execute(self, pointers, workspace, stream):
        self.workspaces.append(workspace)
        super().execute(pointers, workspace, stream)


@pytest.fixture
def hungry(monkeypatch):
    put_plans(monkeypatch, Hungry)
    monkeypatch.setattr(Hungry, "workspaces", [])
    return Hungry.workspaces


def test_workspace_is_kept_between_calls(qkv, hungry):
    """The graph allocates its workspace once, at the end of the block."""
    graph = declared(qkv)
    assert graph.get_workspace_size() == graph.get_workspace_size_plan_at_index(0) == 4096
    graph(*qkv)
    graph(*qkv)
    assert len(hungry) == 2 and len(set(hungry)) == 1


def test_workspace_alloc_false_allocates_nothing(qkv, hungry, monkeypatch):
    """Without a workspace of its own the graph asks for one, and uses the caller's."""
    monkeypatch.setattr(wrapper, "allocate_bytes", None)
    graph = declared(qkv, workspace_alloc=False)
    with pytest.raises(RuntimeError, match="workspace_alloc=False; give 4096 bytes"):
        graph(*qkv)
    mine = np.empty(4096 + 64, np.uint8)
    mine = mine[-mine.ctypes.data % 16 :][:4096]
    graph(*qkv, workspace=mine)
    assert hungry == [mine.ctypes.data]


def test_pass_through(qkv):
    """What the graph underneath knows can be asked of the wrapper."""
    graph = declared(qkv)
    assert graph.query_tensor_attributes_of_uid(1).get_name() == "SDPA::q"
    assert '"SDPA::q"' in repr(graph)
