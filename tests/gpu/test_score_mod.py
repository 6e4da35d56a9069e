"""Functions of scores on a GPU, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from dlattn.dtypes import data_type, from_any
from dlattn.plans.fwd_sm80 import FwdSm80
from dlattn.problem import (
    Direction,
    Geometry,
    Padding,
    Problem,
    Scale,
    TensorSpec,
    Values,
    skipped_blocks,
)
from dlattn.runtime.target import default_target
from tests.corners import LENGTHS, check_primitives, check_score_mod
from tests.drivers import check, gpu_library, run_graph
from tests.score_mod_examples import assert_gradients_are_as_given, examples
from tests.unit.test_score_blocks import CONDITIONS, EXACT, HEADS, program, tensors

pytestmark = pytest.mark.gpu

OTHERS = ("bwd::dQ", "bwd::dK", "bwd::dV")
EXAMPLES = {dtype: examples(dtype) for dtype in ("bfloat16", "float16")}


@pytest.mark.parametrize("dtype", EXAMPLES)
@pytest.mark.parametrize("name", EXAMPLES["bfloat16"])
def test_example(name: str, dtype: str) -> None:
    """Every function is right with everything that it may meet, in every kernel."""
    check(EXAMPLES[dtype][name], gpu_library(), run_graph)


@pytest.mark.parametrize("check", [check_score_mod, check_primitives])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_corner_of_lengths_beyond_the_tensors(check: Callable[..., None], lengths: str) -> None:
    """See the test of this name of the reference engine."""
    check(gpu_library(), "half", LENGTHS[lengths])


def test_gradients_are_as_given() -> None:
    """See :func:`tests.score_mod_examples.assert_gradients_are_as_given`."""
    assert_gradients_are_as_given(gpu_library(), "half")


def bits(data: Any, shape: tuple[int, ...]) -> Any:
    """Of rows of whole words, the first of each."""
    rows = np.unpackbits(data, bitorder="little").reshape(*shape[:-1], -1)
    return rows[..., : shape[-1]].astype(bool)


def assert_told_alike(tree: Any, seq_q: int, seq_kv: int, seed: int, wild: bool) -> None:
    """The first kernel says of every block what the function's NumPy twin says."""
    cupy = pytest.importorskip("cupy")
    made, names = program(tree)
    blocks = skipped_blocks(made)
    if blocks is None:
        return
    data = tensors(seq_q, seq_kv, seed, wild)
    arrays = {f"score_mod_{i}": cupy.asarray(data[name]) for i, name in enumerate(names)}
    shapes = {"q": (1, HEADS, seq_q, 64), "k": (1, 1, seq_kv, 64)}
    for role, like in (("q", "q"), ("k", "k"), ("v", "k"), ("o", "q")):
        arrays[role] = cupy.zeros(shapes[like], cupy.float16)
    specs = {
        role: TensorSpec(
            role, x.shape, tuple(n // x.itemsize for n in x.strides), from_any(x.dtype)
        )
        for role, x in arrays.items()
    }
    edits, masks = (Scale(), made), (Padding(), blocks)
    problem = Problem(Direction.FORWARD, data_type.HALF, 64, 64, edits, masks)
    plan = FwdSm80(problem, Geometry(specs), replace(default_target(), index=0))
    plan.build()
    workspace = cupy.full(plan.workspace_size, 0x5A, cupy.uint8)
    pointers = {role: x.data.ptr for role, x in arrays.items()}
    plan.execute(pointers, workspace.data.ptr, 0)
    cupy.cuda.Device().synchronize()
    len_q, len_kv = (np.full((1, 1, 1, 1), size) for size in (seq_q, seq_kv))
    read = tuple(data[name] for name in names)
    values = Values(1.0, len_q, len_kv, heads_q=HEADS, score_tensors=read)
    truth = blocks.truth(0, values)
    assert plan.score_blocks is not None
    _, heads, _ = plan.score_blocks.grid
    shape = (heads, *truth.maybe.shape[2:])
    size = heads * shape[1] * (4 * -(-seq_kv // 4096))
    told = cupy.asnumpy(workspace)[plan.scratch_bytes :]
    for got, want in zip((told[:size], told[size : 2 * size]), truth, strict=True):
        np.testing.assert_array_equal(bits(got, shape), np.broadcast_to(want[0], shape))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seq_q, seq_kv", [(300, 131), (5000, 9000)])
def test_blocks(name: str, seq_q: int, seq_kv: int) -> None:
    """See :func:`assert_told_alike`: of masks of blocks, in one patch of blocks and in several."""
    assert_told_alike(EXACT[name], seq_q, seq_kv, 1, wild=False)


@settings(max_examples=30, deadline=None)
@given(CONDITIONS, st.integers(0, 99), st.booleans())
def test_blocks_of_any_condition(tree: Any, seed: int, wild: bool) -> None:
    """See :func:`assert_told_alike`: of any condition, NaN and infinity included."""
    assert_told_alike(tree, 200, 300, seed, wild)


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (1, 1, 700, 1), (1, 1, 1, 1)])
def test_gradients_have_one_order(shape: tuple[int, ...]) -> None:
    """Blocks that share what they add up arrive in any order, and add in their own: every run has
    the same bits."""
    cupy = pytest.importorskip("cupy")
    rng = cupy.random.default_rng(0)
    q, k, v, o, d_o = rng.standard_normal((5, 2, 4, 700, 64), cupy.float32).astype(cupy.float16)
    stats, factor = cupy.full((2, 4, 700, 1), 8, cupy.float32), cupy.ones(shape, cupy.float32)
    inputs = [q, k, v, o, d_o, stats, factor]
    with cudnn.Graph(inputs=inputs, outputs=["bwd::dScoreMod.0", *OTHERS]) as graph:
        read = graph.tensor_like(factor, name="factor")
        results = graph.sdpa_backward(
            *inputs[:6], attn_scale=0.125, score_mod=lambda graph, score: graph.mul(score, read),
            score_mod_gradients=[factor], name="bwd",
        )  # fmt: skip
        for t in results:
            t.set_output(True)
    first, *_ = graph(*inputs)
    assert bool(first.any())
    for _ in range(20):
        again, *_ = graph(*inputs)
        assert bool((again == first).all())
