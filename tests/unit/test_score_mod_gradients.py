"""``score_mod_gradients``: what the call and ``validate`` say, and what the problem knows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.plans import bwd_dbias
from dlattn.plans.bwd_sm80 import BwdSm80
from dlattn.plans.bwd_sm90 import BwdSm90
from dlattn.problem import Alibi, Geometry, ScoreProgram, SoftCap, TensorSpec
from dlattn.runtime.target import KNOWN
from tests.score_mods import callback
from tests.unit.test_backward_plans import geometry, problem
from tests.unit.valid_graphs import FLOAT, HALF, Backward, Forward

NotSupported = cudnn.cudnnGraphNotSupportedError
INT32, DOUBLE = cudnn.data_type.INT32, cudnn.data_type.DOUBLE

DIMS = {"slopes": (1, 4, 1, 1), "table": (2, 4, 8, 12), "rows": (2, 1, 8, 1)}
SLOPED = ("add", "s", ("mul", "slopes", ("sub", "col", "row")))
CAPPED = ("mul", 3.0, ("tanh", ("div", "s", 3.0)))


def backward(tree: Any, *wanted: str, mask: Any = None, **arguments: Any) -> Any:
    """A graph whose function is a tree, with gradients of these tensors."""
    made = Backward()
    made.tensors = {
        name: made.graph.tensor(dim, data_type=FLOAT, name=name) for name, dim in DIMS.items()
    }
    made.tensors["documents_q"] = made.graph.tensor((2, 1, 8, 1), data_type=INT32, name="ids")
    asked = [made.tensors[name] for name in wanted]
    function = callback((tree, mask), made.tensors)
    return made.sdpa(score_mod=function, score_mod_gradients=asked, **arguments)


def test_they_are_returned_in_order() -> None:
    """After dV, each under a name of its own, and like the tensor that it is of."""
    made = backward(("add", ("mul", "s", "rows"), "table"), "table", "rows")
    lowered = made.graph.lowered
    names = [t.get_name() for t in made.gradients]
    assert names == ["bwd::dQ", "bwd::dK", "bwd::dV", "bwd::dScoreMod.0", "bwd::dScoreMod.1"]
    for gradient, name in zip(made.gradients[3:], ("table", "rows"), strict=True):
        assert tuple(gradient.get_dim()) == DIMS[name] and gradient.get_data_type() is FLOAT
    told = {lowered.geometry.tensors[of.role].dim: of for of in lowered.problem.score_gradients}
    assert told.keys() == {DIMS["table"], DIMS["rows"]}
    assert told[DIMS["table"]].is_plain and not told[DIMS["rows"]].is_plain


def test_a_type_and_strides_of_its_own() -> None:
    """What the user sets is kept, what is not follows the tensor."""
    made = Backward()
    stride = (0, 1, 0, 0)
    slopes = made.graph.tensor((1, 4, 1, 1), stride, data_type=HALF, name="slopes")
    made.sdpa(score_mod=callback((SLOPED, None), {"slopes": slopes}), score_mod_gradients=[slopes])
    gradient = made.gradients[3].set_data_type(cudnn.data_type.BFLOAT16)
    lowered = made.graph.lowered
    assert tuple(gradient.get_stride()) == stride
    assert lowered.problem.score_gradients[0].dtype is cudnn.data_type.BFLOAT16


def test_slopes_that_are_learned() -> None:
    """Slopes run as ALiBi's, soft caps as such, whether or not gradients are wanted, unless the
    function reads the slopes elsewhere too: the gradient is then of all of it."""
    made = backward(SLOPED, "slopes").graph.lowered
    (of,) = made.problem.score_gradients
    assert isinstance(made.problem.edits[1], Alibi) and of.is_read_by(made.problem.edits[1])
    assert replace(made.problem, score_gradients=()) == backward(SLOPED).graph.lowered.problem
    beside = ("add", ("mul", CAPPED, "rows"), ("mul", "slopes", ("sub", "col", "row")))
    made = backward(beside, "slopes", "rows").graph.lowered
    _, cap, edit, alibi = made.problem.edits
    assert cap == SoftCap() and isinstance(edit, ScoreProgram) and isinstance(alibi, Alibi)
    assert [of.is_read_by(edit) for of in made.problem.score_gradients] == [True, False]
    twice = ("add", ("mul", "s", "slopes"), ("mul", "slopes", ("sub", "col", "row")))
    for wanted, kept in ((("slopes",), ScoreProgram), ((), Alibi)):
        assert isinstance(backward(twice, *wanted).graph.lowered.problem.edits[-1], kept)


def test_nothing_else_changes() -> None:
    """A gradient adds one kernel and leaves the others as they are, on every kernel family."""
    tree = ("add", ("mul", "s", "rows"), ("mul", "slopes", "col"))
    lowered = [backward(tree, *wanted).graph.lowered for wanted in ((), ("slopes",))]
    assert replace(lowered[1].problem, score_gradients=()) == lowered[0].problem
    for family, arch in ((BwdSm80, "sm_80"), (BwdSm90, "sm_90a")):
        first, second = (
            [kernel.source for kernel in family(it.problem, it.geometry, KNOWN[arch]).kernels()]
            for it in lowered
        )
        assert [s for s in second if s.name != "dlattn_bwd_dbias"] == first
        assert len(second) == len(first) + 1


def test_order_is_no_part_of_a_problem() -> None:
    """Graphs that ask in another order share kernels."""
    tree = ("add", ("mul", "s", "rows"), "table")
    first, second = (
        backward(tree, *wanted).graph.lowered.problem
        for wanted in (("table", "rows"), ("rows", "table"))
    )
    assert first == second


def test_a_number_that_is_only_compared() -> None:
    """It has a gradient, which is 0, though nothing else of the function is left."""
    made = backward("s", "rows", mask=("cmp_gt", "rows", 0.5))
    problem = made.graph.lowered.problem
    (of,) = problem.score_gradients
    assert of.partial.lines[of.partial.result].holds(0.0)


def test_what_contradicts_itself() -> None:
    """Tensors that the function does not read, twice the same one, or no function to read them."""
    refused = pytest.raises(cudnn.InvalidArgumentError, match="'table', which score_mod's result")
    with refused:
        backward(SLOPED, "table")
    with pytest.raises(cudnn.InvalidArgumentError, match="'slopes' twice"):
        backward(SLOPED, "slopes", "slopes")
    made = Backward()
    slopes = made.graph.tensor((1, 4, 1, 1), data_type=FLOAT, name="slopes")
    with pytest.raises(cudnn.InvalidArgumentError, match="score_mod_gradients without score_mod"):
        made.sdpa(score_mod_gradients=[slopes])
    with pytest.raises(cudnn.InvalidArgumentError, match="with score_mod_bprop"):
        backward(SLOPED, "slopes", score_mod_bprop=lambda graph, gradient: gradient)
    with pytest.raises(TypeError, match="score_mod_gradients must be tensors of the graph"):
        backward(SLOPED).graph.sdpa_backward(*6 * [slopes], score_mod_gradients=[1.0])
    with pytest.raises(TypeError):
        Forward().sdpa(score_mod_gradients=[slopes])


def test_whole_numbers_have_none() -> None:
    """Integers are refused by name, and so is a gradient of them."""
    tree = ("add", "s", "documents_q")
    with pytest.raises(NotSupported, match="'ids' in score_mod_gradients is .*INT32, of which"):
        backward(tree, "documents_q").validate()
    made = backward(SLOPED, "slopes")
    made.gradients[3].set_data_type(INT32)
    with pytest.raises(ValueError, match=r"dScoreMod.0 is .*INT32; expected FLOAT or HALF"):
        made.validate()


def test_gpus_write_no_doubles() -> None:
    """Kernels refuse a gradient of doubles by its name."""
    lowered = backward(SLOPED, "slopes").graph.lowered
    wanted = tuple(replace(of, dtype=DOUBLE) for of in lowered.problem.score_gradients)
    problem = replace(lowered.problem, score_gradients=wanted)
    said = BwdSm80.supports(problem, lowered.geometry, KNOWN["sm_80"])
    assert "dScoreMod.0, a gradient, must be HALF, BFLOAT16 or FLOAT; got DOUBLE" in str(said)


def test_a_graph_called_like_a_function() -> None:
    """``Graph`` takes arrays, and returns the gradients with the others."""
    rng = np.random.default_rng(0)
    q, k, v, o, d_o = rng.standard_normal((5, 2, 4, 8, 16)).astype(np.float32)
    stats = np.full((2, 4, 8, 1), 3, np.float32)
    slopes = rng.standard_normal((1, 4, 1, 1)).astype(np.float32)
    inputs, outputs = [q, k, v, o, d_o, stats], ["dQ", "dK", "dV", "dScoreMod.0"]
    with cudnn.Graph(
        inputs=[*inputs, slopes], outputs=[f"bwd::{name}" for name in outputs]
    ) as graph:
        read = graph.tensor_like(slopes, name="slopes")
        made = graph.sdpa_backward(
            *inputs, score_mod=callback((SLOPED, None), {"slopes": read}),
            score_mod_gradients=[slopes], name="bwd",
        )  # fmt: skip
        for t in made:
            t.set_output(True)
    *_, gradient = graph(*inputs, slopes)
    assert gradient.shape == slopes.shape and np.isfinite(gradient).all() and gradient.any()


@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 9),
    seq_q=st.integers(1, 5000),
    seq_kv=st.integers(1, 5000),
    axes=st.sets(st.sampled_from("bhqk")),
)
def test_blocks_that_share_a_tile(
    batch: int, heads: int, seq_q: int, seq_kv: int, axes: set[str]
) -> None:
    """No more of them than there are steps along the axes that they divide, nor than run in two
    waves; few tiles and many steps have them; and there is room for what they leave to each
    other."""
    whole = dict(zip("bhqk", (batch, heads, seq_q, seq_kv), strict=True))
    dim = tuple(size if axis in axes else 1 for axis, size in whole.items())
    spec = TensorSpec("dBias", dim, tuple(math.prod(dim[i + 1 :]) for i in range(4)), FLOAT)
    tensors = {**geometry(batch, 1, heads, seq_q, seq_kv).tensors, "dBias": spec}
    tiling, target = bwd_dbias.TILINGS[0], KNOWN["sm_90a"]
    tiles, y, z = bwd_dbias._grid(problem(), Geometry(tensors, 1.0), "dBias", tiling, target)
    steps = {
        "q": -(-seq_q // tiling.tile_q) if dim[2] == 1 else 1,
        "k": -(-seq_kv // tiling.tile_k) if dim[3] == 1 else 1,
        "h": heads // dim[1],
        "b": batch // dim[0],
    }
    assert 1 <= y <= (steps["q"] if dim[2] == 1 else steps["k"])
    assert 1 <= z <= (steps["h"] if dim[1] == 1 else steps["b"])
    most = 2 * target.multiprocessors * tiling.min_blocks
    assert y * z == 1 or tiles * y * z <= most
    if not axes and seq_q > 4000 and seq_kv > 4000:
        assert y == steps["q"]
