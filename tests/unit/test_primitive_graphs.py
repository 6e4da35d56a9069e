"""Graphs of primitive operations: signatures, inference, and what is wrong with graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.errors import InvalidArgumentError, InvalidGraphError, InvalidVariantPackError
from dlattn.problem import POINTWISE

Type = cudnn.data_type
HALF, FLOAT, INT32, BOOLEAN = Type.HALF, Type.FLOAT, Type.INT32, Type.BOOLEAN
ADD = cudnn.reduction_mode.ADD
NotSupported = cudnn.cudnnGraphNotSupportedError

#: cuDNN frontend 1.23's arguments beside ``compute_data_type`` and ``name``, which come last unless
#: the line says where.
SIGNATURES = {
    "matmul": "A, B, compute_data_type, padding, name",
    "reduction": "input, mode, compute_data_type, name, group_offset",
    "reshape": "input, name, reshape_mode",
    "transpose": "input, permutation",
    "gen_index": "input, axis",
    "binary_select": "input0, input1, mask",
    "relu": "input, negative_slope, lower_clip, upper_clip",
    "leaky_relu": "input, negative_slope",
    "swish": "input, swish_beta",
    "relu_backward": "loss, input, negative_slope, lower_clip, upper_clip",
    "leaky_relu_backward": "loss, input, negative_slope",
    "swish_backward": "loss, input, compute_data_type, swish_beta, name",
    "bias": "input, bias",
    "scale": "input, scale",
    **dict.fromkeys(("add", "mul", "sub", "div", "add_square"), "a, b"),
    **dict.fromkeys(("logical_and", "logical_or"), "a, b"),
    **dict.fromkeys(("max", "min", "mod", "pow"), "input0, input1"),
    **{f"cmp_{x}": "input, comparison" for x in ("eq", "neq", "gt", "ge", "lt", "le")},
    **dict.fromkeys(
        (f"{x}_backward" for x in (
            *("tanh", "sigmoid", "elu", "gelu", "gelu_approx_tanh", "softplus"),
        )),
        "loss, input",
    ),
}  # fmt: skip


def test_a_number_by_value_is_one() -> None:
    """What is passed by value is one element, in graphs of primitive operations too."""
    graph = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    several = graph.tensor((1, 4), is_pass_by_value=True, name="several")
    graph.mul(graph.tensor((3, 4)), several).set_output(True)
    with pytest.raises(InvalidGraphError, match="several has dim .* passed by value, as only one"):
        graph.validate()


@pytest.mark.parametrize(
    ("dtype", "taken", "refused"),
    [
        ("INT8", (3, np.int64(-128)), (2.7, np.float32(1), 128, float("nan"))),
        ("UINT8", (255, np.uint8(3)), (2.0, 256, -1)),
        ("INT32", (3, np.int8(3)), (3.0, 2**31)),
        ("BOOLEAN", (True, np.True_, 0), (1.0, float("inf"))),
        ("BFLOAT16", (0.5, np.float32(2), float("inf")), (1e300, -3.4e38, True)),
        ("HALF", (0.5, -float("inf")), (65520.0,)),
    ],
)
def test_numbers_by_value(dtype: str, taken: Any, refused: Any) -> None:
    """A number of the pack is what its type holds, or is refused: nothing is cut off, or wraps."""
    graph = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    x = graph.tensor((1, 4))
    number = graph.tensor((1, 1), data_type=Type[dtype], is_pass_by_value=True, name="number")
    y = graph.add(x, number).set_output(True)
    graph.build()
    zeros, result = np.zeros((1, 4), np.float32), np.empty((1, 4), np.float32)
    for value in taken:
        graph.execute({x: zeros, number: value, y: result})
        assert (result == float(value)).all()
    for value in refused:
        with pytest.raises(InvalidVariantPackError, match=r"number \(uid \d+\): "):
            graph.execute({x: zeros, number: value, y: result})


@pytest.mark.parametrize("name", [*POINTWISE, "matmul", "reduction", "reshape", "transpose"])
def test_signatures_are_cudnns(name: str) -> None:
    """Arguments have cuDNN's names, in its order, and a sentence of documentation."""
    method = getattr(cudnn.pygraph, name)
    wanted = SIGNATURES.get(name, "input")
    if "name" not in wanted:
        wanted += ", compute_data_type, name"
    parameters = dict(inspect.signature(method).parameters)
    ours = ("m_override", "n_override", "k_override")  # cuDNN has them in C++ alone
    assert ", ".join(name for name in list(parameters)[1:] if name not in ours) == wanted
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults.get("compute_data_type", Type.NOT_SET) is Type.NOT_SET
    assert defaults["name"] == "" and method.__doc__


def graph(**types: Any) -> Any:
    types = {"io_data_type": HALF, "intermediate_data_type": FLOAT, **types}
    return cudnn.pygraph("g", handle=cudnn.create_handle(device="cpu"), **types)


def test_inference() -> None:
    """Shapes broadcast; types are the graph's; comparisons are boolean, positions INT32."""
    made = graph()
    x, y = made.tensor((2, 1, 4), name="x"), made.tensor((1, 3, 4), name="y")
    total = made.add(x, y, name="total")
    assert total.get_is_virtual() and total.get_name() == "total::OUT_0"
    index = made.gen_index(total, 2)
    mask = made.cmp_ge(index, made.tensor_scalar(1))
    chosen = made.binary_select(total, made.tensor_scalar(0.0), mask)
    product = made.matmul(chosen, made.transpose(chosen, (0, 2, 1))).set_output(True)
    made.validate()
    assert [t.get_dim() for t in (total, index, mask, product)] == [[2, 3, 4]] * 3 + [[2, 3, 3]]
    types = [t.get_data_type() for t in (x, total, index, mask, product)]
    assert types == [HALF, FLOAT, INT32, BOOLEAN, HALF]
    assert product.get_stride() == [9, 3, 1] and index.get_name() == "gen_index.0::OUT_0"


def test_changes_are_followed() -> None:
    """``validate`` infers anew what changes in between."""
    made = graph()
    x = made.tensor((2, 3), name="x")
    y = made.exp(x).set_output(True)
    made.validate()
    x.set_dim((4, 5)).set_stride((5, 1))
    made.validate()
    assert y.get_dim() == [4, 5] and y.get_stride() == [5, 1]


def _bad_input(made: Any) -> None:
    made.exp(made.tensor((2,), name="x", is_virtual=True))


def _bad_sum(made: Any) -> None:
    made.add(made.tensor((2, 3), name="x"), made.tensor((2, 4), name="y"), name="total")


def _bad_ranks(made: Any) -> None:
    made.add(made.tensor((2, 3), name="x"), made.tensor((3,), name="y"), name="total")


def _bad_product(made: Any) -> None:
    made.matmul(made.tensor((2, 3), name="x"), made.tensor((2, 3), name="y"), name="bmm")


def _bad_groups(made: Any) -> None:
    made.matmul(made.tensor((3, 2, 3), name="x"), made.tensor((2, 3, 4), name="y"), name="bmm")


def _bad_length(made: Any) -> None:
    x, y = made.tensor((2, 2, 3)), made.tensor((2, 3, 4))
    made.matmul(x, y, m_override=made.tensor((3, 1, 1), data_type=INT32, name="l"))


def _bad_output(made: Any) -> None:
    made.exp(made.tensor((2, 3), name="x"), name="exp").set_dim((3, 2)).set_name("y")


def _overlapping(made: Any) -> None:
    made.exp(made.tensor((2, 3), name="x")).set_stride((1, 1)).set_name("y")


def _bad_axis(made: Any) -> None:
    made.gen_index(made.tensor((2, 3), name="x"), 2, name="rows")


def _bad_reduction(made: Any) -> None:
    made.reduction(made.tensor((2, 3), name="x"), ADD).set_dim((2, 2)).set_name("y")


def _bad_reshape(made: Any) -> None:
    made.reshape(made.tensor((2, 3), name="x")).set_dim((7,)).set_name("y")


def _shapeless(made: Any) -> None:
    made.reshape(made.tensor((2, 3), name="x"), name="view")


def _far_view(made: Any) -> None:
    made.reshape(made.tensor((2, 3), name="x")).set_dim((2, 3)).set_stride((3, 2)).set_name("y")


def _view_of_gaps(made: Any) -> None:
    x = made.tensor((2, 2), (4, 1), name="x")
    made.reshape(x).set_dim((4,)).set_stride((1,)).set_name("y")


def _bad_permutation(made: Any) -> None:
    made.transpose(made.tensor((2, 3), name="x"), (0, 2, 1), name="turn")


def _float_of_integers(made: Any) -> None:
    made.exp(made.tensor((2,), data_type=INT32), compute_data_type=INT32, name="exp")


def _integers_of_floats(made: Any) -> None:
    made.neg(made.tensor((2,), name="x"), compute_data_type=INT32, name="neg")


def _compared_as_integers(made: Any) -> None:
    made.cmp_gt(made.tensor((2,), name="x"), made.tensor_scalar(1), Type.INT64, name="more")


def _selected_as_integers(made: Any) -> None:
    x, mask = made.tensor((2,), name="x"), made.tensor((2,), data_type=Type.BOOLEAN)
    made.binary_select(x, made.tensor_scalar(1), mask, compute_data_type=INT32, name="pick")


def _untyped(made: Any) -> None:
    made.exp(made.tensor((2,), name="x").set_data_type(Type.FP4_E2M1))


def _bad_seed(made: Any) -> None:
    seeds = made.tensor((2,), data_type=INT32, name="s"), made.tensor_scalar(1)
    made.rng(*seeds, bernoulli_probability=0.5).set_dim((1, 1, 2, 2))


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (_bad_input, "x is virtual, but no node"),
        (_bad_sum, r"add 'total' has operands .* x \(2, 3\) and y \(2, 4\)"),
        (_bad_ranks, "add 'total' has operands that do not broadcast"),
        (_bad_product, r"matmul 'bmm' multiplies x \(2, 3\) by y \(2, 3\)"),
        (_bad_groups, "batch sizes that divide each other"),
        (_bad_output, r"y has dim \(3, 2\); expected \(2, 3\), from x"),
        (_overlapping, "y is an output .* share an address"),
        (_bad_axis, "gen_index 'rows' has axis 2"),
        (_bad_reduction, r"y has dim \(2, 2\); expected \(2, 3\), with 1"),
        (_bad_reshape, "y has dim .* not as many elements as x"),
        (_shapeless, "view::Y has no shape"),
        (_far_view, "leaves the memory of x"),
        (_view_of_gaps, r"y has dim \(4,\) and stride \(1,\), which is no order of .* x, of dim"),
        (_bad_permutation, "transpose 'turn' has permutation .* 2 axes"),
        (_float_of_integers, "exp 'exp' has compute_data_type .* no such result"),
        (_integers_of_floats, "neg 'neg' has compute_data_type .* operands are HALF"),
        (_compared_as_integers, "cmp_gt 'more' has compute_data_type .* operands are HALF"),
        (_selected_as_integers, "binary_select 'pick' has compute_data_type .* are HALF"),
        (_untyped, "no storage type"),
        (_bad_length, r"l has dim \(3, 1, 1\) .*; m_override must be integers of \(2, 1, 1\)"),
        (_bad_seed, "s has dim .* expected one INT32 or INT64"),
    ],
)
def test_wrong_graphs(declare: Callable[[Any], None], said: str) -> None:
    """``validate`` says which tensor or node is wrong, and what was expected."""
    made = graph()
    declare(made)
    made._nodes[-1].result.set_output(True)
    with pytest.raises(InvalidGraphError, match=said):
        made.validate()


def test_wrong_arguments() -> None:
    """What a call alone can tell is refused by the call."""
    made = graph()
    x = made.tensor((2, 3), name="x")
    for error, said, call in (
        (TypeError, "mode must be", lambda: made.reduction(x, "ADD")),
        (InvalidArgumentError, "NOT_SET", lambda: made.reduction(x, cudnn.reduction_mode.NOT_SET)),
        (NotSupported, "group_offset", lambda: made.reduction(x, ADD, group_offset=x)),
        (TypeError, "axis must be an int", lambda: made.gen_index(x, "2")),
        (InvalidArgumentError, "every axis", lambda: made.transpose(x, (0, 0))),
        (TypeError, "add: b must be a tensor", lambda: made.add(x, 2.0)),
        (TypeError, "needs the tensor b", lambda: made.add(x, None)),
        (TypeError, "missing a required argument: 'b'", lambda: made.add(x)),
        (InvalidArgumentError, "chance of a 1", lambda: made.rng(x, x)),
        (InvalidArgumentError, "chance of a 1", lambda: made.rng(x, x, bernoulli_probability=0)),
        (
            NotSupported,
            "BERNOULLI",
            lambda: made.rng(x, x, distribution=cudnn.rng_distribution.NORMAL),
        ),
        (TypeError, "reshape_mode", lambda: made.reshape(x, reshape_mode="LOGICAL")),
        (TypeError, "negative_slope must be a number", lambda: made.relu(x, "a")),
        (TypeError, "swish_beta must be a number", lambda: made.swish(x, 10**400)),
        (TypeError, "padding must be a number", lambda: made.matmul(x, x, padding=None)),
        (TypeError, "generate_stats", lambda: made.softmax(x, generate_stats="yes")),
    ):
        with pytest.raises(error, match=said):
            call()
    assert made._nodes == []


def test_nothing_to_compute() -> None:
    """A graph without outputs is refused; a node that no output needs costs nothing."""
    made = graph()
    x = made.tensor((2, 3), name="x")
    made.exp(x)
    with pytest.raises(InvalidGraphError, match="set_output"):
        made.validate()
    made.neg(x).set_output(True)
    assert [step.operation for step in made.lowered.problem.steps] == ["neg"]


def test_reduced_types_are_no_arithmetic() -> None:
    """HALF is no compute type."""
    made = graph()
    made.exp(made.tensor((2,)), compute_data_type=HALF, name="exp").set_output(True)
    with pytest.raises(NotSupported, match="exp 'exp' has compute_data_type"):
        made.validate()


def test_not_beside_sdpa() -> None:
    """A graph is one sdpa, or primitives."""
    made = graph()
    q = made.tensor((1, 1, 2, 8), name="q")
    o, _ = made.sdpa(q, q, q, is_inference=True)
    made.exp(o.set_output(True)).set_output(True)
    with pytest.raises(NotSupported, match="sdpa 'sdpa', exp 'exp.0'; plans run graphs of exactly"):
        made.validate()


def test_packs_are_checked() -> None:
    """Packs are held to the declarations, as those of sdpa are."""
    made = graph()
    x = made.tensor((2, 3), name="x")
    y = made.exp(x, name="exp").set_output(True)
    made.build()
    for wrong, said in (
        (np.zeros((2, 3), np.float32), r"x \(uid 1\): expected elements of"),
        (np.zeros((3, 2), np.float16), "expected shape"),
        (np.zeros((2, 6), np.float16)[:, ::2], "expected strides"),
        (None, "is missing"),
    ):
        with pytest.raises(InvalidVariantPackError, match=said):
            made.execute({x: wrong, y: np.zeros((2, 3), np.float16)})


def test_keys() -> None:
    """Graphs of the same operations have one key, whatever their names; of others, others."""

    def key(operation: str = "exp", name: str = "x", twice: bool = False) -> int:
        made = graph()
        x = made.tensor((2, 3), name=name)
        y = getattr(made, operation)(x)
        made.add(x if twice else y, y).set_output(True)
        return made.key()

    assert key() == key(name="other")
    assert len({key(), key("neg"), key(twice=True)}) == 3


def test_opaque_s() -> None:
    """What is in cuDNN's opaque layout, only attention says: no other graph writes it."""
    made = graph()
    x = made.tensor((1, 1, 2, 4), name="x")
    s, _ = made.softmax(x, name="softmax")
    s.set_output(True).set_reordering_type(cudnn.tensor_reordering.F16x16)
    with pytest.raises(NotSupported, match="in the layout F16x16.*'softmax' is no softmax of"):
        made.validate()


@pytest.mark.parametrize("idle", [0, 3331333, 2**63])
def test_views_of_elements_with_gaps(idle: int) -> None:
    """A view of a tensor with gaps orders its elements anew; strides of sizes 1 mean nothing, here
    neither."""
    made = cudnn.pygraph(io_data_type=FLOAT, handle=cudnn.create_handle(device="cpu"))
    x = made.tensor((1, 2, 4), (idle, 6, 1)).set_alignment(4)
    y = made.reshape(x).set_dim((2, 1, 2, 2)).set_stride((1, idle, 6, 2)).set_output(True)
    # Its own memory is laid out like that, too.
    made.build()
    memory, out = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    seen = np.lib.stride_tricks.as_strided(memory, (1, 2, 4), (0, 24, 4))
    result = np.lib.stride_tricks.as_strided(out, (2, 1, 2, 2), (4, 0, 24, 8))
    made.execute({x: seen, y: result})
    expected = [[[[memory[i + 6 * j + 2 * k] for k in range(2)] for j in range(2)]] for i in (0, 1)]
    np.testing.assert_array_equal(result, expected)
