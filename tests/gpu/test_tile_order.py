"""The order in which the Hopper forward hands out the query tiles of a block mask."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.dtypes import data_type, from_any
from dlattn.plans.fwd_sm90 import FwdSm90
from dlattn.problem import (
    BLOCK,
    Band,
    BlockMask,
    Direction,
    Geometry,
    Padding,
    Problem,
    Scale,
    TensorSpec,
)
from dlattn.runtime.target import cuda_target, default_target
from tests.cases import Case
from tests.cuda_graphs import CudaGraph
from tests.drivers import check, gpu_library, run_graph
from tests.score_mods import callback
from tests.serial import run_overridden_from

pytestmark = pytest.mark.gpu

#: More query tiles than there are multiprocessors.
MANY = Case(
    batch=2, heads_q=12, heads_k=4, heads_v=4, seq_q=1100, seq_kv=1300, head_dim_qk=64,
    head_dim_v=64, scale=0.125, blocks=0.5,
)  # fmt: skip
DOCUMENTS = ("s", ("cmp_eq", "documents_q", "documents_k"))
CASES = {
    "a mask of each": MANY,
    "one mask": replace(MANY, blocks_axes="", right=0, bottom_right=True),
    "a mask of each head, transposed": replace(MANY, blocks_axes="h", blocks_layout="queries"),
    "lengths": replace(MANY, blocks_axes="", len_q=(1100, 129), len_kv=(1, 1300), right=0),
    "documents": replace(MANY, blocks=None, score_mod=DOCUMENTS, head_dim_qk=128, head_dim_v=128),
    "documents, and a mask": replace(MANY, score_mod=DOCUMENTS, blocks_axes="h"),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if cuda_target(0).capability != (9, 0):
        pytest.skip("needs Hopper.")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_many_tiles(case: Case) -> None:
    """Every tile is handed out once, whatever its place in the order."""
    check(case, gpu_library(), run_graph)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_many_tiles_of_a_graph_of_few(case: Case) -> None:
    """So it is where the graph was declared for sizes that have no order."""
    few = {"batch": 1, "seq_q": 100}
    if case.len_q is not None:
        few |= {"len_q": (100,), "len_kv": (1300,)}
    check(case, gpu_library(), partial(run_overridden_from, few))


def visits(mask: Any, len_q: int, seq_q: int, len_kv: int, causal: bool) -> list[int]:
    """How many blocks each query tile visits; -1 of one without queries."""
    found = []
    for tile in range(-(-seq_q // BLOCK)):
        last = min((tile + 1) * BLOCK, len_q) - 1
        keys = min(len_kv, last + 1) if causal else len_kv
        blocks = mask[tile, : -(-keys // BLOCK)].sum()
        found.append(-1 if tile * BLOCK >= len_q else int(blocks))
    return found


@pytest.mark.parametrize("axes", ["", "b", "h", "bh"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_order(axes: str, causal: bool, lengths: bool) -> None:
    """Tiles come in the order of how many blocks they visit, then in their own; those without
    queries last. More blocks than 32 lanes have bytes for."""
    cupy = pytest.importorskip("cupy")
    batch, heads, seq_q, seq_kv = 2, 3, 24_000, 40_000
    draw = np.random.default_rng(len(axes) + 2 * causal + 4 * lengths)
    own = batch if "b" in axes else 1, heads if "h" in axes else 1
    rows, columns = -(-seq_q // BLOCK), -(-seq_kv // BLOCK)
    kept = draw.random((*own, rows, columns)) < draw.random((*own, rows, 1))
    shapes = {"q": (batch, heads, seq_q, 8), "k": (batch, 1, seq_kv, 8)}
    arrays = {
        role: cupy.zeros(shapes[like], cupy.float16)
        for role, like in (("q", "q"), ("k", "k"), ("v", "k"), ("o", "q"))
    }
    arrays["block_mask"] = cupy.asarray(np.packbits(kept, axis=-1, bitorder="little"))
    of_q, of_kv = [seq_q] * batch, [seq_kv] * batch
    if lengths:
        of_q, of_kv = [1000, 23_937], [39_000, 12_345]
        for role, values in (("seq_len_q", of_q), ("seq_len_kv", of_kv)):
            arrays[role] = cupy.asarray(np.array(values, np.int32).reshape(batch, 1, 1, 1))
    specs = {
        role: TensorSpec(
            role, x.shape, tuple(n // x.itemsize for n in x.strides), from_any(x.dtype)
        )
        for role, x in arrays.items()
    }
    masks = (Padding(), *([Band(left=False, right=True)] if causal else []), BlockMask())
    problem = Problem(Direction.FORWARD, data_type.HALF, 8, 8, (Scale(),), masks)
    geometry = Geometry(specs, 1.0, band_right=0 if causal else None)
    plan = FwdSm90(problem, geometry, replace(default_target(), index=0))
    plan.build()
    workspace = cupy.full(plan.workspace_size, 0x5A, cupy.uint8)
    plan.execute({role: x.data.ptr for role, x in arrays.items()}, workspace.data.ptr, 0)
    cupy.cuda.Device().synchronize()
    told = cupy.asnumpy(workspace)[256:].view(np.int32)
    entries = batch if lengths or "b" in axes else 1, own[1]
    for b, h in np.ndindex(entries):
        mask = kept[min(b, own[0] - 1), min(h, own[1] - 1)]
        counts = np.array(visits(mask, of_q[b], seq_q, of_kv[b], causal))
        begin = (b * entries[1] + h) * rows
        np.testing.assert_array_equal(
            told[begin : begin + rows], np.argsort(-counts, kind="stable")
        )


class Changing:
    """A forward whose documents and lengths are others in each round, in the same memory."""

    heads, seq, head_dim = 12, 1536, 64

    def __init__(self, **options: Any) -> None:
        import cupy

        self.random = cupy.random.default_rng(0)
        q, k, v = self.random.standard_normal((3, 1, self.heads, self.seq, self.head_dim)).astype(
            np.float16
        )
        o = cupy.empty_like(q)
        rows = cupy.zeros((1, 1, self.seq, 1), np.int32)
        columns = cupy.zeros((1, 1, 1, self.seq), np.int32)
        length = cupy.ones((1, 1, 1, 1), np.int32)
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.HALF,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **options,
        )
        arrays = (q, k, v, rows, columns, length)
        self.inputs = [self.graph.tensor_like(x) for x in arrays]
        named = dict(zip(("documents_q", "documents_k"), self.inputs[3:5], strict=True))
        made, _ = self.graph.sdpa(
            *self.inputs[:3], attn_scale=0.125, generate_stats=False, use_padding_mask=True,
            seq_len_q=self.inputs[5], seq_len_kv=self.inputs[5],
            score_mod=callback(DOCUMENTS, named),
        )  # fmt: skip
        made.set_output(True).set_dim(o.shape).set_stride([n // 2 for n in o.strides])
        self.graph.build()
        self.pack = dict(zip((*self.inputs, made), (*arrays, o), strict=True))
        self.workspace = cupy.zeros(self.graph.get_workspace_size(), np.uint8)

    def change(self) -> None:
        """Documents of 1 to 1,536 tokens, a length, and a workspace that held anything."""
        *_, rows, columns, length, o = self.pack.values()
        begins = self.random.random(self.seq) < 0.5 ** self.random.integers(1, 10)
        ids = begins.cumsum().astype(np.int32)
        rows[:], columns[:] = ids.reshape(rows.shape), ids.reshape(columns.shape)
        length[:] = self.random.integers(0, self.seq + 1)
        self.workspace[:] = self.random.integers(0, 256, self.workspace.size, np.uint8)
        o[:] = np.nan

    def check(self) -> None:
        """The output, by a softmax in float64."""
        import cupy

        q, k, v, rows, columns, length, o = self.pack.values()
        kept = slice(int(length.item()))
        q, k, v = (x[:, :, kept].astype(np.float64) for x in (q, k, v))
        attends = (rows == columns)[:, :, kept, kept]
        weights = cupy.where(attends, cupy.exp(0.125 * (q @ k.swapaxes(-1, -2))), 0.0)
        want = cupy.zeros(o.shape)
        want[:, :, kept] = weights / weights.sum(-1, keepdims=True) @ v
        cupy.testing.assert_allclose(o.astype(np.float64), want, atol=4e-3, rtol=4e-3)


def test_documents_that_change() -> None:
    """Blocks, order and forward of each launch are of the tensors as they are then: one may begin
    before the one before it ends, and the workspace is the same."""
    its = Changing()
    for _ in range(20):
        its.change()
        for _ in range(3):
            its.graph.execute(its.pack, its.workspace)
        its.check()


def test_documents_that_change_between_replays() -> None:
    """So they are of replays of a CUDA graph."""
    its = Changing()
    with CudaGraph() as native:
        its.graph.populate_cuda_graph(None, its.pack, its.workspace, native)
        native.instantiate()
        for _ in range(20):
            its.change()
            native.launch()
            its.check()
