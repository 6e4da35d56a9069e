"""Ragged tensors: declarations, refusals, what packs may hold, results."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dlattn as cudnn
from tests.unit.producers import late
from tests.unit.valid_graphs import FLOAT, HALF, Backward, Forward, Q, bshd, lengths

NotSupported = cudnn.cudnnGraphNotSupportedError
INT32 = cudnn.data_type.INT32


def offset(made, name="offset", dim=(3, 1, 1, 1), **attributes):
    return made.graph.tensor(dim, name=name, **{"data_type": INT32, **attributes})


def ragged(*roles, kind=Forward, **arguments):
    """A graph in which some of its tensors are ragged, with offsets of their own."""
    made = kind(stride=bshd)
    made.sdpa(**{name: give(made.graph) for name, give in arguments.items()})
    for role in roles:
        getattr(made, role).set_ragged_offset(offset(made, f"{role} offset"))
    return made


@pytest.mark.parametrize("roles", ["q", "k", "v", "kv", "qo", "qkvo"])
def test_any_tensor_may_be_ragged(roles):
    """Alone or together: the problem says that some are, the geometry which."""
    lowered = ragged(*roles).graph.lowered
    assert lowered.problem.ragged
    assert {r for r, spec in lowered.geometry.tensors.items() if spec.ragged} == set(roles)
    for role in roles:
        assert lowered.geometry.tensors[role].stride[0] == 0
        assert lowered.tensors[f"{role}_offset"].get_name() == f"{role} offset"


def test_without_offsets_nothing_is_ragged():
    """The code of other problems does not change."""
    assert not Forward().sdpa().graph.lowered.problem.ragged


def test_offsets_may_be_set_after_the_call_and_shared():
    """One tensor of offsets serves several; it gets a uid, and is one tensor of the graph."""
    made = Forward(stride=bshd).sdpa()
    shared = cudnn.pygraph().tensor((3, 1, 1, 1), data_type=INT32)
    made.q.set_ragged_offset(shared)
    made.k.set_ragged_offset(shared)
    made.graph.build_operation_graph()
    assert shared.get_uid() > 0
    with pytest.raises(ValueError, match="is built"):
        shared.set_dim((4, 1, 1, 1))


@pytest.mark.parametrize("batch_stride", [0, 1, 99990001])
def test_gradients_in_entries_take_no_batch_stride_of_packed_inputs(batch_stride):
    """The batch stride of a ragged q says nothing: a dQ that is not ragged has entries behind one
    another, in the order that q has its tokens, without gaps."""
    made = ragged("q", kind=Backward, use_padding_mask=lambda _: True)
    _, heads, rows, columns = Q
    made.q.set_stride((batch_stride, columns, heads * columns, 1))
    made.graph.validate()
    strides = (rows * heads * columns, columns, heads * columns, 1)
    assert tuple(made.gradients[0].get_stride()) == strides


def test_ragged_stats_are_packed_by_token():
    """Stats without strides have the heads of a token side by side; with them, theirs."""
    made = ragged("q", "stats")
    made.stats.set_output(True)
    made.validate()
    assert made.stats.get_stride() == [32, 1, 4, 1]


def test_lengths_that_nothing_tells():
    """Ragged o beside padded q needs lengths; given, or from q's offsets, they will do."""
    with pytest.raises(ValueError, match="o' has a ragged offset, but nothing says how long") as it:
        made = ragged("o")
        made.o.set_name("'o'")
        made.validate()
    assert "seq_len_q" in str(it.value)
    ragged("q", "o").validate()
    ragged("o", use_padding_mask=lambda _: True, seq_len_q=lengths).validate()
    ragged("q", "k", use_padding_mask=lambda _: True).validate()
    with pytest.raises(ValueError, match="use_padding_mask=True without seq_len_q"):
        ragged(use_padding_mask=lambda _: True).validate()


def test_lengths_that_are_there_to_be_read():
    """Lengths without use_padding_mask, which a function of scores may read, are nobody's: ragged o
    would have whole sequences, from every offset on."""
    given = {"seq_len_q": lengths, "score_mod": lambda _: lambda graph, score: graph.tanh(score)}
    with pytest.raises(ValueError, match="o has a ragged offset, but nothing says how long"):
        made = ragged("o", **given)
        made.o.set_name("o")
        made.validate()
    ragged("q", "o", **given).validate()
    ragged("o", use_padding_mask=lambda _: True, **given).validate()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda o: o.set_dim((2, 1, 1, 1)), ValueError, r"expected dim \(3, 1, 1, 1\)"),
        (lambda o: o.set_dim((3,)).set_stride((1,)), ValueError, r"expected dim \(3, 1, 1, 1\)"),
        (lambda o: o.set_stride((2, 1, 1, 1)), ValueError, "a first stride of 1"),
        (lambda o: o.set_is_virtual(True), ValueError, "must be a tensor in memory"),
        (lambda o: o.set_data_type(HALF), ValueError, "q offset is .*HALF; expected INT32 or"),
    ],
)
def test_wrong_offsets(change, error, said):
    """Of another shape, type or kind, they are refused by name."""
    made = ragged("q")
    change(made.q.attributes.ragged_offset)
    with pytest.raises(error, match=said):
        made.validate()


def test_what_cannot_be_ragged():
    """A bias, lengths, and a tensor whose tokens share memory."""
    made = Forward(stride=bshd)
    bias = made.graph.tensor((2, 4, 8, 12), name="bias").set_ragged_offset(offset(made))
    with pytest.raises(NotSupported, match="bias has a ragged offset; q, o, "):
        made.sdpa(bias=bias).validate()
    made = ragged("q")
    made.q.set_stride((64, 16, 0, 1))
    with pytest.raises(ValueError, match="the stride of its tokens must be at least 1"):
        made.validate()


def test_bounds_of_all_tokens():
    """They need a ragged tensor and an int of at least 1; the geometry has them."""
    made = Backward(stride=bshd)
    made.sdpa(max_total_seq_len_q=9, max_total_seq_len_kv=20)
    with pytest.raises(NotSupported, match="max_total_seq_len_q without a ragged tensor"):
        made.validate()
    made.q.set_ragged_offset(offset(made))
    geometry = made.graph.lowered.geometry
    assert (geometry.most_tokens_q, geometry.most_tokens_kv) == (9, 20)
    for wrong in (0, 1.5, True):
        with pytest.raises(RuntimeError, match="max_total_seq_len_q must be"):
            Backward().sdpa(max_total_seq_len_q=wrong)


def test_keys_of_caches_tell_ragged_graphs_apart():
    """A ragged graph is another graph."""
    assert ragged("q").graph.key() != ragged().graph.key()


# Packs --------------------------------------------------------------------------------------------

LENGTHS = (5, 8)
ROWS = (0, 5 * 64, 13 * 64)


def packed(rng, tokens, heads, columns):
    return rng.standard_normal((tokens, heads, columns)).astype(np.float32)


class Packed:
    """A built forward of ragged q, k, v, o, and a pack for it."""

    def __init__(self, with_lengths=False):
        rng = np.random.default_rng(0)
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FLOAT, handle=cudnn.create_handle(device="cpu")
        )
        self.memory = [packed(rng, 13, 4, 16) for _ in range(3)] + [np.empty((13, 4, 16), "f4")]
        dim = (2, 4, 8, 16)
        self.tensors = [self.graph.tensor(dim, bshd(dim), name=name) for name in "qkv"]
        self.lengths = lengths(self.graph) if with_lengths else None
        o, _ = self.graph.sdpa(
            *self.tensors, is_inference=True, use_padding_mask=with_lengths,
            seq_len_q=self.lengths, seq_len_kv=self.lengths,
        )  # fmt: skip
        self.tensors.append(o.set_output(True).set_dim(dim).set_stride(bshd(dim)))
        self.offset = self.graph.tensor((3, 1, 1, 1), data_type=INT32, name="offset")
        for t in self.tensors:
            t.set_ragged_offset(self.offset)
        self.graph.build()
        self.pack = dict(zip(self.tensors, self.memory, strict=True))
        self.pack[self.offset] = np.array(ROWS, np.int32).reshape(3, 1, 1, 1)
        if with_lengths:
            self.pack[self.lengths] = np.array(LENGTHS, np.int32).reshape(2, 1, 1, 1)

    def expected(self):
        q, k, v = self.memory[:3]
        parts = []
        for first, last in ((0, 5), (5, 13)):
            part = [x[first:last].astype(float).swapaxes(0, 1) for x in (q, k, v)]
            weights = np.exp(part[0] @ part[1].swapaxes(1, 2))
            parts.append((weights / weights.sum(-1, keepdims=True)) @ part[2])
        return np.concatenate(parts, axis=1).swapaxes(0, 1)

    def run(self, **changes):
        names = {"q": 0, "o": 3}
        pack = self.pack | {self.tensors[names[role]]: x for role, x in changes.items()}
        self.graph.execute(pack)


@pytest.mark.parametrize("rank", [1, 3])
def test_packs_of_packed_memory(rank):
    """(tokens, heads, columns), and memory of one dimension, are taken."""
    made = Packed()
    out = np.full((13, 4, 16), np.nan, "f4")
    made.run(q=made.memory[0].reshape(-1) if rank == 1 else made.memory[0], o=out)
    assert np.allclose(out, made.expected(), rtol=1e-4, atol=1e-5)


def test_packs_with_addresses():
    """An address is a tensor, too."""
    made = Packed()
    made.run(q=made.memory[0].ctypes.data)
    assert np.allclose(made.memory[3], made.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((13, 16, 4), "f4"),
        np.zeros((13, 8, 16), "f4")[:, ::2],
        np.zeros((13, 4, 32), "f4")[:, :, :16],
        np.zeros((2, 4, 8, 16), "f4"),
        np.zeros((2, 2, 2, 2, 2), "f4"),
        np.zeros(2000, "f4")[::2],
    ],
)
def test_packs_of_other_layouts(wrong):
    """Other heads, columns or strides are refused with the strides that were expected."""
    with pytest.raises(
        ValueError, match=r"q .*expected \(tokens, heads, columns\).* \(64, 16, 1\)"
    ):
        Packed().run(q=wrong)


@pytest.mark.parametrize("rows", [(0, 320, 900), (-64, 0, 64)])
def test_offsets_in_host_memory_stay_inside(rows):
    """Offsets that leave a tensor on the CPU are refused."""
    made = Packed()
    made.pack[made.offset] = np.array(rows, np.int32).reshape(3, 1, 1, 1)
    with pytest.raises(ValueError, match="offset: expected offsets from 0 to at most 8"):
        made.run()


@pytest.mark.parametrize("rows", [(0, 640, 832), (768, 0, 832), (0, 832, 832)])
@pytest.mark.parametrize("shape", [(13, 4, 16), (832,), (2, 4, 8, 16)])
def test_sequences_in_host_memory_stay_inside(rows, shape):
    """Lengths that carry a sequence behind its memory are refused, where each begins inside: the
    engine would read, and write, what belongs to others."""
    made = Packed(with_lengths=True)
    if len(shape) == 4:
        # By tokens, as declared.
        memory = [np.zeros((2, 8, 4, 16), "f4").swapaxes(1, 2) for _ in made.tensors]
        rows = tuple(row + 192 for row in rows)
    else:
        memory = [x.reshape(shape) for x in made.memory]
    made.pack |= dict(zip(made.tensors, memory, strict=True))
    made.run()
    made.pack[made.offset] = np.array(rows, np.int32).reshape(3, 1, 1, 1)
    made.pack[made.lengths] = np.full((2, 1, 1, 1), 8, np.int32)
    with pytest.raises(
        ValueError, match="offset: sequence . begins at .* and ends, with its length"
    ):
        made.run()


class Interrupted(dict):
    """A pack beside each look-up of which another thread makes a call of its own."""

    def __init__(self, pack, call):
        super().__init__(pack)
        self.call = call

    def get(self, key, default=None):
        thread = threading.Thread(target=self.call)
        thread.start()
        thread.join()
        return super().get(key, default)


def fewer_tokens(made, rows):
    """A pack of two tokens."""
    short = {t: memory[:2].copy() for t, memory in made.pack.items() if t is not made.offset}
    return short | {made.offset: np.array(rows, np.int32).reshape(3, 1, 1, 1)}


@pytest.mark.parametrize("begin", [0, 4 * 64, 3 * 64 + 1])
def test_results_in_host_memory_share_no_rows(begin):
    """A sequence of o may not begin within another, whichever comes first."""
    made = Packed(with_lengths=True)
    made.pack[made.lengths] = np.array([5, 5], np.int32).reshape(2, 1, 1, 1)
    for rows in ((0, begin, 13 * 64), (begin, 0, 13 * 64)):
        made.pack[made.offset] = np.array(rows, np.int32).reshape(3, 1, 1, 1)
        with pytest.raises(cudnn.InvalidVariantPackError, match="rows in common.* of their own"):
            made.run()
    made.pack[made.offset] = np.array((5 * 64, 0, 13 * 64), np.int32).reshape(3, 1, 1, 1)
    made.pack[made.lengths] = np.array([8, 5], np.int32).reshape(2, 1, 1, 1)
    made.run()


def test_a_thread_with_fewer_tokens():
    """Offsets are checked against the tensors of their own call: those of a call at the same time
    may hold less."""
    made = Packed()
    short = fewer_tokens(made, (0, 64, 128))
    made.graph.execute(Interrupted(made.pack, lambda: made.graph.execute(short)))
    assert np.allclose(made.memory[3], made.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_address", [False, True])
def test_a_thread_with_more_tokens(by_address):
    """Offsets that leave the tensors of their own call are refused, where those of a call at the
    same time hold more, or do not tell."""
    made = Packed()
    pack = {t: x.ctypes.data if by_address else x for t, x in made.pack.items()}
    wrong = fewer_tokens(made, ROWS)
    with pytest.raises(ValueError, match="offset: expected offsets from 0 to at most 192"):
        made.graph.execute(Interrupted(wrong, lambda: made.graph.execute(pack)))


def test_offsets_and_lengths_that_jax_still_computes():
    """They are waited for before they are checked: until then their memory holds anything."""
    made = Packed(with_lengths=True)
    for first in (8, 5, 7, 6):
        numbers = (0, 64 * first, 64 * 13), (first, 13 - first)
        for t, own in zip((made.offset, made.lengths), numbers, strict=True):
            made.pack[t] = late(np.array(own, np.int32).reshape(-1, 1, 1, 1))
        made.graph.execute(made.pack)


def test_through_the_wrapper():
    """A Graph finds offsets like other inputs, and makes room for as many tokens as q has."""
    made = Packed()
    rows = made.pack[made.offset]
    dim = (2, 4, 8, 16)
    with cudnn.Graph(
        inputs=["q", "k", "v", rows],
        outputs=["sdpa::O", "sdpa::Stats"],
        io_data_type=cudnn.data_type.FLOAT,
        handle=cudnn.create_handle(device="cpu"),
    ) as graph:
        given = [graph.tensor(dim, bshd(dim), name=name) for name in "qkv"]
        outputs = graph.sdpa(*given, generate_stats=True, name="sdpa")
        shared = graph.tensor_like(rows)
        for t in (*given, outputs[0]):
            t.set_ragged_offset(shared)
        for t in outputs:
            t.set_output(True)
    o, stats = graph(*made.memory[:3], rows)
    assert o.shape == (13, 4, 16) and stats.shape == (2, 4, 8, 1)
    assert np.allclose(o, made.expected(), rtol=1e-4, atol=1e-5)
    assert np.isneginf(stats[0, :, 5:]).all() and np.isfinite(stats[0, :, :5]).all()
    with pytest.raises(RuntimeError, match="does not tell how many tokens"):
        graph(made.memory[0].reshape(-1), *made.memory[1:3], rows)


@pytest.mark.parametrize("batch_stride", [0, 1, 99990001])
def test_other_shapes_take_no_order_from_batch_strides(batch_stride):
    """Packed tokens stay side by side when other shapes are given without strides, though the
    declared batch stride, which says nothing, is the least: each sequence attends to itself."""
    heads, columns = 2, 4
    handle = cudnn.create_handle(device="cpu")
    graph = cudnn.pygraph(io_data_type=FLOAT, handle=handle, is_override_shape_enabled=True)
    begin = graph.tensor((3, 1, 1, 1), data_type=INT32, uid=4)
    strides = (batch_stride, columns, heads * columns, 1)
    q, k, v = (graph.tensor((2, heads, 4, columns), strides, uid=uid) for uid in (1, 2, 3))
    o, _ = graph.sdpa(q, k, v, is_inference=True, use_padding_mask=True)
    o.set_output(True).set_uid(5)
    for t in (q, k, v, o):
        t.set_alignment(4).set_ragged_offset(begin)
    graph.build()
    ends = [0, 5, 9, 12]
    x = np.random.default_rng(0).standard_normal((3, 12, heads, columns)).astype(np.float32)
    out, offsets = np.zeros_like(x[0]), np.array(ends, np.int32).reshape(4, 1, 1, 1)
    # Memory in one dimension has no strides by which it could be refused.
    pack = {uid: it.ravel() for uid, it in enumerate((*x, offsets * heads * columns, out), 1)}
    pack[4] = pack[4].reshape(4, 1, 1, 1)
    dims = [*3 * [(3, heads, 5, columns)], (4, 1, 1, 1)]
    graph.execute(pack, override_uids=[1, 2, 3, 4], override_shapes=dims)
    for first, last in zip(ends, ends[1:], strict=False):
        q, k, v = x[:, first:last].astype(np.float64).swapaxes(1, 2)
        weights = np.exp(q @ k.swapaxes(1, 2))
        expected = weights / weights.sum(-1, keepdims=True) @ v
        np.testing.assert_allclose(out[first:last].swapaxes(0, 1), expected, rtol=1e-4, atol=1e-5)
