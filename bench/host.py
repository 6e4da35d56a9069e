"""What calls cost the CPU: the preset ``host`` of ``bench.run``, or ``python -m bench.host``.

Microseconds of CPU per ``execute`` of a forward graph on a checked pack of five torch CUDA tensors,
per replay of a CUDA graph of a forward and a backward, per ``update_cuda_graph`` of that backward,
per call of each function into memory for the output, and per call of differentiable attention,
dlattn's and torch's own; torch's ``x.add_(1)`` beside them is a yardstick of the machine. All take
turns in one process; the least of rounds short enough for the launch queue counts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.cases import FORWARD
from bench.jobs import Effort, Job, Named
from bench.machine import require_gpu
from bench.measure import Measured, check_device, sentence
from bench.peers import Peer

HOST = "host"
DEVICE = "cuda"
#: Calls of a round.
CALLS = 200

#: By case and contender.
Calls = dict[tuple[str, str], Callable[[], object]]


def microseconds(
    calls: Mapping[tuple[str, str], Callable[[], object]], rounds: int = 50
) -> dict[tuple[str, str], float]:
    """CPU time of one call that enqueues work, of each, in turn."""
    import torch

    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for key, call in calls.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[key] = min(best[key], (time.perf_counter() - begun) / CALLS)
    torch.cuda.synchronize()
    return {key: 1e6 * seconds for key, seconds in best.items()}


def execute() -> Calls:
    """One ``execute`` of a built forward graph on torch tensors, each checked."""
    import torch

    import dlattn

    q, k, v = (
        torch.randn(1, 128, 1, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    o, stats = torch.empty_like(q), torch.empty(1, 1, 128, 1, device=DEVICE)
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
    return {("execute", "dlattn"): lambda: graph.execute(pack, 0)}


def cuda_graphs() -> Calls:
    """One replay of a captured forward and backward; one update of a populated backward."""
    import torch

    import dlattn

    q, k, v, d_o = torch.randn(4, 1, 1, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    o, stats = torch.empty_like(q), torch.empty(1, 1, 128, 1, device=DEVICE)
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
        workspace = torch.empty(size, device=DEVICE, dtype=torch.uint8)
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
        ("CUDA graph: replay of both passes", "dlattn"): captured.replay,
        ("CUDA graph: update of a backward", "dlattn"): lambda: graph.update_cuda_graph(
            None, pack, workspace, address
        ),
    }


def functions() -> Calls:
    """One call of each function on torch tensors, with preallocated outputs."""
    import torch

    from dlattn import attention, merge_states
    from dlattn.flash import flash_attn_with_kvcache, mha_fwd, mha_varlen_fwd

    q = torch.randn(1, 128, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v, out = torch.randn_like(q), torch.randn_like(q), torch.empty_like(q)
    flat = [x.flatten(0, 1) for x in (q, k, v, out)]
    lengths = torch.tensor([0, 128], device=DEVICE, dtype=torch.int32)
    lse = torch.zeros(1, 1, 128, device=DEVICE)
    # A token of their own: what is appended is no part of the cache.
    new, cached = [x[:, :1].clone() for x in (q, k, v, out)], lengths[:1]
    return {
        ("mha_fwd", "dlattn"): lambda: mha_fwd(q, k, v, out, None, 0.0, 0.125, True),
        ("mha_fwd, one query", "dlattn"): lambda: mha_fwd(
            new[0], k, v, new[3], None, 0.0, 0.125, True
        ),
        ("mha_varlen_fwd", "dlattn"): lambda: mha_varlen_fwd(
            *flat, lengths, lengths, None, None, None, 128, 128, 0.0, 0.125, False, True
        ),
        ("attention", "dlattn"): lambda: attention(q, k, v, causal=True, out=out),
        ("merge_states", "dlattn"): lambda: merge_states(q, lse, k, lse, out=(out, lse)),
        ("flash_attn_with_kvcache", "dlattn"): lambda: flash_attn_with_kvcache(
            new[0], k, v, new[1], new[2], cache_seqlens=cached, causal=True, out=new[3]
        ),
    }


def differentiable() -> Calls:
    """Attention that will have a gradient, that has none, and with its backward."""
    import torch

    from dlattn.torch import scaled_dot_product_attention as ours

    own = torch.nn.functional.scaled_dot_product_attention
    leaves = [
        torch.randn(1, 1, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    plain = [x.detach() for x in leaves]
    d_o = torch.randn_like(plain[0])

    def both(attention: Callable[..., torch.Tensor]) -> object:
        return torch.autograd.grad(attention(*leaves, is_causal=True), leaves, d_o)

    calls: Calls = {}
    for impl, attention in (("dlattn", ours), ("torch", own)):
        calls |= {
            ("sdpa, gradient to come", impl): lambda f=attention: f(*leaves, is_causal=True),
            ("sdpa, no gradient", impl): lambda f=attention: f(*plain, is_causal=True),
            ("sdpa, both passes", impl): lambda f=attention: both(f),
        }
    return calls


def add_one() -> Calls:
    """torch's ``x.add_(1)`` on one element: the least that a launch costs from Python here."""
    import torch

    x = torch.zeros(1, device=DEVICE)
    return {("x.add_(1)", "torch"): lambda: x.add_(1)}


class HostJob(Job):
    """All calls, in turn."""

    cases = (
        "execute",
        "sdpa, gradient to come",
        "sdpa, no gradient",
        "sdpa, both passes",
        "mha_fwd",
        "mha_fwd, one query",
        "mha_varlen_fwd",
        "attention",
        "merge_states",
        "flash_attn_with_kvcache",
        "CUDA graph: replay of both passes",
        "CUDA graph: update of a backward",
        "x.add_(1)",
    )
    passes = (FORWARD,)

    @property
    def name(self) -> str:
        return "host time"

    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        calls: Calls = {}
        failed = Measured(Named(self.cases[0]), FORWARD)
        for make in (execute, differentiable, functions, cuda_graphs, add_one):
            try:
                made = make()
                for call in made.values():
                    call()
                calls |= made
            except Exception as raised:
                failed.left_out[make.__name__] = sentence(raised)
                check_device(make.__name__, self.name, raised)
        by_case: dict[str, Measured] = {}
        for (case, impl), us in microseconds(calls, 10 * effort.rounds).items():
            measured = by_case.setdefault(case, Measured(Named(case), FORWARD, {HOST: {}}))
            measured.ms[HOST][impl] = us / 1e3
        over, under = (by_case.get(name) for name in ("sdpa, gradient to come", "execute"))
        if over and under and "dlattn" in over.ms[HOST]:
            more = 1e3 * (over.ms[HOST]["dlattn"] - under.ms[HOST]["dlattn"])
            over.notes["dlattn"] = f"sdpa with a gradient to come, {more:.1f} us over execute"
        yield from by_case.values()
        if failed.left_out:
            yield failed


def main() -> None:
    """Prints microseconds of every call."""
    require_gpu("bench.host")
    for measured in HostJob().measure((FORWARD,), (), Effort(5, 0.0, ())):
        for impl, ms in measured.ms.get(HOST, {}).items():
            print(f"{measured.case.name}, {impl}: {1e3 * ms:.2f} us")
        for what, reason in measured.left_out.items():
            print(f"left out: {what}: {reason}")


if __name__ == "__main__":
    main()
