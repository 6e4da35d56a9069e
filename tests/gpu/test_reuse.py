"""What a built kernel serves: other sizes, threads and launches, without compiling again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dlattn.runtime import jit
from tests.cases import Case
from tests.drivers import check, gpu_library, run_graph

pytestmark = pytest.mark.gpu

CASE = Case(
    batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=96, seq_kv=96, right=0, head_dim_qk=64,
    head_dim_v=64, scale=0.125,
)  # fmt: skip
OTHERS = [
    replace(CASE, batch=3),
    replace(CASE, heads_q=6, heads_k=1, heads_v=3),
    replace(CASE, seq_q=17, seq_kv=300),
    replace(CASE, scale=0.25),
    replace(CASE, right=7, bottom_right=True),
    replace(CASE, len_q=(3, 96), len_kv=(96, 50)),
    replace(CASE, layouts=(("q", "bhsd"), ("o", "bhsd"))),
]


def test_other_sizes_compile_nothing() -> None:
    """Batch, heads, lengths, strides, scale and bounds are run-time values."""
    check(CASE, gpu_library(), run_graph)
    before = jit.statistics.compiles
    for case in OTHERS:
        check(case, gpu_library(), run_graph)
    assert jit.statistics.compiles == before


def test_other_sizes_of_a_decode_compile_nothing() -> None:
    """Among few queries, their number and that of heads that share keys are run-time values."""
    few = replace(CASE, seq_q=1, seq_kv=300, stats=None)
    check(few, gpu_library(), run_graph)
    before = jit.statistics.compiles
    for case in (
        replace(few, batch=7, seq_kv=3000),
        replace(few, seq_q=16, heads_q=8, heads_k=1, heads_v=1),
        replace(few, seq_q=5, heads_q=6, heads_k=1, heads_v=3),
        replace(few, len_q=(1, 0), len_kv=(300, 50)),
    ):
        check(case, gpu_library(), run_graph)
    assert jit.statistics.compiles == before


def test_other_pages_compile_nothing() -> None:
    """Sizes of pages and packed tables are run-time values, too."""
    first = replace(CASE, len_q=(96, 50), len_kv=(96, 70), page_k=16, page_v=16)
    check(first, gpu_library(), run_graph)
    before = jit.statistics.compiles
    for other in (
        replace(first, page_k=8, page_v=256),
        replace(first, page_k=64, page_v=32, packed_tables=True),
        replace(first, seq_kv=300, len_kv=(300, 0)),
    ):
        check(other, gpu_library(), run_graph)
    assert jit.statistics.compiles == before


def test_threads() -> None:
    """Calls from several threads, on the same kernels, do not disturb each other."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for case in OTHERS:
                check(replace(case, seed=seed), gpu_library(), run_graph)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_graph_capture() -> None:
    """``execute`` can be captured in a CUDA graph: it neither allocates nor synchronises."""
    torch = pytest.importorskip("torch")
    import dlattn

    q, k, v = (torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.half) for _ in range(3))
    o = torch.empty_like(q)
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.HALF,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    tensors = [graph.tensor_like(x) for x in (q, k, v)]
    out, _ = graph.sdpa(*tensors, attn_scale=0.125, generate_stats=False)
    out.set_output(True).set_dim(o.shape).set_stride(o.stride())
    graph.build([dlattn.heur_mode.A])
    pack = dict(zip((*tensors, out), (q, k, v, o), strict=True))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute(pack, 0)
    q.copy_(torch.randn_like(q))
    captured.replay()
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), scale=0.125
    )
    torch.testing.assert_close(o.double(), want, atol=2e-3, rtol=2e-3)
