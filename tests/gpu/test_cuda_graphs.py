"""CUDA graphs on a GPU: filled by ``populate_cuda_graph``, updated, and captured by frameworks."""

from __future__ import annotations

import ctypes
import gc
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dlattn as cudnn
from dlattn.calls.cache import forget_calls
from dlattn.flash import mha_fwd
from dlattn.runtime import jit, target
from dlattn.runtime.cuda_graph import populate
from dlattn.runtime.launch import Launch
from tests.cases import Case
from tests.cuda_graphs import (
    CudaGraph,
    captured_by_cupy,
    captured_by_torch,
    populated,
    run_by,
    updated,
)
from tests.drivers import check, gpu_library
from tests.gpu.test_runtime import PORTABLE, TEXT
from tests.strategies import families

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's autograd, which computes what to compare with, says so once.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

CASE = Case(
    batch=2, heads_q=4, heads_k=2, heads_v=2, seq_q=96, seq_kv=96, right=0, head_dim_qk=64,
    head_dim_v=64, scale=0.125,
)  # fmt: skip
#: Of each kind of node and argument: tables, counters, decode, ragged, pages, slopes,
#: dropout with numbers in host memory and a dump, sums in a fixed order.
CASES = {
    "plain": CASE,
    "lengths": replace(CASE, len_q=(3, 96), len_kv=(96, 50)),
    "decode": replace(CASE, seq_q=1, seq_kv=3000, stats=None),
    "pages": replace(CASE, len_q=(96, 50), len_kv=(96, 70), page_k=16, page_v=16),
    "alibi": replace(CASE, alibi="cudnn"),
    "softcap": replace(CASE, softcap=5.0),
    "deterministic": replace(CASE, deterministic=True),
    "odd": replace(CASE, layouts=(("q", "odd"),)),
}
WAYS = {
    "populated": populated,
    "updated": updated,
    "torch": captured_by_torch,
    "cupy": captured_by_cupy,
}


def skip_without(way: str) -> None:
    if way == "torch" and not gpu_library().is_torch:
        pytest.skip("needs torch on CUDA")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: Case, way: str) -> None:
    """A CUDA graph does what ``execute`` does, forward and backward, and writes nothing else."""
    skip_without(way)
    check(case, gpu_library(), run_by(WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@settings(settings.get_profile("gpu"))
@given(family=families("gpu", size=3))
def test_random(way: str, family: tuple[Case, ...]) -> None:
    """So it does for every case."""
    skip_without(way)
    for case in family:
        check(case, gpu_library(), run_by(WAYS[way]))


class Forgotten:
    """A call whose plan has a table on the device, and what may take the table's place."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("torch has no CUDA")
        like = {"device": "cuda", "dtype": self.torch.bfloat16}
        self.q, self.k, self.v = self.torch.randn(3, 1, 700, 4, 64, **like).unbind()
        self.want = self.call()
        self.others: list[Any] = []

    def call(self) -> Any:
        return mha_fwd(self.q, self.k, self.v, softmax_scale=0.125, is_causal=True)[0]

    def forget(self) -> None:
        import cupy

        forget_calls()
        gc.collect()
        self.others = [cupy.full(2**n, -1, np.int32) for n in range(7, 16) for _ in range(8)]


def test_a_captured_call_outlives_its_plan() -> None:
    """What a plan has on the device stays there for who captured a call, whatever is forgotten and
    allocated afterwards."""
    its = Forgotten()
    captured = its.torch.cuda.CUDAGraph()
    with its.torch.cuda.graph(captured):
        out = its.call()
    its.forget()
    captured.replay()
    its.torch.cuda.synchronize()
    assert its.torch.equal(out, its.want)


def test_a_waiting_call_outlives_its_plan() -> None:
    """So it does for kernels that have not begun."""
    its = Forgotten()
    its.torch.cuda.synchronize()
    with its.torch.cuda.stream(its.torch.cuda.Stream()):
        its.torch.cuda._sleep(200_000_000)
        out = its.call()
        its.forget()
    its.torch.cuda.synchronize()
    assert its.torch.equal(out, its.want)


# Training -----------------------------------------------------------------------------------------


class Training:
    """A forward and a backward graph over the same memory, in torch."""

    def __init__(self, heuristics: Sequence[cudnn.heur_mode] = (cudnn.heur_mode.A,)) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA")
        self.torch = torch
        types = {
            "io_data_type": cudnn.data_type.HALF,
            "intermediate_data_type": cudnn.data_type.FLOAT,
            "compute_data_type": cudnn.data_type.FLOAT,
        }
        self.memory = self.draw()
        like, options = self.memory, {"attn_scale": 0.125, "use_causal_mask": True}
        self.forward, self.backward = cudnn.pygraph(**types), cudnn.pygraph(**types)
        q, k, v = (self.forward.tensor_like(like[role]) for role in "qkv")
        o, stats = self.forward.sdpa(q, k, v, generate_stats=True, **options)
        o.set_output(True).set_dim(like["o"].shape).set_stride(like["o"].stride())
        stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
        self.forward_roles = dict(
            zip(("q", "k", "v", "o", "stats"), (q, k, v, o, stats), strict=True)
        )
        roles = ("q", "k", "v", "o", "dO", "stats")
        inputs = [self.backward.tensor_like(like[role]) for role in roles]
        made = self.backward.sdpa_backward(*inputs, **options)
        for t in made:
            t.set_output(True)
        self.backward_roles = dict(zip((*roles, "dQ", "dK", "dV"), (*inputs, *made), strict=True))
        self.graphs = ((self.forward, self.forward_roles), (self.backward, self.backward_roles))
        for graph, _ in self.graphs:
            graph.build(heuristics)
        self.workspaces = [
            torch.empty(max(16, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
            for graph, _ in self.graphs
        ]

    def draw(self) -> dict[str, Any]:
        """New memory."""
        torch, shape = self.torch, (2, 4, 200, 64)
        drawn = {
            role: torch.randn(shape, device="cuda", dtype=torch.half) for role in ("q", "k", "v")
        }
        drawn["dO"] = torch.randn(shape, device="cuda", dtype=torch.half)
        drawn |= {role: torch.full_like(drawn["q"], 9.0) for role in ("o", "dQ", "dK", "dV")}
        drawn["stats"] = torch.zeros((2, 4, 200, 1), device="cuda")
        return drawn

    def packs(self, memory: dict[str, Any]) -> list[dict[Any, Any]]:
        return [{t: memory[role] for role, t in roles.items()} for _, roles in self.graphs]

    def check(self, memory: dict[str, Any]) -> None:
        """The outputs, by autograd in float64."""
        torch = self.torch
        inputs = [memory[role].double().requires_grad_() for role in ("q", "k", "v")]
        o = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.125)
        o.backward(memory["dO"].double())
        want = {"o": o, **{f"d{r}": t.grad for r, t in zip("QKV", inputs, strict=True)}}
        for role, values in want.items():
            torch.testing.assert_close(memory[role].double(), values, atol=2e-2, rtol=2e-2)


def test_capture_of_a_pair() -> None:
    """Forward and backward in one torch graph: a replay reads what inputs are then."""
    pair = Training()
    torch = pair.torch
    packs = pair.packs(pair.memory)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for (graph, _), pack, workspace in zip(pair.graphs, packs, pair.workspaces, strict=True):
            graph.execute(pack, workspace)
    for _ in range(3):
        for role, fresh in pair.draw().items():
            pair.memory[role].copy_(fresh)
        captured.replay()
        pair.check(pair.memory)


def test_pair_of_child_graphs() -> None:
    """Forward and backward as children of one graph, as cuDNN's callers nest them: one launch; new
    addresses reach the copies that the children are."""
    pair = Training()
    with CudaGraph() as whole:
        nodes: list[int] = []
        packs = pair.packs(pair.memory)
        for (graph, _), pack, workspace in zip(pair.graphs, packs, pair.workspaces, strict=True):
            with CudaGraph() as part:
                graph.populate_cuda_graph(None, pack, workspace, part)
                nodes.append(whole.add_child(part, *nodes[-1:]))
        whole.instantiate()
        whole.launch()
        pair.check(pair.memory)
        other = pair.draw()
        for (graph, _), node, pack, workspace in zip(
            pair.graphs, nodes, pair.packs(other), pair.workspaces, strict=True
        ):
            graph.update_cuda_graph(None, pack, workspace, whole.child(node))
        whole.update()
        whole.launch()
        pair.check(other)


def test_populated_graphs_are_refused_again() -> None:
    """Only an empty graph is populated, and only one that was populated is updated."""
    pair = Training()
    (forward, _), (backward, _) = pair.graphs
    packs = pair.packs(pair.memory)
    with CudaGraph() as native, CudaGraph() as empty:
        forward.populate_cuda_graph(None, packs[0], pair.workspaces[0], native)
        with pytest.raises(RuntimeError, match="nodes already"):
            forward.populate_cuda_graph(None, packs[0], pair.workspaces[0], native)
        with pytest.raises(RuntimeError, match="not a line of the nodes"):
            backward.update_cuda_graph(None, packs[1], pair.workspaces[1], native)
        with pytest.raises(RuntimeError, match="not a line of the nodes"):
            forward.update_cuda_graph(None, packs[0], pair.workspaces[0], empty)


def test_programmatic_chain() -> None:
    """Kernels with programmatic edges, each of which sees what the one before wrote."""
    cupy = pytest.importorskip("cupy")
    device = target.cuda_target(0)
    early = device.capability >= (9, 0)
    source = jit.KernelSource("shift", TEXT if early else PORTABLE)
    loaded = jit.load(jit.compile_kernel(source, device.arch), 0)
    loaded.set_shared(4000)
    data = cupy.zeros(1000, np.float32)
    params = ctypes.create_string_buffer(24)
    struct.pack_into("=QQif", params, 0, data.data.ptr, data.data.ptr, 1000, 1.0)
    address = ctypes.addressof(params)
    shift = Launch(loaded.function, (1, 1, 1), 128, 4000, address, programmatic=early)
    with CudaGraph() as native:
        populate(int(native), [shift] * 100)
        struct.pack_into("=QQif", params, 0, 0, 0, 0, 0.0)  # the nodes own what they hold
        native.instantiate()
        native.launch()
    np.testing.assert_array_equal(data.get(), np.full(1000, 100))
