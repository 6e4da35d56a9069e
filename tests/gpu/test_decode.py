"""Few queries to many keys: shares of one item, of several, of none, on a GPU.

Random cases (``test_random.py``) draw few queries, too, but seldom keys for more than one block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn.graph.tensor import Tensor
from tests.cases import Case
from tests.decode_divisions import DIVIDED, WIDE
from tests.drivers import check, gpu_library, run_graph
from tests.few_blocks import few_multiprocessors, run_on_few

pytestmark = pytest.mark.gpu

CASES = {
    "one item, many blocks": Case(**WIDE, heads_q=8, seq_kv=5000),
    "heads of their own": Case(**WIDE, heads_q=32, heads_k=32, heads_v=32, seq_kv=1024),
    "scores far apart": Case(**WIDE, heads_q=4, seq_kv=2000, logits=100.0),
    "shares across items": Case(
        **WIDE, batch=3, heads_q=8, heads_k=2, heads_v=2, seq_kv=5000, right=0, bottom_right=True
    ),
    "more items than blocks": Case(**WIDE, batch=150, heads_q=2, seq_kv=200),
    "clusters, one tile each": Case(**WIDE, heads_q=64, heads_k=8, heads_v=8, seq_kv=1000),
    "pairs": Case(**WIDE, heads_q=64, heads_k=64, heads_v=64, seq_kv=700),
    "clusters with few keys": Case(
        **WIDE, heads_q=16, heads_k=8, heads_v=8, seq_kv=1024, len_q=(1,), len_kv=(100,), sink=0.0,
        page_k=16, page_v=32,
    ),
    "no keys": Case(**WIDE, batch=2, heads_q=4, heads_k=4, heads_v=4, seq_kv=700,
                    len_q=(1, 1), len_kv=(700, 0)),
    "several queries, sink, lengths": Case(
        **WIDE, batch=3, heads_q=8, seq_q=4, seq_kv=600, len_q=(4, 0, 2), len_kv=(555, 600, 1),
        right=0, bottom_right=True, sink=0.0,
    ),
    "64 rows, pages": Case(
        **WIDE, batch=3, heads_q=8, seq_q=8, seq_kv=1600, len_q=(8, 8, 2), len_kv=(1555, 600, 1),
        right=0, bottom_right=True, page_k=16, page_v=16,
    ),
    "28 rows, pages of two sizes": Case(
        **WIDE, batch=8, heads_q=32, heads_k=8, heads_v=8, seq_q=7, seq_kv=700,
        len_q=(7, 5, 7, 0, 1, 7, 7, 2), len_kv=(700, 333, 128, 9, 0, 699, 129, 257), right=0,
        bottom_right=True, page_k=64, page_v=16,
    ),
    "64 rows in pairs": Case(
        **WIDE, batch=8, heads_q=64, heads_k=8, heads_v=8, seq_q=8, seq_kv=500, right=0,
        bottom_right=True, sink=0.0,
    ),
    "pages, shorter than they may be": Case(
        **WIDE, heads_q=8, seq_kv=9000, len_q=(1,), len_kv=(5555,), page_k=64, page_v=16,
    ),
    "pages, of different lengths": Case(
        **WIDE, batch=5, heads_q=16, heads_k=8, heads_v=8, seq_kv=6000, len_q=(1,) * 5,
        len_kv=(5999, 1, 6000, 0, 3000), page_k=16, page_v=64,
    ),
    "pages, where full sequences have another head": Case(
        **WIDE, batch=2, heads_q=20, heads_k=20, heads_v=20, seq_kv=3584, len_q=(1, 1),
        len_kv=(1000, 600), page_k=16, page_v=16,
    ),
    "128 rows, a window": Case(
        **WIDE, batch=3, heads_q=8, seq_q=16, seq_kv=900, left=100, right=0, bottom_right=True
    ),
    "everything that scores are edited by, and all statistics": Case(
        **WIDE, batch=2, heads_q=12, heads_k=4, heads_v=2, seq_q=5, seq_kv=900, left=100, right=0,
        bottom_right=True, alibi="BH", softcap=30.0, row_outputs=("score_max", "score_sum_exp"),
    ),
    "40 lengths, small pages": Case(
        **WIDE, batch=40, heads_q=4, heads_k=2, heads_v=2, seq_kv=300, len_q=(1,) * 40,
        len_kv=tuple(37 * entry % 301 for entry in range(40)), page_k=1, page_v=4,
    ),
    "narrow heads, a bias": Case(
        batch=2, heads_q=8, seq_q=3, seq_kv=2000, head_dim_qk=64, head_dim_v=64, scale=0.125,
        bias="bfloat16",
    ),
    "unequal head dimensions": Case(
        batch=2, heads_q=8, heads_k=2, heads_v=2, seq_q=2, seq_kv=600, head_dim_qk=192,
        head_dim_v=128, scale=0.07,
    ),
    "ragged, odd head dimensions": Case(
        batch=2, heads_q=8, heads_k=4, heads_v=8, seq_q=15, seq_kv=333, head_dim_qk=72,
        head_dim_v=40, scale=0.1, ragged=("q", "o", "stats", "k", "v"), lengths_as="offsets",
        len_q=(15, 11), len_kv=(333, 14),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, dtype: str) -> None:
    """It is right however items are divided."""
    check(replace(CASES[name], dtype=dtype), gpu_library(), run_graph)


@pytest.mark.parametrize("name", DIVIDED)
def test_each_division(name: str) -> None:
    """It is right however items are divided on Hopper (which of these is a test of ``unit``)."""
    multiprocessors, _, case = DIVIDED[name]
    check(case, gpu_library(), partial(run_on_few, multiprocessors))


def _built(q: Any, k: Any, v: Any) -> tuple[dlattn.pygraph, list[Tensor], Tensor]:
    """A decode of these, its inputs and its output."""
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.HALF,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    inputs = [graph.tensor_like(tensor) for tensor in (q, k, v)]
    output, _ = graph.sdpa(*inputs, attn_scale=0.09, is_inference=True)
    output.set_output(True).set_dim(q.shape).set_stride([stride // 2 for stride in q.strides])
    graph.build([dlattn.heur_mode.A])
    assert graph.get_plan_name_at_index(0) == "decode"
    return graph, inputs, output


@pytest.mark.parametrize("keys", [1000, 6000])
def test_a_workspace_serves_again(keys: int) -> None:
    """Each of many calls with one workspace, which held other things before, has the same bits;
    also where clusters need none."""
    cupy = pytest.importorskip("cupy")
    q = cupy.random.default_rng(0).standard_normal((2, 8, 1, 128)).astype(cupy.float16)
    k, v = cupy.random.default_rng(1).standard_normal((2, 2, 1, keys, 128)).astype(cupy.float16)
    graph, inputs, output = _built(q, k, v)
    workspace = cupy.full(max(1, graph.get_workspace_size()), 0xFF, cupy.uint8)
    results = []
    for _ in range(20):
        results.append(cupy.empty_like(q))
        graph.execute(dict(zip((*inputs, output), (q, k, v, results[-1]), strict=True)), workspace)
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("keys", [1000, 6000, 20000])
@pytest.mark.parametrize("bits", [0xFFFF, 0x7E00, 0x7C00])
def test_values_that_are_no_numbers_reach_the_output(keys: int, bits: int) -> None:
    """NaN of any bits and infinity, in one column of values that all attend to: the parts of it are
    no numbers, and other columns are as without."""
    cupy = pytest.importorskip("cupy")
    q = cupy.random.default_rng(0).standard_normal((2, 8, 1, 128)).astype(cupy.float16)
    k, v = cupy.random.default_rng(1).standard_normal((2, 2, 1, keys, 128)).astype(cupy.float16)
    graph, inputs, output = _built(q, k, v)
    workspace = cupy.full(max(1, graph.get_workspace_size()), 0xFF, cupy.uint8)
    results = [cupy.empty_like(q) for _ in range(2)]
    for result in results:
        graph.execute(dict(zip((*inputs, output), (q, k, v, result), strict=True)), workspace)
        v.view(cupy.uint16)[:, :, keys // 3, 5] = bits
    before, after = results
    assert not cupy.isfinite(after[..., 5]).any()
    after[..., 5] = before[..., 5]
    assert (after == before).all()


#: Lets the next kernel begin, and only a millisecond later writes what that one reads.
_LATE = r"""
extern "C" __global__ void write_late(int* to, const int* from, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.parametrize(
    "batch, queries, keys, multiprocessors",
    [
        (1, 1, 2000, 132),
        (5, 1, 700, 132),
        (5, 1, 6000, 132),
        (40, 1, 3000, 132),
        (70, 1, 700, 132),
        (70, 1, 1500, 132),
        (17, 1, 4200, 2),
        (5, 4, 6000, 132),
        (32, 3, 700, 132),
        (1, 9, 9000, 132),  # Hopper's forward, and a kernel for its parts
    ],
)
@pytest.mark.parametrize("written", ["lengths", "pages", "pages of k", "pages of v", "queries"])
def test_what_the_kernel_in_front_writes_is_read(
    batch: int, queries: int, keys: int, multiprocessors: int, written: str
) -> None:
    """Also what it writes after the decode has begun, whatever was there before: lengths and page
    numbers, of one table or of two, are used before they may be known."""
    cupy = pytest.importorskip("cupy")
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < 90:
        pytest.skip("kernels begin before the one in front has ended from sm_90 on")
    rng, page = np.random.default_rng(batch + keys), 16
    pages, of_both = -(-keys // page), "pages of k"
    written, table_v = (of_both, of_both) if written == "pages" else (written, "pages of v")

    def normal(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape), dtype=cupy.float16)

    def drawn() -> dict[str, Any]:
        numbers = {
            "lengths": rng.integers(0, keys + 1, (batch, 1, 1, 1)),
            "pages of k": rng.permutation(batch * pages).reshape(batch, 1, pages, 1),
            "pages of v": rng.permutation(batch * pages).reshape(batch, 1, pages, 1),
        }
        new = {name: cupy.asarray(of, dtype=cupy.int32) for name, of in numbers.items()}
        return {**new, "queries": normal(batch, 16, queries, 128)}

    k, v = (normal(batch * pages, 2, page, 128) for _ in range(2))
    now = drawn()
    if written != "queries":
        wild = rng.integers(-(2**31), 2**31, now[written].shape)
        now[written] = cupy.asarray(wild, dtype=cupy.int32)
    all_queries = cupy.full((batch, 1, 1, 1), queries, dtype=cupy.int32)
    tables = {of: now[of] for of in ("pages of k", table_v)}
    given = (now["queries"], k, v, all_queries, now["lengths"], *tables.values())
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.HALF,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    inputs = [graph.tensor_like(tensor) for tensor in given]
    output, _ = graph.sdpa(
        *inputs[:3], attn_scale=0.09, is_inference=True, use_padding_mask=True,
        seq_len_q=inputs[3], seq_len_kv=inputs[4], paged_attention_k_table=inputs[5],
        paged_attention_v_table=inputs[-1], paged_attention_max_seq_len_kv=keys,
    )  # fmt: skip
    o = cupy.empty_like(given[0])
    output.set_output(True).set_dim(o.shape).set_stride([stride // 2 for stride in o.strides])
    with few_multiprocessors(multiprocessors):
        graph.build([dlattn.heur_mode.A])
    forward = capability == 90 and queries > 8
    assert graph.get_plan_name_at_index(0) == ("fwd_sm90" if forward else "decode")
    workspace = cupy.zeros(max(1, graph.get_workspace_size()), cupy.uint8)
    pack = dict(zip((*inputs, output), (*given, o), strict=True))
    write = cupy.RawKernel(_LATE, "write_late")
    for _ in range(5):
        to, new = (of[written].view(cupy.int32) for of in (now, drawn()))
        write((1,), (128,), (to, new, np.int32(to.size)))
        graph.execute(pack, workspace)
        begun_early = o.copy()
        cupy.cuda.Device().synchronize()
        graph.execute(pack, workspace)
        assert (begun_early == o).all()
