"""What ``validate`` fills in where the user left something out."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.problem.layout import overlaps
from tests.unit.valid_graphs import (
    FLOAT,
    HALF,
    OUT,
    STATS,
    Backward,
    Forward,
    K,
    Q,
    V,
    bshd,
    lengths,
    row_major,
)


def test_forward_outputs_are_inferred():
    """O gets q's rows and v's head dim, stats are packed fp32; both types are set."""
    made = Forward().sdpa().validate()
    made.stats.set_output(True)
    assert tuple(made.o.get_dim()) == OUT and tuple(made.o.get_stride()) == row_major(OUT)
    assert made.o.get_data_type() is HALF
    assert tuple(made.stats.get_dim()) == STATS
    assert tuple(made.stats.get_stride()) == row_major(STATS)
    assert made.stats.get_data_type() is FLOAT


def test_output_follows_the_layout_of_q():
    """With q in (batch, sequence, heads, dim) order, O is laid out in that order."""
    made = Forward(stride=bshd).sdpa().validate()
    assert tuple(made.o.get_stride()) == bshd(OUT)


def test_gradients_take_the_strides_of_their_inputs():
    """dQ, dK and dV are like q, k and v, gaps included."""
    made = Backward(stride=bshd)
    gapped = (1200, 24, 100, 1)
    made.k.set_stride(gapped)
    made.sdpa().validate()
    strides = [tuple(t.get_stride()) for t in made.gradients]
    assert strides == [bshd(Q), gapped, bshd(V)]
    assert [tuple(t.get_dim()) for t in made.gradients] == [Q, K, V]


def test_gradient_of_a_broadcast_input_has_memory_for_every_element():
    """An input of stride 0 is fine; its gradient is inferred without overlap."""
    made = Backward()
    made.v.set_stride((0, 0, 24, 1))
    made.sdpa().validate()
    assert not overlaps(V, tuple(made.gradients[2].get_stride()))


def test_output_type_without_an_io_type_is_that_of_q():
    """Tensors read from a framework need no io_data_type."""
    graph = cudnn.pygraph()
    x = np.zeros(Q, np.float16)
    o, _ = graph.sdpa(*(graph.tensor_like(x) for _ in range(3)), generate_stats=False)
    o.set_output(True)
    graph.validate()
    assert o.get_data_type() is HALF


def test_validate_is_idempotent():
    """Validating twice changes nothing."""
    made = Forward().sdpa().validate()
    before = repr(made.graph)
    assert repr(made.validate().graph) == before


def test_inference_follows_later_changes():
    """What validate inferred is inferred anew when the user changes what it came from."""
    made = Forward().sdpa().validate()
    made.v.set_dim((2, 1, 12, 40)).set_stride((480, 480, 40, 1))
    made.q.set_data_type(HALF)
    assert made.validate().o.get_dim() == [2, 4, 8, 40]
    made.o.set_dim(OUT)
    with pytest.raises(ValueError, match="sdpa::O has dim"):
        made.validate()


@pytest.mark.parametrize("clone", [True, False])
def test_inferred_outputs_feed_the_next_graph(clone):
    """The forward graph's tensors, themselves or through tensor_like, declare the backward's."""
    made = Forward().sdpa().validate()
    made.stats.set_output(True)
    graph = cudnn.pygraph(handle=cudnn.create_handle(device="cpu"))
    used = (made.q, made.k, made.v, made.o, made.o, made.stats)
    gradients = graph.sdpa_backward(*((graph.tensor_like(t) for t in used) if clone else used))
    for gradient in gradients:
        gradient.set_output(True)
    graph.validate()
    assert [tuple(t.get_dim()) for t in gradients] == [Q, K, V]
    assert tuple(made.o.get_dim()) == OUT


def test_virtual_stats_need_no_memory():
    """Stats that were asked for but never made an output are not written."""
    made = Forward().sdpa(generate_stats=True)
    assert "stats" not in made.graph.lowered.tensors


def test_one_length_tensor_is_enough():
    """Either length alone makes a padding mask."""
    for role in ("seq_len_q", "seq_len_kv"):
        made = Forward()
        made.sdpa(use_padding_mask=True, **{role: lengths(made.graph)}).validate()
        assert role in made.graph.lowered.geometry.tensors


@pytest.mark.parametrize(
    ("dim", "stride", "expected"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (2, 1), True),
        ((2, 3), (0, 1), True),
        ((1, 3), (0, 1), False),
        ((2, 3, 4), (100, 4, 1), False),
        ((2, 3, 4), (11, 4, 1), True),
    ],
)
def test_overlaps(dim, stride, expected):
    """Overlap is what counting addresses says."""
    addresses = sum(np.ix_(*(np.arange(d) * s for d, s in zip(dim, stride, strict=True))))
    assert overlaps(dim, stride) == expected == (len(np.unique(addresses)) < addresses.size)


@pytest.mark.parametrize("backward_first", [False, True])
def test_tensors_of_two_graphs(backward_first):
    """Tensors that a backward takes from a forward are what it is given, and still what that one
    inferred: whichever is declared first, neither graph changes the other."""
    forward = Forward(is_override_shape_enabled=True).sdpa()
    forward.stats.set_output(True)
    backward = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))

    def declare_backward():
        inputs = forward.q, forward.k, forward.v, forward.o, backward.tensor(OUT), forward.stats
        for gradient in backward.sdpa_backward(*inputs):
            gradient.set_output(True)

    if backward_first:
        declare_backward()
    forward.graph.build()
    if not backward_first:
        declare_backward()
    backward.build()
    assert forward.o.get_dim() == list(OUT)

    dims = [(3, *dim[1:]) for dim in (Q, K, V, OUT, STATS)]
    tensors = [getattr(forward, role) for role in ("q", "k", "v", "o", "stats")]
    pack = {t.get_uid(): np.zeros(dim, np.float16) for t, dim in zip(tensors, dims, strict=True)}
    pack[forward.stats.get_uid()] = np.zeros(dims[-1], np.float32)
    shapes = [t.get_uid() for t in tensors[:3]], dims[:3]
    forward.graph.execute(pack, None, None, *shapes)
    again, other = cudnn.pygraph(), cudnn.pygraph()
    again.deserialize(forward.graph.serialize())
    again.execute(pack, None, None, *shapes)
    other.deserialize(backward.serialize())
    assert (again.key(), other.key()) == (forward.graph.key(), backward.key())
