"""Graphs as bytes: what comes back, what is refused, and what it takes."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.dtypes import to_numpy
from dlattn.errors import DlattnError
from dlattn.runtime import bundle
from tests.callers import Caller
from tests.mha import Mha, arrays, primitives
from tests.primitive_strategies import mhas
from tests.unit.serial_graphs import DIM, HALF, UIDS, declared, on_cpu, restored, results, same

NotSupported = cudnn.cudnnGraphNotSupportedError


@pytest.fixture(scope="module")
def data():
    return on_cpu().serialize()


@pytest.mark.parametrize("kind", [list, bytes, bytearray, memoryview, np.uint8, np.int64])
def test_bytes_come_back(data, kind):
    """A list of bytes, in whatever it is carried, an array of any integers included, becomes a
    graph that computes the same."""
    assert type(data) is list and set(map(type, data)) == {int}
    carried = np.array(data, kind) if issubclass(kind, np.integer) else kind(bytes(data))
    graph = restored(carried)
    assert same(results(graph), results(on_cpu()))
    assert graph.key() == on_cpu().key()
    assert graph.get_execution_plan_count() == 1
    assert graph.query_tensor_attributes_of_uid(UIDS["stats"]).get_dim() == [2, 4, 8, 1]
    assert graph.get_plan_name_at_index(0) == "reference"


def test_with_a_handle(data):
    """A handle may come first; what is for the CPU does not run elsewhere."""
    handle = cudnn.create_handle(device="cpu")
    assert same(results(restored(handle, data)), results(on_cpu()))
    graph = cudnn.pygraph()
    with pytest.raises(RuntimeError, match="unknown or destroyed"):
        graph.deserialize(10**9, data)
    graph.deserialize(data)  # it is new as before
    assert same(results(graph), results(on_cpu()))


def test_a_wrapper_is_on_its_data_s_handle(data, monkeypatch):
    """Calls of a ``Graph`` that came with a handle are on that, as those of one that was made with
    it: JAX is refused where its stream is another."""
    handle, seen = cudnn.create_handle(device="cpu"), []
    monkeypatch.setattr(cudnn.Graph, "_is_unordered", lambda self, like, given: seen.append(given))
    graph = cudnn.Graph()
    graph.deserialize(handle, data)
    graph({UIDS[role]: np.ones(DIM, np.float16) for role in "qkv"})
    assert seen == [handle]
    for arguments in ((), (handle, data, data)):
        with pytest.raises(TypeError, match="deserialize takes the data, or a handle and"):
            restored(*arguments)


def test_serialised_again(data):
    """What was deserialised is serialised to the same bytes."""
    assert restored(data).serialize() == data


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_plans_are_not_pickled(duplicate):
    """A built graph, and what holds one, says what to do instead; of one that has no plans yet, a
    pickle and a deep copy compute the same."""
    qkv = [np.ones(DIM, np.float16) for _ in range(3)]
    with cudnn.Graph(inputs=qkv, outputs=["sdpa::O"]) as wrapper:
        wrapper.sdpa(*qkv, is_inference=True, name="sdpa")[0].set_output(True)
    holders = [on_cpu()] if duplicate is copy.copy else [on_cpu(), wrapper, [on_cpu()]]
    for holder in holders:
        with pytest.raises(DlattnError, match=r"neither pickled nor copied .* of serialize\(\)"):
            duplicate(holder)
    made = duplicate(declared(handle=cudnn.create_handle(device="cpu")))
    graph = pickle.loads(made) if duplicate is pickle.dumps else made
    graph.build()
    assert same(results(graph), results(on_cpu()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_take_other_shapes(duplicate):
    """Of a graph that takes other shapes, a copy does, on its own."""
    options = {"handle": cudnn.create_handle(device="cpu"), "is_override_shape_enabled": True}
    original = declared(**options)
    graph = duplicate(original)
    graph.build()
    dim = (3, 2, 5, 16)
    plain = declared(dim, handle=options["handle"])
    plain.build()
    shapes = {"override_uids": [UIDS[role] for role in "qkv"], "override_shapes": 3 * [dim]}
    assert same(results(graph, dim, **shapes), results(plain, dim))
    assert original.get_execution_plan_count() == 0


def test_text_of_a_graph():
    """``repr`` says all that was declared; the graph is then built as any other."""
    graph = declared(handle=cudnn.create_handle(device="cpu"))
    again = restored(cudnn.create_handle(device="cpu"), repr(graph))
    assert again.get_execution_plan_count() == 0 and repr(again) == repr(graph)
    again.build()
    assert same(results(again), results(on_cpu()))


@settings(max_examples=60)
@given(mhas())
def test_primitive_operations(case: Mha):
    """Graphs of primitive operations come back from bytes, and from their text."""
    built = primitives(case, arrays(case))
    built.graph.build()
    for again in (restored(built.graph.serialize()), restored(repr(built.graph))):
        assert repr(again) == repr(built.graph)
    wanted = built.run(Caller("numpy"))
    built.graph = restored(built.graph.serialize())
    got = built.run(Caller("numpy"))
    assert all(np.array_equal(got[role], wanted[role], equal_nan=True) for role in wanted)


def test_programs():
    """So do those that are no attention, with numbers that the graph keeps and enumerations."""
    graph = cudnn.pygraph(io_data_type=np.float32, handle=cudnn.create_handle(device="cpu"))
    x = graph.tensor((2, 3, 4), name="x", uid=1)
    y = graph.transpose(graph.scale(x, graph.tensor_scalar(0.5)), (0, 2, 1))
    total = graph.reduction(graph.relu(y), cudnn.reduction_mode.MAX)
    total.set_dim((2, 4, 1)).set_output(True).set_data_type(np.float32).set_uid(2)
    graph.build()
    pack = {1: np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    made = []
    for it in (graph, restored(graph.serialize())):
        it.execute(pack | {2: (out := np.zeros((2, 4, 1), np.float32))})
        made.append(out)
    assert np.array_equal(*made) and made[0].any()


@pytest.mark.parametrize("backward", [None, "as given", "with gradients"])
def test_functions_of_scores(backward):
    """A function of scores comes back as the operations that it has added, and the gradients of
    what it reads as those of the same tensors."""
    pytest.importorskip("dlattn.graph.score_mod.callback")
    FLOAT, saved = cudnn.data_type.FLOAT, {}

    def score_mod(sub, scores):
        saved["tanh"] = sub.tanh(sub.div(scores, cap))
        row, col = (sub.gen_index(scores, axis=axis) for axis in (2, 3))
        kept = sub.binary_select(sub.mul(saved["tanh"], cap), floor, sub.cmp_ge(row, col))
        return sub.add(kept, heads)

    def score_mod_bprop(sub, gradient):
        tanh, one = saved["tanh"], sub.tensor_scalar(1.0)
        return sub.mul(gradient, sub.sub(one, sub.mul(tanh, tanh)))

    graph = cudnn.pygraph("mine", HALF, FLOAT, FLOAT, handle=cudnn.create_handle(device="cpu"))
    roles = ("q", "k", "v", "o", "dO") if backward else ("q", "k", "v")
    tensors = {uid: graph.tensor(DIM, name=role, uid=uid) for uid, role in enumerate(roles, 1)}
    heads = graph.tensor((1, 4, 1, 1), data_type=FLOAT, uid=9)
    cap, floor = graph.tensor_scalar(5.0), graph.tensor_scalar(-3.0)
    if backward:
        tensors[6] = graph.tensor((*DIM[:3], 1), data_type=FLOAT, uid=6)
        more = {"score_mod_bprop": score_mod_bprop}
        if backward == "with gradients":
            more = {"score_mod_gradients": [heads]}
        made = graph.sdpa_backward(*tensors.values(), score_mod=score_mod, **more)
    else:
        made = graph.sdpa(*tensors.values(), generate_stats=False, score_mod=score_mod)[:1]
    for uid, t in enumerate(made, 20):
        t.set_output(True).set_uid(uid)
    graph.build()
    again = restored(graph.serialize())
    assert repr(again) == repr(graph) and again.key() == graph.key()
    rng = np.random.default_rng(0)
    inputs = {
        uid: rng.standard_normal(t.get_dim()).astype(np.float16) for uid, t in tensors.items()
    }
    inputs |= {9: rng.standard_normal((1, 4, 1, 1)).astype(np.float32)}
    if backward:
        inputs[6] = inputs[6].astype(np.float32) + 3
    results = []
    for it in (graph, again):
        results.append(
            {t.get_uid(): np.zeros(t.get_dim(), to_numpy(t.get_data_type())) for t in made}
        )
        it.execute(inputs | results[-1])
    assert all(
        np.array_equal(x, y) and x.any() for x, y in zip(*map(dict.values, results), strict=True)
    )


def test_what_cannot_be_serialised():
    """A graph that is not built says so."""
    with pytest.raises(RuntimeError, match="'mine' has no built plan to serialise; call build"):
        declared(handle=cudnn.create_handle(device="cpu")).serialize()


def test_into_a_new_graph_only(data):
    """Deserialising does not mix with what a graph has."""
    graph = on_cpu()
    with pytest.raises(ValueError, match="deserialised into new ones"):
        graph.deserialize(data)
    assert same(results(graph), results(on_cpu()))


# Data that is wrong -------------------------------------------------------------------------------


def sealed(**changes):
    """Data that a malicious or foreign writer made."""
    outside = json.loads(bytes(on_cpu().serialize()))
    facts = json.loads(outside["body"])
    del facts["headers"]
    return bundle.seal("graph", {**facts, **changes})


def test_deep_data(data):
    """Neither does nesting without end end the process."""
    deep = "[" * 200_000 + "]" * 200_000
    outside = json.loads(bytes(data))
    for text in (deep, json.dumps({**outside, "body": deep, "sha256": bundle._sha256(deep)})):
        with pytest.raises(RuntimeError, match="cut off or damaged"):
            restored(text.encode())
    with pytest.raises(RuntimeError, match="is no JSON"):
        restored(deep)


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_cut_off(data, cut):
    """Truncated data is damaged data."""
    with pytest.raises(RuntimeError, match="cut off or damaged"):
        restored(data[:cut])


def test_a_changed_byte(data):
    """Wherever a byte changes, nothing comes of it."""
    for place in range(0, len(data), 41):
        changed = [*data]
        changed[place] ^= 4
        with pytest.raises(DlattnError):
            restored(changed)


def test_another_version(data):
    """Of formats and kernels that this version does not have, nothing is read."""
    outside = json.loads(bytes(data))
    with pytest.raises(NotSupported, match="has format 99; this version of dlattn reads"):
        restored(json.dumps({**outside, "format": 99}).encode())
    body = json.dumps({**json.loads(outside["body"]), "headers": "0"})
    other = {**outside, "body": body, "sha256": bundle._sha256(body)}
    with pytest.raises(NotSupported, match="made by another version of dlattn"):
        restored(json.dumps(other).encode())
    with pytest.raises(RuntimeError, match="is a 'kernel cache' of dlattn; expected a 'graph'"):
        restored(cudnn.create_kernel_cache().serialize())


def test_another_device():
    """What was compiled for one architecture does not run on another."""
    with pytest.raises(NotSupported, match="serialised for sm_90a, and would run on cpu"):
        restored(cudnn.create_handle(device="cpu"), sealed(arch="sm_90a").encode())


@pytest.mark.parametrize("wrong", [5, None, [300], ["a"], {"a": 1}, object()])
def test_no_data(wrong):
    """What is no list of bytes is a TypeError."""
    with pytest.raises(TypeError, match="takes the list of bytes that serialize"):
        restored(wrong)


def mutations():
    """JSON values, of the kinds that data has."""
    numbers = st.integers(-3, 70) | st.sampled_from([2**31, 2**70, 0.5, float("nan")])
    texts = st.sampled_from(["", "HALF", "data_type.HALF", "sdpa", "__init__", "deserialize", "q"])
    leaves = st.none() | st.booleans() | numbers | texts
    return leaves | st.lists(leaves, max_size=5) | st.just({}) | st.just({"tensor": 3})


@settings(max_examples=400)
@given(st.data())
def test_hostile_data(draw):
    """Whatever a writer of sealed data says, the answer is a graph or a sentence."""
    outside = json.loads(bytes(draw.draw(st.sampled_from(HOSTILE))))
    facts = json.loads(outside["body"])
    del facts["headers"]
    for _ in range(draw.draw(st.integers(1, 3))):
        place = facts
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw.draw(st.sampled_from([*keys]))
            inner = place[key]
            if (
                not isinstance(inner, (dict, list))
                or not inner
                or draw.draw(st.integers(0, 4)) == 0
            ):
                place[key] = draw.draw(mutations())
                break
            place = inner
    try:
        graph = restored(bundle.seal("graph", facts).encode())
    except (DlattnError, TypeError):
        return
    assert graph.get_execution_plan_count() == 1


def _primitives():
    case = Mha(scale="scores", padding="qk", causal=0, bias=(True,) * 4, dropout="rng", stats=True)
    built = primitives(case, arrays(case))
    built.graph.build()
    return built.graph


HOSTILE = [graph.serialize() for graph in (on_cpu(), _primitives())]


# The wrapper --------------------------------------------------------------------------------------


def test_wrapper(data):
    """A ``Graph`` becomes the serialised one, and is called by uid, by name, or in order."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(DIM).astype(np.float16) for _ in "qkv")
    o, _ = results(on_cpu())
    graph = cudnn.Graph()
    graph.deserialize(data)
    named = graph({"q": q, "k": k, "v": v})
    numbered = graph({10: q, 11: k, 12: v})
    assert np.array_equal(named["sdpa::O"], o) and np.array_equal(numbered["sdpa::O"], o)
    ordered = cudnn.Graph(inputs=["q", "k", "v"], outputs=[20, 21])
    ordered.deserialize(graph.serialize())
    assert np.array_equal(ordered(q, k, v)[0], o)


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array])
def test_sequences_are_kept_as_they_were_read(kind):
    """A sequence of any kind is kept as the operation has read it, whatever becomes of it."""
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    graph = cudnn.pygraph(handle=cudnn.create_handle(device="cpu"), is_override_shape_enabled=True)
    permutation = kind([2, 0, 1])
    y = graph.transpose(graph.tensor_like(x).set_uid(1), permutation).set_output(True).set_uid(2)
    graph.build()
    if kind in (list, np.array):
        permutation[:] = [0, 1, 2]
    for made in (graph, restored(graph.serialize())):
        for times in (1, 2):
            given = np.concatenate(times * [x])
            result = np.empty((4, 2 * times, 3), np.float32)
            shapes = {"override_uids": [1], "override_shapes": [given.shape]}
            made.execute({1: given, 2: result}, None, **shapes)
            assert np.array_equal(result, given.transpose(2, 0, 1))
    assert y.get_dim() == [4, 2, 3]


def test_arguments_that_are_no_numbers_of_python():
    """What is an integer to Python is kept as one, and a list of tensors as it was."""
    graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
    q, k, v, o, dO, slopes = (graph.tensor(DIM) for _ in range(6))
    slopes.set_dim((1, 4, 1, 1)).set_stride((4, 1, 1, 1)).set_data_type(cudnn.data_type.FLOAT)
    stats = graph.tensor((*DIM[:3], 1), data_type=cudnn.data_type.FLOAT)
    asked = [slopes]
    outputs = graph.sdpa_backward(
        *(q, k, v, o, dO, stats),
        diagonal_band_left_bound=np.array(3),
        score_mod=lambda graph, score: graph.mul(score, slopes),
        score_mod_gradients=asked,
    )
    for t in outputs:
        t.set_output(True)
    graph.build()
    asked.clear()
    assert restored(graph.serialize()).key() == graph.key()
