"""Graph tensors: declaring them, reading frameworks' tensors, uids."""

from __future__ import annotations

import copy
import enum
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.graph.tensor import packed_strides


class Uid(enum.IntEnum):
    Q = 7


def test_setters_chain_and_getters_return_what_was_set():
    """Every setter returns the tensor, and its getter gives the value back."""
    t = cudnn.tensor()
    chained = (
        t.set_name("q")
        .set_data_type(cudnn.data_type.HALF)
        .set_dim((2, 3, 4, 5))
        .set_stride([60, 20, 5, 1])
        .set_is_pass_by_value(True)
        .set_output(False)
        .set_uid(Uid.Q)
        .set_alignment(4)
        .set_reordering_type(cudnn.tensor_reordering.F8_128x4)
        .set_vector_count_and_dimension(4, 1)
    )
    assert chained is t
    assert t.get_name() == "q"
    assert t.get_data_type() is cudnn.data_type.HALF
    assert t.get_dim() == [2, 3, 4, 5]
    assert t.get_stride() == [60, 20, 5, 1]
    assert t.get_is_pass_by_value() and t.get_is_virtual()
    assert t.get_uid() == 7 and type(t.get_uid()) is int
    assert t.get_alignment() == 4
    assert t.get_reordering_type() is cudnn.tensor_reordering.F8_128x4
    assert (t.get_vector_count(), t.get_vector_dimension()) == (4, 1)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float16, "HALF"),
        (np.dtype(ml_dtypes.bfloat16), "BFLOAT16"),
        (np.int64, "INT64"),
        (cudnn.data_type.FP8_E4M3, "FP8_E4M3"),
    ],
)
def test_data_types_of_numpy(dtype, expected):
    """NumPy dtypes mean the element types of the same name."""
    assert cudnn.tensor().set_data_type(dtype).get_data_type().name == expected


def test_data_types_of_torch():
    """torch dtypes and ``torch.Size`` are understood wherever types and sizes are."""
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    t = cudnn.pygraph().tensor(x.size(), x.stride(), data_type=x.dtype)
    assert t.get_data_type() is cudnn.data_type.BFLOAT16
    assert (t.get_dim(), t.get_stride()) == ([2, 4, 3, 8], [96, 8, 32, 1])


@pytest.mark.parametrize("sizes", [(2.0, 3), "ab", 5, None])
def test_sizes_must_be_integers(sizes):
    """What is no sequence of integers is a TypeError that shows it."""
    with pytest.raises(TypeError, match="dim must be a sequence of integers"):
        cudnn.tensor().set_dim(sizes)


def test_repr_is_json():
    """A tensor prints as JSON under cuDNN's keys."""
    graph = cudnn.pygraph()
    t = graph.tensor((1, 2, 3, 4), (24, 12, 4, 1), cudnn.data_type.HALF, name="q", uid=0)
    shown = json.loads(repr(t))
    assert shown["name"] == "q" and shown["data_type"] == "HALF"
    assert shown["dim"] == [1, 2, 3, 4] and shown["stride"] == [24, 12, 4, 1]
    assert shown["uid"] == 0 and shown["uid_assigned"]


def test_tensors_compare_by_identity():
    """Two equal declarations are two keys of a variant pack."""
    graph = cudnn.pygraph()
    a, b = (graph.tensor((1,), (1,), name="a") for _ in range(2))
    assert len({a: 1, b: 2}) == 2


def test_stride_defaults_to_row_major():
    """A tensor declared without strides is packed in row-major order."""
    assert cudnn.pygraph().tensor((2, 3, 4, 5)).get_stride() == [60, 20, 5, 1]


def test_dim_and_stride_of_different_lengths():
    """One stride per dimension, or the declaration is refused with both shown."""
    with pytest.raises(ValueError, match=r"'q' has dim \(2, 3\) and stride \(1,\)"):
        cudnn.pygraph().tensor((2, 3), (1,), name="q")


def test_tensor_like_reads_a_numpy_array():
    """Shape, strides, type and device come from the object."""
    x = np.zeros((2, 4, 3, 8), np.float16).transpose(0, 2, 1, 3)
    t = cudnn.pygraph().tensor_like(x, name="q")
    assert (t.get_dim(), t.get_stride()) == ([2, 3, 4, 8], [96, 8, 24, 1])
    assert t.get_data_type() is cudnn.data_type.HALF and t.get_name() == "q"
    assert t.attributes.device == ("cpu", 0) and not t.get_is_pass_by_value()


def test_tensor_like_of_a_host_scalar_is_passed_by_value():
    """One element on the CPU is read by value; two are a tensor."""
    graph = cudnn.pygraph()
    assert graph.tensor_like(np.ones((1, 1, 1, 1), np.float32)).get_is_pass_by_value()
    assert not graph.tensor_like(np.ones((2, 1, 1, 1), np.float32)).get_is_pass_by_value()


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (1, 2), (4, 8), (8, 16)])
def test_tensor_like_reads_the_alignment(offset, alignment):
    """An object whose address is aligned to less than 16 bytes says so in its declaration."""
    memory = np.zeros(256, np.float16)
    start = -memory.ctypes.data % 64 // 2
    assert cudnn.pygraph().tensor_like(memory[start + offset :]).get_alignment() == alignment


def test_tensor_like_of_a_graph_tensor():
    """Everything is cloned but the uid, and the two are independent."""
    graph = cudnn.pygraph()
    t = graph.tensor((2, 3, 4, 8), name="q", uid=5).set_alignment(2)
    like = graph.tensor_like(t)
    assert like is not t and like.get_dim() == t.get_dim() and like.get_alignment() == 2
    assert like.get_uid() == 0 and not json.loads(repr(like))["uid_assigned"]
    like.set_dim((1, 1, 1, 1))
    assert t.get_dim() == [2, 3, 4, 8]


def test_tensor_like_refuses_what_is_no_tensor():
    """Lists and numbers are no tensors: a ValueError that says what is."""
    with pytest.raises(ValueError, match="tensor_like takes a tensor"):
        cudnn.pygraph().tensor_like([1, 2, 3])


def test_tensor_scalar():
    """A scalar keeps its value, in host memory, as a 1x1x1x1 tensor."""
    graph = cudnn.pygraph()
    constant = graph.tensor_scalar(0.5, cudnn.scalar_type.COMPILE_TIME_CONST)
    assert constant.get_dim() == [1, 1, 1, 1] and constant.get_is_pass_by_value()
    assert constant.get_data_type() is cudnn.data_type.FLOAT
    assert constant.get_has_compile_time_constant()
    assert not graph.tensor_scalar(2).get_has_compile_time_constant()
    assert graph.tensor_scalar(-float("inf")).get_data_type() is cudnn.data_type.FLOAT
    for wrong in (2**63, -(2**63) - 1, 10**400, 1e39):
        with pytest.raises(ValueError, match="tensor_scalar takes what (INT64|FLOAT) holds; got"):
            graph.tensor_scalar(wrong)
    assert json.loads(repr(constant))["pass_by_value"] == 0.5


@pytest.mark.parametrize("alignment", [0, -16, 12])
def test_alignment_is_a_power_of_two(alignment):
    """An alignment that no address can be rounded to is refused."""
    with pytest.raises(ValueError, match="power of two"):
        cudnn.tensor().set_alignment(alignment)


def test_copies_are_independent():
    """A copied tensor can be changed without changing the original."""
    t = cudnn.tensor().set_name("q")
    assert copy.copy(t).set_name("k").get_name() == "k"
    assert t.get_name() == "q"


@given(st.permutations(range(3)), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_packed_strides_follow_a_layout(order, dim):
    """Strides made like others have their order, no gaps, and the last dimension innermost."""
    dim = tuple(dim)
    model = [0, 0, 0, 1]
    step = dim[3]
    for axis in order:
        model[axis], step = step, step * dim[axis]
    assert packed_strides(dim, like=tuple(model)) == tuple(model) or 1 in dim
    array = np.lib.stride_tricks.as_strided(
        np.arange(step), dim, [8 * s for s in packed_strides(dim, like=tuple(model))]
    )
    assert sorted(array.flat) == list(range(step))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_one_element_without_axes(library):
    """Frameworks' scalars are tensors of one element: scales, what functions of scores read, and
    operands of primitive operations."""
    number = np.array(0.5, np.float32)
    if library == "torch":
        number = pytest.importorskip("torch").from_numpy(number)
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 8), dtype=np.float32)
    t = cudnn.pygraph().tensor_like(number)
    assert t.get_dim() == t.get_stride() == [1, 1, 1, 1] and t.get_is_pass_by_value()

    def attention(**arguments):
        with cudnn.Graph(outputs=["sdpa::O"], inputs=[x, number]) as graph:
            graph.sdpa(x, x, x, is_inference=True, name="sdpa", **arguments)[0].set_output(True)
        return graph(x, number)

    def halved(graph, score):
        return graph.mul(score, graph.tensor_like(number))

    scaled = attention(attn_scale=number)
    np.testing.assert_allclose(attention(score_mod=halved), scaled, rtol=1e-6)
    with cudnn.Graph(inputs=[x, number], outputs=["half"]) as graph:
        graph.mul(x, number).set_output(True).set_name("half")
    np.testing.assert_array_equal(graph(x, number), x / 2)


def test_results_without_axes():
    """A pack may hold one element without axes for a tensor of that size, which is written to."""
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    x = graph.tensor_like(np.ones((2, 3), np.float32))
    total = graph.reduction(x, cudnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True)
    graph.build()
    result = np.zeros((), np.float32)
    graph.execute({x: np.ones((2, 3), np.float32), total: result})
    assert result == 6
