"""What a built kernel serves: other sizes, threads and launches, without compiling again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import dlattn
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


def test_a_workspace_serves_again() -> None:
    """Each call with a workspace that held anything before, with many tiles and with none, has the
    same bits, and zeros beyond the lengths: nobody clears where blocks count tiles."""
    cupy = pytest.importorskip("cupy")
    size = (5, 300, 8, 64)  # BSHD
    random = cupy.random.default_rng(0)
    q, k, v = (random.standard_normal(size).astype(cupy.float16) for _ in range(3))
    q, k, v = (tensor.transpose(0, 2, 1, 3) for tensor in (q, k, v))
    lengths = cupy.array([300, 0, 17, 129, 64], cupy.int32).reshape(5, 1, 1, 1)
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.HALF,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    inputs = [graph.tensor_like(tensor) for tensor in (q, k, v, lengths)]
    output, _ = graph.sdpa(
        *inputs[:3], attn_scale=0.09, is_inference=True, use_causal_mask=True,
        use_padding_mask=True, seq_len_q=inputs[3], seq_len_kv=inputs[3],
    )  # fmt: skip
    output.set_output(True).set_dim(q.shape).set_stride([stride // 2 for stride in q.strides])
    graph.build([dlattn.heur_mode.A])
    workspace = cupy.full(max(1, graph.get_workspace_size()), 0xFF, cupy.uint8)
    results = []
    for call in range(30):
        given = cupy.zeros_like(lengths) if call % 7 == 3 else lengths
        results.append(cupy.full_like(q, cupy.nan))
        pack = dict(zip((*inputs, output), (q, k, v, given, results[-1]), strict=True))
        graph.execute(pack, workspace)
        if call % 4 == 1:
            workspace[:] = random.integers(0, 256, workspace.size, cupy.uint8)
        if call % 7 == 3:
            assert not results.pop().any()
    assert all((result == results[0]).all() for result in results)
    for entry, length in zip(results[0], lengths.ravel().tolist(), strict=True):
        assert not entry[:, length:].any()


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
