"""Statistics of rows that the user gives tensors for, and sinks: arguments, refusals, results."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import dlattn as cudnn
from tests.unit.valid_graphs import FLOAT, HALF, STATS, Backward, Forward, K, Q, V

HEADS = (1, 4, 1, 1)
DOUBLE = cudnn.data_type.DOUBLE
NotSupported = cudnn.cudnnGraphNotSupportedError


def declared(made, name, dim, **attributes):
    return made.graph.tensor(dim, name=name, **{"data_type": FLOAT, **attributes})


@pytest.mark.parametrize(("stats", "largest", "total"), list(product((True, False), repeat=3)))
def test_any_combination_of_statistics(stats, largest, total):
    """Each alone and all together: the problem says which, and sdpa returns o and stats only."""
    made = Forward()
    given = {"score_max": largest, "score_sum_exp": total}
    given = {name: declared(made, name, STATS) for name, wanted in given.items() if wanted}
    made.sdpa(generate_stats=stats, **given)
    assert (made.stats is None) == (not stats)
    if stats:
        made.stats.set_output(True)
    lowered = made.graph.lowered
    problem = lowered.problem
    assert (problem.stats is not None, problem.score_max, problem.score_sum_exp) == (
        stats,
        largest,
        total,
    )
    assert lowered.outputs == {"o", *given, *(["stats"] if stats else [])}


def test_what_is_left_out_is_inferred():
    """A tensor without shape, strides and type gets packed fp32 rows."""
    made = Forward()
    largest = made.graph.tensor((), (), name="largest")
    made.sdpa(score_max=largest).validate()
    assert tuple(largest.get_dim()) == STATS and largest.get_data_type() is FLOAT
    assert tuple(largest.get_stride()) == (32, 8, 1, 1)


def test_a_sink_changes_the_backward_only_by_its_gradient():
    """Stats hold all that dQ, dK and dV need of a sink; without dSink_token it is the same code."""
    problems = []
    for given in ((), ("sink_token",), ("sink_token", "dSink_token")):
        made = Backward()
        made.sdpa(**{name: declared(made, name, HEADS) for name in given})
        problems.append(made.graph.lowered.problem)
    plain, read, written = problems
    assert plain == read and not plain.sink and written.sink


@pytest.mark.parametrize(
    ("kind", "name", "dim", "attributes", "error", "said"),
    [
        (
            Forward,
            "score_max",
            (2, 4, 8, 2),
            {},
            ValueError,
            r"score_max has dim .* \(2, 4, 8, 1\)",
        ),
        (Forward, "score_max", STATS, {"data_type": HALF}, NotSupported, "score_max is .*HALF"),
        (Forward, "score_sum_exp", STATS, {"is_virtual": True}, ValueError, "is virtual"),
        (Forward, "score_sum_exp", STATS, {"stride": (32, 8, 0, 1)}, ValueError, "share an addr"),
        (Forward, "sink_token", (4,), {}, ValueError, r"four dimensions, \(1, heads, 1, 1\)"),
        (
            Forward,
            "sink_token",
            (1, 2, 1, 1),
            {},
            ValueError,
            r"sink_token has dim .*\(1, 4, 1, 1\)",
        ),
        (Forward, "sink_token", HEADS, {"data_type": HALF}, NotSupported, "sink_token is .*HALF"),
        (Forward, "sink_token", HEADS, {"is_virtual": True}, ValueError, "sink_token is virtual"),
        (Backward, "sink_token", (2, 4, 1, 1), {}, ValueError, "sink_token has dim"),
    ],
)
def test_refusals(kind, name, dim, attributes, error, said):
    """Wrong shapes, types and storage are refused by validate, in a sentence with the name."""
    made = kind()
    made.sdpa(**{name: declared(made, name, dim, **attributes)})
    with pytest.raises(error, match=said):
        made.validate()


#: What may be fp64 on the CPU.
DOUBLES = {"score_max": STATS, "score_sum_exp": STATS, "rng_dump": (2, 4, 8, 12)}


def with_doubles(names, dtype, **place):
    """A graph with dropout that writes some of these in fp64; its inputs and outputs by name."""
    graph = cudnn.pygraph(io_data_type=dtype, **place)
    inputs = {n: graph.tensor(dim, name=n) for n, dim in zip("qkv", (Q, K, V), strict=True)}
    state = [graph.tensor((1,) * 4, data_type=cudnn.data_type.INT64) for _ in range(2)]
    outputs = {name: graph.tensor(DOUBLES[name], data_type=DOUBLE, name=name) for name in names}
    arguments = {"attn_scale": 0.5, "dropout": (0.5, *state), "generate_stats": True}
    o, stats = graph.sdpa(*inputs.values(), **arguments, **outputs, compute_data_type=FLOAT)
    if dtype is DOUBLE:
        stats.set_data_type(dtype)
    outputs |= {"o": o.set_output(True), "stats": stats.set_output(True)}
    return graph, inputs | dict(zip(("seed", "offset"), state, strict=True)), outputs


def test_doubles_on_the_cpu():
    """In host memory, what is told of rows and of dropout may be fp64, and is then as fine."""
    graph, inputs, outputs = with_doubles(DOUBLES, DOUBLE, handle=cudnn.create_handle("cpu"))
    graph.build()
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(inputs[name].get_dim()) for name in "qkv"}
    given |= {name: np.full((1,) * 4, n) for name, n in (("seed", 3), ("offset", 5))}
    found = {name: np.zeros(t.get_dim()) for name, t in outputs.items()}
    tensors = inputs | outputs
    graph.execute({tensors[name]: x for name, x in (given | found).items()})
    scores = 0.5 * given["q"] @ given["k"].repeat(2, 1).swapaxes(2, 3)
    largest = scores.max(-1, keepdims=True)
    total = np.exp(scores - largest).sum(-1, keepdims=True)
    assert np.allclose(found["score_max"], largest, rtol=1e-14, atol=1e-14)
    assert np.allclose(found["score_sum_exp"], total, rtol=1e-13, atol=0)
    assert np.allclose(found["stats"], largest + np.log(total), rtol=1e-13, atol=1e-14)
    kept = cudnn.philox_dropout_mask(0.5, 3, 5, DOUBLES["rng_dump"])
    assert (found["rng_dump"] == kept).all() and 0 < kept.mean() < 1


@pytest.mark.parametrize("name", DOUBLES)
def test_doubles_elsewhere(name):
    """GPUs write fp32."""
    said = f"{name} is .*DOUBLE; plans take {name} as .*FLOAT, or on the CPU as .*DOUBLE"
    with pytest.raises(NotSupported, match=said):
        with_doubles([name], HALF, sm_version=90)[0].validate()


def test_a_gradient_needs_its_sink():
    """dSink_token alone contradicts itself at the call; of a wrong shape it is refused later."""
    made = Backward()
    gradient = declared(made, "dSink_token", HEADS)
    with pytest.raises(RuntimeError, match="dSink_token without sink_token"):
        made.sdpa(dSink_token=gradient)
    made = Backward()
    sink, gradient = (declared(made, n, d) for n, d in (("sink", HEADS), ("dSink", STATS)))
    with pytest.raises(ValueError, match="dSink has dim"):
        made.sdpa(sink_token=sink, dSink_token=gradient).validate()


def test_what_is_written_is_no_other_tensor():
    """One tensor cannot be two outputs, nor an input and an output."""
    made = Forward()
    rows = declared(made, "rows", STATS)
    with pytest.raises(RuntimeError, match="one tensor as score_max, .* as score_sum_exp"):
        made.sdpa(score_max=rows, score_sum_exp=rows)
    made = Backward()
    sink = declared(made, "sink", HEADS)
    with pytest.raises(RuntimeError, match="one tensor as dSink_token, .* as sink_token"):
        made.sdpa(sink_token=sink, dSink_token=sink)


def test_frameworks_tensors_need_a_graph_tensor():
    """A pygraph takes graph tensors for these arguments, too."""
    with pytest.raises(TypeError, match="score_max must be a tensor of the graph"):
        Forward().sdpa(score_max=np.zeros(STATS, np.float32))


@pytest.mark.parametrize("dim", [(2, 4, 8, 16), (1, 1, 1, 16)], ids=["some", "one row"])
def test_through_the_wrapper(dim):
    """A Graph finds them by their ports; given or made by the call, they are the right numbers."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, *dim)).astype(np.float32)
    sink = rng.standard_normal((1, dim[1], 1, 1)).astype(np.float32)
    largest, total = (np.zeros((*dim[:3], 1), np.float32) for _ in range(2))
    names = ["sdpa::O", "sdpa::Stats", "sdpa::score_max", "sdpa::score_sum_exp"]
    with cudnn.Graph(inputs=[q, k, v, "sdpa::sink_token"], outputs=names) as graph:
        for output in graph.sdpa(
            q, k, v, sink_token=sink, score_max=largest, score_sum_exp=total,
            generate_stats=True, name="sdpa",
        ):  # fmt: skip
            output.set_output(True)
    o, stats, made_largest, made_total = graph(q, k, v, sink)
    scores = q.astype(float) @ k.astype(float).swapaxes(2, 3)
    scores = np.concatenate([scores, np.broadcast_to(sink, (*scores.shape[:3], 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.allclose(made_largest, scores.max(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    assert np.allclose(made_total, weights.sum(-1, keepdims=True), rtol=1e-5)
    assert np.allclose(stats, made_largest + np.log(made_total), rtol=1e-5, atol=1e-5)
    share = weights[..., :-1] / weights.sum(-1, keepdims=True)
    assert np.allclose(o, share @ v, rtol=1e-4, atol=1e-5)
    graph({"sdpa::q": q, "sdpa::k": k, "sdpa::v": v, "sdpa::sink_token": sink,
           "sdpa::score_max": largest, "sdpa::score_sum_exp": total})  # fmt: skip
    assert (largest == made_largest).all() and (total == made_total).all()
