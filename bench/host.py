"""Host costs: ``python -m bench.host``.

Prints microseconds of CPU per ``execute`` of a forward graph on a checked pack of five torch CUDA
tensors, per replay of a CUDA graph of a forward and a backward, per ``update_cuda_graph`` of that
backward, and per call of each function into memory for the output, beside those of torch's
``x.add_(1)`` as a yardstick of the machine; the seconds of a first (cold) compile; and what a
second process with a warm cache spends until its first result, beyond importing CuPy and creating
the CUDA context; and the same of a process that deserialises the graph, with neither NVRTC nor a
cache.
"""

from __future__ import annotations

import compileall
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: What every process does first, and last.
FIRST = """
import sys, time
import cupy
cupy.zeros(1).sum().get()  # the context, and CuPy's own kernels
memory = cupy.zeros(5 * 16384, dtype=cupy.float32)
begun = time.perf_counter()
import dlattn
imported = time.perf_counter()
"""
LAST = """
g.execute({uid: memory.data.ptr + (uid - 1) * 65536 for uid in range(1, 6)}, 0)
cupy.cuda.get_current_stream().synchronize()
seconds = time.perf_counter() - begun
from dlattn.runtime import jit
loaded = "libnvrtc" in open("/proc/self/maps").read()
print(f"{seconds:.4f} {imported - begun:.4f} {jit.statistics.compiles} {loaded}")
"""
WARM = """
g = dlattn.pygraph(io_data_type=dlattn.data_type.BFLOAT16,
                   intermediate_data_type=dlattn.data_type.FLOAT,
                   compute_data_type=dlattn.data_type.FLOAT)
dim, stride = (1, 2, 128, 64), (16384, 8192, 64, 1)
q, k, v = (
    g.tensor(dim=dim, stride=stride, data_type=dlattn.data_type.BFLOAT16, uid=uid)
    for uid in (1, 2, 3)
)
o, stats = g.sdpa(q, k, v, attn_scale=0.125, generate_stats=True, use_causal_mask=True)
o.set_output(True).set_dim(dim).set_stride(stride).set_uid(4)
stats.set_output(True).set_uid(5)
g.build([dlattn.heur_mode.A])
"""
SAVE = """
open(sys.argv[1], "wb").write(bytes(g.serialize()))
"""
LOAD = """
g = dlattn.pygraph()
g.deserialize([*open(sys.argv[1], "rb").read()])
"""


def microseconds(call: Callable[[], object], rounds: int = 50, calls: int = 200) -> float:
    """CPU time of one call that enqueues work: the least of rounds short enough for the queue."""
    import torch

    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begun) / calls)
    return best * 1e6


def execute() -> Callable[[], object]:
    """One ``execute`` of a built forward graph on torch tensors, each checked."""
    import torch

    import dlattn

    q, k, v = (
        torch.randn(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    o, stats = torch.empty_like(q), torch.empty(1, 1, 128, 1, device="cuda")
    graph = dlattn.pygraph(
        io_data_type=dlattn.data_type.BFLOAT16,
        intermediate_data_type=dlattn.data_type.FLOAT,
        compute_data_type=dlattn.data_type.FLOAT,
    )
    tq, tk, tv = (graph.tensor_like(t) for t in (q, k, v))
    to, ts = graph.sdpa(tq, tk, tv, attn_scale=0.125, generate_stats=True)
    to.set_output(True).set_dim(o.shape).set_stride(o.stride())
    ts.set_output(True)
    graph.build([dlattn.heur_mode.A])
    pack = {tq: q, tk: k, tv: v, to: o, ts: stats}
    return lambda: graph.execute(pack, 0)


def cuda_graphs() -> dict[str, Callable[[], object]]:
    """One replay of a captured forward and backward; one update of a populated backward."""
    import torch

    import dlattn

    q, k, v, d_o = torch.randn(4, 1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    o, stats = torch.empty_like(q), torch.empty(1, 1, 128, 1, device="cuda")
    gradients = [torch.empty_like(q) for _ in range(3)]
    calls = []
    for operation, inputs, outputs, options in (
        ("sdpa", (q, k, v), (o, stats), {"generate_stats": True}),
        ("sdpa_backward", (q, k, v, o, d_o, stats), gradients, {}),
    ):
        graph = dlattn.pygraph(
            io_data_type=dlattn.data_type.BFLOAT16,
            intermediate_data_type=dlattn.data_type.FLOAT,
            compute_data_type=dlattn.data_type.FLOAT,
        )
        fed = [graph.tensor_like(x) for x in inputs]
        made = getattr(graph, operation)(*fed, attn_scale=0.125, **options)
        for t in made:
            t.set_output(True)
        graph.build([dlattn.heur_mode.A])
        size = max(16, graph.get_workspace_size())
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        calls.append((graph, dict(zip((*fed, *made), (*inputs, *outputs), strict=True)), workspace))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for graph, pack, workspace in calls:
            graph.execute(pack, workspace)
    native = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuGraphCreate(ctypes.byref(native), 0)
    address = native.value
    graph, pack, workspace = calls[1]
    graph.populate_cuda_graph(None, pack, workspace, address)
    return {
        "replay of a forward and a backward": captured.replay,
        "update_cuda_graph of a backward": lambda: graph.update_cuda_graph(
            None, pack, workspace, address
        ),
    }


def functions() -> dict[str, Callable[[], object]]:
    """One call of each function on torch tensors, with preallocated outputs."""
    import torch

    from dlattn import attention, merge_states
    from dlattn.flash import flash_attn_with_kvcache, mha_fwd, mha_varlen_fwd

    q = torch.randn(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v, out = torch.randn_like(q), torch.randn_like(q), torch.empty_like(q)
    flat = [x.flatten(0, 1) for x in (q, k, v, out)]
    lengths = torch.tensor([0, 128], device="cuda", dtype=torch.int32)
    lse = torch.zeros(1, 1, 128, device="cuda")
    new, cached = (q[:, :1], k[:, :1], v[:, :1], out[:, :1]), lengths[:1]
    return {
        "mha_fwd": lambda: mha_fwd(q, k, v, out, None, 0.0, 0.125, True),
        "mha_fwd, one query": lambda: mha_fwd(new[0], k, v, new[3], None, 0.0, 0.125, True),
        "mha_varlen_fwd": lambda: mha_varlen_fwd(
            *flat, lengths, lengths, None, None, None, 128, 128, 0.0, 0.125, False, True
        ),
        "attention": lambda: attention(q, k, v, causal=True, out=out),
        "merge_states": lambda: merge_states(q, lse, k, lse, out=(out, lse)),
        "flash_attn_with_kvcache, appending": lambda: flash_attn_with_kvcache(
            new[0], k, v, new[1], new[2], cache_seqlens=cached, causal=True, out=new[3]
        ),
    }


def differentiable() -> dict[str, Callable[[], object]]:
    """The forward of attention that will have a gradient, dlattn's and PyTorch's own."""
    import torch

    from dlattn.torch import scaled_dot_product_attention

    q, k, v = (
        torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    own = torch.nn.functional.scaled_dot_product_attention
    return {
        "dlattn.torch's scaled_dot_product_attention": lambda: scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "torch's own": lambda: own(q, k, v, is_causal=True),
    }


def add_one() -> Callable[[], object]:
    """torch's ``x.add_(1)`` on one element: the least that a launch costs from Python here."""
    import torch

    x = torch.zeros(1, device="cuda")
    return lambda: x.add_(1)


@dataclass(frozen=True)
class Start:
    """A fresh process until its first result.

    Attributes:
        seconds: beyond importing CuPy and creating the CUDA context.
        importing: of these, to import dlattn.
        compiles: kernels that were compiled.
        nvrtc: whether NVRTC was loaded.
    """

    seconds: float
    importing: float
    compiles: int
    nvrtc: bool

    def __str__(self) -> str:
        return (
            f"first result after {1e3 * self.seconds:.0f} ms, of which importing dlattn takes "
            f"{1e3 * self.importing:.0f}; {self.compiles} compiles, NVRTC loaded: {self.nvrtc}"
        )


def start(program: str, cache: str, *arguments: str) -> Start:
    """Run a program that makes the graph, and executes it.

    The package is byte-compiled first, as pip leaves an installed one.
    """
    compileall.compile_dir(Path(__file__).parent.parent / "dlattn", quiet=1)
    output = subprocess.run(
        [sys.executable, "-c", FIRST + program + LAST, *arguments],
        env={**os.environ, "DLATTN_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return Start(float(output[0]), float(output[1]), int(output[2]), output[3] == "True")


def main() -> None:
    print(f"execute, five torch tensors, checked: {microseconds(execute()):.2f} us")
    for name, call in cuda_graphs().items():
        print(f"{name}: {microseconds(call):.2f} us")
    for name, call in functions().items():
        print(f"{name}, preallocated output: {microseconds(call):.2f} us")
    for name, call in differentiable().items():
        print(f"{name}, with a gradient to come: {microseconds(call):.2f} us")
    print(f"torch's x.add_(1), the yardstick: {microseconds(add_one()):.2f} us")
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
        print(f"cold process: {start(WARM, cache)}")
        for _ in range(3):
            print(f"warm process: {start(WARM, cache)}")
        data = str(Path(empty) / "graph")
        start(WARM + SAVE, cache, data)
        for _ in range(3):
            print(f"process that deserialises: {start(LOAD, empty, data)}")


if __name__ == "__main__":
    main()
