"""The order in which the Hopper forward hands out the query tiles of a block mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
from tests.drivers import check, gpu_library, run_graph

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
