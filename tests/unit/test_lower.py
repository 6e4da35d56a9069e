"""Lowering: nodes to a problem and its geometry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn as cudnn
from dlattn.dtypes import from_any
from dlattn.problem import Alibi, Band, Bias, Direction, Padding, Scale, SoftCap, offset_role
from dlattn.problem.layout import canonical_stride
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import (
    OPTIONS,
    dropout_argument,
    edit_arguments,
    geometry_of,
    problem_of,
    set_offset,
)
from tests.drivers import declare as declare_input
from tests.libraries import Library
from tests.strategies import cases

HALF = cudnn.data_type.HALF
DIM = (2, 4, 8, 16)


def forward(dim=DIM, strides=None, alignment=16, dtype=HALF, **arguments):
    """The lowered form of a forward graph on the CPU, q, k and v alike."""
    graph = cudnn.pygraph(io_data_type=dtype, handle=cudnn.create_handle(device="cpu"))
    q, k, v = (graph.tensor(dim, strides, name=name) for name in "qkv")
    q.set_alignment(alignment)
    for name, value in arguments.items():
        if callable(value):
            arguments[name] = value(graph)
    o, _ = graph.sdpa(q, k, v, generate_stats=False, **arguments)
    o.set_output(True)
    return graph.lowered


@settings(max_examples=60)
@given(cases())
def test_random_cases(case: Case):
    """Problem and geometry say what the case says, for both directions, however it is spelled."""
    tensors = make_tensors(case, Library())
    for direction, inputs, outputs in (
        (Direction.FORWARD, ("q", "k", "v"), ("o", "stats")),
        (Direction.BACKWARD, ("q", "k", "v", "o", "dO", "stats"), ("dQ", "dK", "dV")),
    ):
        if direction is Direction.BACKWARD and not case.stats:
            continue
        lowered = declare(case, tensors, inputs, outputs).lowered
        written = given_outputs(case, inputs)
        roles = [role for role in (*inputs, *outputs, *OPTIONS, *written) if role in tensors]
        unused = () if case.drops else ("dropout_seed", "dropout_offset")
        unused = unused if "dO" in inputs else (*unused, "dropout_scale_inv")
        roles = [role for role in roles if role not in unused]
        roles += [name for role in roles if (name := offset_role(role)) in tensors]
        expected = geometry_of(case, {role: tensors[role] for role in roles})
        assert lowered.problem == replace(
            problem_of(case, direction, ragged=bool(set(roles) & set(case.ragged))),
            access_bytes=lowered.problem.access_bytes,
        )
        assert set(lowered.geometry.tensors) == set(roles)
        assert lowered.outputs == {role for role in (*outputs, *written) if role in tensors}
        for role in roles:
            got, want = lowered.geometry.tensors[role], expected.tensors[role]
            assert (got.name, got.dim, got.dtype) == (f"my {role}", want.dim, want.dtype)
            stride = canonical_stride(want.dim, want.stride)
            assert got.stride == ((0, *stride[1:]) if role in case.ragged else stride)
            assert (got.ragged, got.packed) == (want.ragged, want.packed)
        if "attn_scale" not in tensors:
            assert lowered.geometry.attn_scale == expected.attn_scale
        # Where nothing is kept, any number will do.
        if "dropout_scale" not in tensors and case.dropout != 1.0:
            assert lowered.geometry.dropout_scale == expected.dropout_scale
        for bound in ("max_seq_kv", "softcap", "band_left", "band_right", "bottom_right"):
            assert getattr(lowered.geometry, bound) == getattr(expected, bound)


def given_outputs(case, inputs):
    of_pass = ("dSink_token", "dBias") if "dO" in inputs else case.row_outputs
    return (*of_pass, "rng_dump")


def declare(case, tensors, inputs, outputs):
    graph = cudnn.pygraph(io_data_type=from_any(Library().dtype(case.dtype)))
    given = {
        role: declare_input(graph, role, tensors, "my ")
        for role in (*inputs, *OPTIONS, *given_outputs(case, inputs))
        if role in tensors
    }
    if case.page_k or case.page_v:
        given["paged_attention_max_seq_len_kv"] = case.seq_kv
    scale = {"attn_scale": case.scale} if case.scale_as == "value" else {}
    edits = edit_arguments(case)
    edits["dropout"] = dropout_argument(case, given, backward="dO" in inputs)
    edits["dropout_algorithm"] = case.dropout_algorithm if case.is_random else None
    given = {role: t for role, t in given.items() if not role.startswith("dropout_")}
    band = {
        "diagonal_alignment": list(cudnn.diagonal_alignment)[case.bottom_right],
        "diagonal_band_left_bound": case.left,
        "diagonal_band_right_bound": case.right,
        "use_padding_mask": "seq_len_q" in given or "seq_len_kv" in given,
    }
    if "dO" in inputs:
        band["use_deterministic_algorithm"] = case.deterministic
        made = graph.sdpa_backward(**given, **scale, **edits, **band)
    else:
        made = graph.sdpa(**given, **scale, **edits, **band, generate_stats=case.stats is not None)
    for role, t in zip(outputs, made, strict=False):
        if t is not None:
            spec = tensors[role].spec
            t.set_output(True).set_dim(spec.dim).set_stride(spec.stride)
            t.set_data_type(spec.dtype).set_name(f"my {role}")
            set_offset(graph, role, t, tensors, "my ")
    return graph


@pytest.mark.parametrize(
    ("arguments", "masks"),
    [
        ({}, (Padding(),)),
        ({"use_causal_mask": True}, (Padding(), Band(left=False, right=True))),
        ({"sliding_window_length": 3}, (Padding(), Band(left=True, right=False))),
    ],
)
def test_padding_is_always_first(arguments, masks):
    """Every problem masks its tiles' overhang; a band is added when there is a bound."""
    assert forward(**arguments).problem.masks == masks


def test_window_bounds_are_run_time_values():
    """Two window sizes are one problem, hence one kernel."""
    one, two = (forward(sliding_window_length=w) for w in (3, 300))
    assert one.problem == two.problem
    assert (one.geometry.band_left, two.geometry.band_left) == (3, 300)


def test_parameters_of_edits_are_run_time_values():
    """Another cap, and a bias that broadcasts otherwise, are the same problem, hence one kernel: a
    bias with a row for each query, which Hopper's copy engine can move, and any other."""
    caps = [forward(softcap=cap) for cap in (30, 50.0)]
    assert caps[0].problem == caps[1].problem
    assert [lowered.geometry.softcap for lowered in caps] == [30.0, 50.0]
    for dims in (((2, 4, 8, 8), (1, 1, 8, 8)), ((2, 4, 1, 8), (1, 1, 1, 8))):
        one, two = (forward(bias=lambda g, dim=dim: g.tensor(dim)) for dim in dims)
        assert one.problem == two.problem


def test_edits_stand_in_cudnns_order():
    """Scale, soft cap, bias, ALiBi, whatever the order of the arguments."""
    lowered = forward(
        alibi_slopes=lambda g: g.tensor((4,), data_type=cudnn.data_type.FLOAT),
        bias=lambda g: g.tensor((1, 4, 8, 8), (256, 64, 1, 8)),
        softcap=5,
    )
    expected = (Scale(), SoftCap(), Bias(HALF, contiguous=False), Alibi(symmetric=True))
    assert lowered.problem.edits == expected
    assert forward(use_alibi_mask=True).problem.edits == (Scale(), Alibi(symmetric=False))


def test_sizes_are_run_time_values():
    """Another batch, sequence length or number of heads is the same problem."""
    assert forward(dim=(2, 4, 8, 16)).problem == forward(dim=(3, 1, 999, 16)).problem


def test_bounds_are_clamped():
    """Bounds are cut where adding them to a position cannot overflow 32 bits."""
    geometry = forward(diagonal_band_left_bound=2**40, diagonal_band_right_bound=2**31).geometry
    assert (geometry.band_left, geometry.band_right) == (2**30, 2**30)


@pytest.mark.parametrize(
    ("scale", "positive"),
    [(None, True), (0.5, True), (0.0, False), (-1.0, False), (1e-50, False), (1e-40, False)],
)
def test_only_a_known_positive_scale_is_positive(scale, positive):
    """Kernels may fold a scale into the exponent only when its sign is known, and if float32 has
    the scale and its inverse: times 0, masked scores would be no numbers."""
    lowered = forward(attn_scale=scale)
    assert lowered.problem.edits == (Scale(positive=positive),)
    assert lowered.geometry.attn_scale == (1.0 if scale is None else scale)


def test_a_scale_tensor_may_have_any_sign():
    """Its value comes at run time, so nothing is assumed."""
    lowered = forward(
        attn_scale=lambda g: g.tensor((1, 1, 1, 1), data_type=cudnn.data_type.FLOAT, name="scale")
    )
    assert lowered.problem.edits == (Scale(positive=False),)
    assert lowered.geometry.tensors["attn_scale"].name == "scale"


def test_a_graphs_own_scalar_is_a_number():
    """tensor_scalar needs no place in the variant pack: its value is in the geometry."""
    lowered = forward(attn_scale=lambda g: g.tensor_scalar(0.25))
    assert lowered.geometry.attn_scale == 0.25 and "attn_scale" not in lowered.tensors
    assert lowered.problem.edits == (Scale(positive=True),)


@pytest.mark.parametrize(
    ("dim", "strides", "alignment", "dtype", "expected"),
    [
        (DIM, None, 16, HALF, 16),
        (DIM, None, 8, HALF, 2),
        (DIM, None, 32, HALF, 16),
        (DIM, (544, 136, 17, 1), 16, HALF, 2),
        (DIM, (516, 128, 16, 1), 16, HALF, 2),
        ((1, 4, 8, 16), (3331333, 128, 16, 1), 16, HALF, 16),
        ((2, 4, 8, 12), None, 16, HALF, 2),
        ((2, 4, 8, 12), (1024, 256, 16, 1), 16, HALF, 16),
        ((2, 4, 8, 12), None, 16, cudnn.data_type.FLOAT, 16),
        ((2, 4, 8, 9), None, 16, cudnn.data_type.FLOAT, 4),
        ((2, 4, 8, 9), None, 16, cudnn.data_type.DOUBLE, 8),
    ],
)
def test_access_bytes(dim, strides, alignment, dtype, expected):
    """16-byte accesses need 16-byte strides, where there is a stride, and 16-byte addresses."""
    graph = cudnn.pygraph(io_data_type=dtype, handle=cudnn.create_handle(device="cpu"))
    q, k, v = (graph.tensor(dim, strides) for _ in "qkv")
    q.set_alignment(alignment)
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True).set_stride(strides or q.get_stride())
    assert graph.lowered.problem.access_bytes == expected


@pytest.mark.parametrize(
    ("dim", "stride", "canonical"),
    [
        ((2, 3, 4, 5), (60, 20, 5, 1), (60, 20, 5, 1)),
        ((1, 3, 1, 5), (7, 20, 99990001, 1), (0, 20, 0, 1)),
        ((2, 1, 1, 1), (1, 0, 3331333, 8), (1, 0, 0, 1)),
        ((2, 3, 4, 5), (120, 40, 10, 2), (120, 40, 10, 2)),
        ((), (), ()),
    ],
)
def test_strides_of_size_1_mean_nothing(dim, stride, canonical):
    """Whatever a dimension of size 1 says its stride is, the spec is the same."""
    assert canonical_stride(dim, stride) == canonical


def test_host_scalars_stay_marked():
    """A scale on the host is read by value; one in a tensor is read where it lies."""
    by_value = forward(attn_scale=lambda g: g.tensor_like(np.ones((1, 1, 1, 1), np.float32)))
    assert by_value.geometry.tensors["attn_scale"].by_value
    assert not forward().geometry.tensors["q"].by_value


def test_messages_name_a_tensor_of_two_roles_once():
    """What is k and v is one tensor that packs hold, so whoever lacks it is told of it once."""
    q, kv = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 1, 4, 8), np.float32)
    with cudnn.Graph() as graph:
        graph.sdpa(q, kv, kv, is_inference=True, name="one")[0].set_output(True)
    with pytest.raises(RuntimeError, match="lacks the inputs 'one::k'; add"):
        graph({"one::q": q})
    with pytest.raises(ValueError, match="leave out 'one::k', which"):
        graph.set_io_tuples(["one::q"], ["one::O"])
