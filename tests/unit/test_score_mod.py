"""``score_mod`` and ``score_mod_bprop``: what is refused, and what is recognised."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.problem import Alibi, Band, Padding, Scale, ScoreBlocks, ScoreProgram, SoftCap
from tests.score_mods import callback
from tests.unit.valid_graphs import FLOAT, Backward, Forward, lengths

NotSupported = cudnn.cudnnGraphNotSupportedError
INT32 = cudnn.data_type.INT32


def modified(tree: Any, mask: Any = None, graph: type[Forward] = Forward, **arguments: Any) -> Any:
    """What a graph lowers to; tensors in trees are named as in :mod:`tests.score_mods`."""
    made = graph()
    declared = {
        "slopes": made.graph.tensor((1, 4, 1, 1), data_type=FLOAT, name="slopes"),
        "table": made.graph.tensor((2, 4, 8, 12), data_type=FLOAT, name="table"),
        "documents_q": made.graph.tensor((2, 1, 8, 1), data_type=INT32, name="documents_q"),
        "documents_k": made.graph.tensor((2, 1, 1, 12), data_type=INT32, name="documents_k"),
        "rows": lengths(made.graph, "len_q"),
        "columns": lengths(made.graph, "len_kv"),
    }
    made.sdpa(score_mod=callback((tree, mask), declared), **arguments)
    return made.graph.lowered


ROW_COL = ("cmp_ge", "row", "col")
CAP = ("mul", 3.0, ("tanh", ("div", "s", 3.0)))


# Recognised ---------------------------------------------------------------------------------------


def test_identity_is_nothing() -> None:
    """A function that returns the score is no edit, and what adds nothing is none."""
    plain = Forward().sdpa().graph.lowered
    for tree in ("s", ("add", "s", 0.0), ("mul", ("mul", "s", 4.0), 0.25)):
        assert modified(tree).problem == plain.problem


@pytest.mark.parametrize("graph", [Forward, Backward])
@pytest.mark.parametrize(
    "tree",
    [
        CAP,
        ("mul", ("tanh", ("mul", "s", 1 / 3)), 3.0),
        ("div", ("tanh", ("div", "s", 3.0)), 1 / 3),
    ],
)
def test_soft_cap(graph: type[Forward], tree: Any) -> None:
    """c * tanh(score / c) is the soft cap, in either direction."""
    lowered = modified(tree, graph=graph)
    assert lowered.problem.edits[1:] == (SoftCap(),)
    assert lowered.geometry.softcap == pytest.approx(3.0)


def test_a_cap_that_is_none() -> None:
    """Another factor, a second score beside it, or a cap that the node has stay a program."""
    for tree in (("mul", 2.0, ("tanh", ("div", "s", 3.0))), ("add", CAP, "s")):
        (_, edit) = modified(tree).problem.edits
        assert isinstance(edit, ScoreProgram)
    _, capped, edit = modified(CAP, softcap=5.0).problem.edits
    assert capped == SoftCap() and isinstance(edit, ScoreProgram)


@pytest.mark.parametrize(
    "tree",
    [
        ("add", "s", ("mul", "slopes", ("sub", "col", "row"))),
        ("sub", "s", ("mul", ("sub", "row", "col"), "slopes")),
        ("add", ("mul", "slopes", ("neg", ("sub", "row", "col"))), "s"),
    ],
)
def test_slopes(tree: Any) -> None:
    """A slope of each head times key - query is cuDNN's ALiBi, with slopes that are given."""
    lowered = modified(tree, use_causal_mask=True)
    assert lowered.problem.edits[1:] == (Alibi(symmetric=False),)
    assert lowered.tensors["alibi_slopes"].get_name() == "slopes"


def test_slopes_that_are_none() -> None:
    """Steps of another sign, or slopes that the node has, stay a program."""
    steps = ("mul", "slopes", ("sub", "col", "row"))
    for tree, arguments in (
        (("sub", "s", steps), {}),
        (("add", "s", steps), {"use_alibi_mask": True}),
    ):
        edits = modified(tree, **arguments).problem.edits
        assert isinstance(edits[1], ScoreProgram)


@pytest.mark.parametrize(
    "mask, left, right, bottom_right",
    [
        (ROW_COL, None, 0, False),
        (("logical_not", ("cmp_lt", "row", "col")), None, 0, False),
        (("cmp_lt", ("sub", "col", "row"), 4), None, 3, False),
        (("logical_and", ROW_COL, ("cmp_lt", ("sub", "row", "col"), 4)), 4, 0, False),
        (("cmp_ge", ("add", "row", 4), "col"), None, 4, False),
        (
            ("logical_not", ("logical_or", ("cmp_gt", "col", "row"), ("cmp_ge", "row", 99))),
            None, 0, False,
        ),
    ],
)  # fmt: skip
def test_diagonals(mask: Any, left: Any, right: Any, bottom_right: bool) -> None:
    """Comparisons of positions are a diagonal band; rows that all are kept may be masked, too."""
    lowered = modified("s", mask)
    geometry, masks = lowered.geometry, lowered.problem.masks
    assert masks[:2] == (Padding(), Band(left is not None, right is not None))
    assert (geometry.band_left, geometry.band_right) == (left, right)
    assert geometry.bottom_right is bottom_right


def test_lengths() -> None:
    """Positions below lengths are a padding mask, and with them the bottom right corner."""
    within = (
        "logical_and", ("cmp_lt", "row", "rows"), ("cmp_lt", "col", "columns"),
    )  # fmt: skip
    lowered = modified("s", within)
    assert len(lowered.problem.edits) == 1
    assert lowered.tensors["seq_len_q"].get_name() == "len_q"
    assert lowered.tensors["seq_len_kv"].get_name() == "len_kv"
    corner = ("cmp_ge", ("add", "row", ("sub", "columns", "rows")), "col")
    lowered = modified("s", ("logical_and", within, corner))
    assert lowered.geometry.bottom_right and lowered.geometry.band_right == 0


@pytest.mark.parametrize("graph", [Forward, Backward])
@pytest.mark.parametrize(
    "argument, taken",
    [
        ("corner", ()),
        ("slopes", ()),
        ("sink_token", ("seq_len_kv",)),
        ("use_causal_mask", ("seq_len_q", "seq_len_kv")),
        ("use_alibi_mask", ("seq_len_q", "seq_len_kv")),
        ("seq_len_q", ("seq_len_q",)),
    ],
)
def test_lengths_that_mean_more(graph: type[Forward], argument: str, taken: Any) -> None:
    """A length is no argument where it would move a corner or slopes of the node, or take sinks
    from rows; the node's own stays what it is."""
    made = graph()
    rows, columns = lengths(made.graph, "len_q"), lengths(made.graph, "len_kv")
    head = made.graph.tensor((1, 4, 1, 1), data_type=FLOAT, name="head")
    within = ("logical_and", ("cmp_lt", "row", "rows"), ("cmp_lt", "col", "columns"))
    given: Any = {
        "corner": {"use_causal_mask_bottom_right": True},
        "slopes": {"alibi_slopes": head},
        "sink_token": {"sink_token": head},
        "seq_len_q": {
            "seq_len_q": rows, "use_padding_mask": True, "use_causal_mask_bottom_right": True,
        },
    }  # fmt: skip
    given = given.get(argument, {argument: True})
    if argument == "sink_token" and graph is Backward:
        given["dSink_token"] = made.graph.tensor((1, 4, 1, 1), data_type=FLOAT, name="d_head")
    mod = callback(("s", within), {"rows": rows, "columns": columns})
    lowered = made.sdpa(score_mod=mod, **given).graph.lowered
    assert {"seq_len_q", "seq_len_kv"} & lowered.tensors.keys() == {*taken}
    edits = [edit for edit in lowered.problem.edits if isinstance(edit, ScoreProgram)]
    assert sum(len(edit.reads) for edit in edits) == 2 - len(taken)


def test_factors_of_no_sum() -> None:
    """A position times what is infinite, or no number, is a position to no mask."""
    for factor in (math.inf, -math.inf, math.nan):
        lowered = modified("s", ("cmp_ge", ("mul", "row", factor), "col"))
        assert isinstance(lowered.problem.edits[1], ScoreProgram)


def test_what_stays_of_a_mask() -> None:
    """Of masks that are joined, those that the node has no room for stay a program."""
    mask = ("logical_and", ROW_COL, ("cmp_eq", "documents_q", "documents_k"))
    lowered = modified(CAP, mask)
    _, cap, edit = lowered.problem.edits
    assert cap == SoftCap() and isinstance(edit, ScoreProgram)
    assert lowered.problem.masks == (Padding(), Band(False, True), ScoreBlocks(edit))
    assert [line.operation for line in edit.lines].count("position") == 0


def test_diagonals_meet() -> None:
    """A band of the node and one of the function keep what both keep; of two corners, the function
    keeps its own."""
    mask = ("cmp_ge", ("add", "row", 4), "col")
    lowered = modified("s", mask, diagonal_band_right_bound=2, diagonal_band_left_bound=3)
    assert (lowered.geometry.band_left, lowered.geometry.band_right) == (3, 2)
    lowered = modified("s", ROW_COL, use_causal_mask_bottom_right=True)
    assert lowered.geometry.bottom_right and len(lowered.problem.edits) == 2


def test_a_number_by_value_masks_nothing_yet() -> None:
    """What a pack holds may be any number: a selection of it stays a program."""
    made = Forward()
    low = made.graph.tensor((1, 1, 1, 1), data_type=FLOAT, is_pass_by_value=True, name="low")

    def score_mod(graph: Any, score: Any) -> Any:
        causal = graph.cmp_ge(graph.gen_index(score, 2), graph.gen_index(score, 3))
        return graph.binary_select(score, low, causal)

    problem = made.sdpa(score_mod=score_mod).graph.lowered.problem
    assert isinstance(problem.edits[1], ScoreProgram) and problem.edits[1].reads[0].by_value


@pytest.mark.parametrize("dim", [(1, 4, 1, 1), (2, 1, 1, 1), (1, 1, 8, 12)])
def test_a_number_by_value_is_one(dim: tuple[int, ...]) -> None:
    """Several elements cannot be passed by value: kernels would read the first one for all."""
    made = Forward()
    several = made.graph.tensor(dim, data_type=FLOAT, is_pass_by_value=True, name="several")
    made.sdpa(score_mod=lambda graph, score: graph.mul(score, several))
    with pytest.raises(ValueError, match="several has dim .* passed by value, as only one element"):
        made.validate()
    several.set_is_pass_by_value(False)
    made.validate()


def test_two_graphs_share_a_program() -> None:
    """Sizes are no part of a program, nor the order in which equal lines were written."""
    steps = ("sub", "col", "row")
    first = modified(("add", ("tanh", "s"), ("mul", 0.5, steps)))
    second = modified(("add", ("mul", steps, 0.5), ("identity", ("tanh", "s"))))
    assert first.problem.edits[1].result is not None
    assert len(first.problem.edits[1].lines) == len(second.problem.edits[1].lines)
    again = modified(("add", ("tanh", "s"), ("mul", 0.5, steps)))
    assert first.problem == again.problem and hash(first.problem) == hash(again.problem)


def test_lengths_without_a_padding_mask() -> None:
    """Beside a function they are for it to read, as in cuDNN, and mask nothing by themselves."""
    made = Forward()
    length = lengths(made.graph, "len")
    made.sdpa(score_mod=lambda graph, score: score, seq_len_q=length)
    assert "seq_len_q" not in made.graph.lowered.tensors
    made = Forward()
    length, own = lengths(made.graph, "len"), lengths(made.graph, "columns")
    mod = callback(("s", ("cmp_lt", "col", "columns")), {"columns": own})
    tensors = made.sdpa(score_mod=mod, seq_len_q=length).graph.lowered.tensors
    assert "seq_len_q" not in tensors and tensors["seq_len_kv"] is own


def test_keys_tell_functions_apart() -> None:
    """A graph's key depends on what its function does."""

    def key(tree: Any) -> int:
        made = Forward()
        return made.sdpa(score_mod=callback((tree, None), {})).graph.key()

    assert key(("mul", "s", 2.0)) == key(("mul", "s", 2.0))
    assert (
        len({key(tree) for tree in ("s", ("mul", "s", 2.0), ("mul", "s", 3.0), ("tanh", "s"))}) == 4
    )


# Gradients ----------------------------------------------------------------------------------------


def backward_edit(score_mod: Any, bprop: Any) -> ScoreProgram:
    made = Backward().sdpa(score_mod=score_mod, score_mod_bprop=bprop)
    scale, edit = made.graph.lowered.problem.edits
    assert isinstance(scale, Scale) and isinstance(edit, ScoreProgram)
    return edit


def test_saved_activations() -> None:
    """score_mod_bprop comes after score_mod, and may use what that has computed, as cuDNN's soft
    cap does; two that mean the same are the same program."""
    saved = []

    def score_mod(graph: Any, score: Any) -> Any:
        saved.append(graph.tanh(score))
        return graph.mul(saved[-1], graph.tensor_scalar(2.0))

    def of_two(graph: Any, gradient: Any) -> Any:
        square = graph.mul(saved[-1], saved[-1])
        slope = graph.sub(graph.tensor_scalar(1.0), square)
        return graph.mul(graph.mul(gradient, slope), graph.tensor_scalar(2.0))

    def of_three(graph: Any, gradient: Any, score: Any) -> Any:
        return graph.mul(graph.tanh_backward(gradient, score), graph.tensor_scalar(2.0))

    given = backward_edit(score_mod, of_two)
    assert given == backward_edit(score_mod, of_three)
    assert len(given.lines) == len(backward_edit(score_mod, None).lines)


def test_a_gradient_of_its_own() -> None:
    """score_mod_bprop is taken at its word: the gradient need not be that of score_mod."""

    def score_mod(graph: Any, score: Any) -> Any:
        return graph.floor(score)

    edit = backward_edit(score_mod, lambda graph, gradient: gradient)
    assert edit.constant_derivative
    edit = backward_edit(score_mod, None)
    assert edit.slope is not None and edit.lines[edit.slope].number == 0.0


def test_gradients_are_linear() -> None:
    """Kernels multiply the gradient by a weight: nothing else has one."""
    for bprop in (
        lambda graph, gradient: graph.mul(gradient, gradient),
        lambda graph, gradient: graph.add(gradient, graph.tensor_scalar(1.0)),
        lambda graph, gradient: graph.relu(gradient),
    ):
        made = Backward().sdpa(score_mod=lambda graph, score: score, score_mod_bprop=bprop)
        with pytest.raises(NotSupported, match="score_mod_bprop of 'bwd' is not linear"):
            made.validate()


# Refused ------------------------------------------------------------------------------------------


def refused(score_mod: Any, error: type[Exception], said: str, **arguments: Any) -> None:
    with pytest.raises(error, match=said):
        Forward().sdpa(score_mod=score_mod, **arguments).validate()


def test_no_functions() -> None:
    """What is no function, or returns no tensor of its graph, is refused by the call."""
    refused(3, TypeError, "score_mod must be a function")
    refused(lambda graph, score: None, TypeError, "score_mod must return a tensor")
    other = cudnn.pygraph().tensor((2, 4, 8, 12), name="other")
    refused(lambda graph, score: other, cudnn.InvalidGraphError, "returned 'other', which none")
    with pytest.raises(cudnn.InvalidArgumentError, match="score_mod_bprop without score_mod"):
        Backward().sdpa(score_mod_bprop=lambda graph, gradient: gradient)


def test_other_operations() -> None:
    """A function of scores is pointwise; its tensors are the graph's."""
    refused(
        lambda graph, score: graph.matmul(score, score),
        NotSupported, "score_mod of 'sdpa': matmul is no pointwise operation",
    )  # fmt: skip
    refused(lambda graph, score: graph.add(score, 1.0), TypeError, "add: b must be a tensor")
    made = r"graph.tensor_like\(\) makes of an array.*got a ndarray"
    refused(lambda graph, score: graph.add(score, np.zeros(1)), TypeError, made)
    refused(lambda graph, score: graph.neg(score, name=5), TypeError, "name must be a str")
    refused(
        lambda graph, score: graph.exp(score).set_output(True),
        NotSupported, "of score_mod writes .* to memory",
    )  # fmt: skip


def test_shapes() -> None:
    """Results have the shape of scores, and what is read broadcasts to it."""
    made = Forward()
    small = made.graph.tensor((1, 1, 1, 1), data_type=FLOAT, name="small")
    made.sdpa(score_mod=lambda graph, score: graph.exp(small))
    with pytest.raises(cudnn.InvalidGraphError, match=r"of dim \(1, 1, 1, 1\); expected"):
        made.validate()
    made = Forward()
    odd = made.graph.tensor((2, 4, 8, 5), data_type=FLOAT, name="odd")
    made.sdpa(score_mod=lambda graph, score: graph.add(score, odd))
    with pytest.raises(cudnn.InvalidGraphError, match="odd has dim"):
        made.validate()


def test_many_tensors() -> None:
    """Kernels are given eight tensors."""
    made = Forward()
    tensors = [made.graph.tensor((1, 4, 1, 1), data_type=FLOAT) for _ in range(9)]

    def score_mod(graph: Any, score: Any) -> Any:
        for t in tensors:
            score = graph.add(score, t)
        return score

    with pytest.raises(NotSupported, match="reads 9 tensors; kernels take 8"):
        made.sdpa(score_mod=score_mod)


def test_types() -> None:
    """A tensor that is read has a type that kernels read."""
    made = Forward()
    fp8 = made.graph.tensor((1, 4, 1, 1), data_type=cudnn.data_type.FP8_E4M3, name="fp8")
    made.sdpa(score_mod=lambda graph, score: graph.add(score, fp8))
    with pytest.raises((ValueError, NotSupported), match="fp8|FP8"):
        made.validate()


def test_infinite_numbers() -> None:
    """-inf may be anywhere; a last selection of it, with nothing recognised, has no derivative."""
    mask = ("cmp_eq", "documents_q", "documents_k")
    lowered = modified("s", mask, graph=Backward)
    (edit,) = lowered.problem.edits[1:]
    assert edit.constant_derivative
    assert any(line.number == -math.inf for line in edit.lines)
