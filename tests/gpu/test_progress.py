"""Kernels end although others hold most of the GPU: no block waits for one that has not begun."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.gpu.test_deterministic import built

pytestmark = pytest.mark.gpu

#: Blocks that leave no shared memory to others, until the host says so or 20 seconds have passed.
HOLD = r"""
extern "C" __global__ void hold(volatile int* begun, volatile int* enough) {
  begun[blockIdx.x] = 1;
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*enough == 0 && now - start < 20000000000ll);
}
"""

#: Name -> (batch, heads of q, heads of k and v, queries, keys, head dimension, options).
CASES: dict[str, tuple[int, int, int, int, int, int, dict[str, Any]]] = {
    "full": (2, 16, 16, 2048, 2048, 128, {}),
    "causal, narrow heads": (2, 16, 16, 2048, 2048, 64, {"use_causal_mask": True}),
    "causal, grouped heads": (2, 32, 4, 2048, 2048, 128, {"use_causal_mask": True}),
    "wide heads": (2, 8, 8, 1024, 1024, 256, {"use_causal_mask": True}),
    "few queries": (2, 16, 2, 4, 16384, 128, {}),
    "some queries": (1, 8, 8, 128, 16384, 128, {}),
}


@contextmanager
def held(cupy: Any, free: int) -> Iterator[None]:
    """All multiprocessors but ``free`` of them are taken."""
    device = cupy.cuda.Device()
    blocks = device.attributes["MultiProcessorCount"] - free
    most = device.attributes["MaxSharedMemoryPerBlockOptin"]
    words = cupy.cuda.alloc_pinned_memory(4 * (blocks + 1))
    flags = memoryview(words).cast("B").cast("i")
    for i in range(blocks + 1):
        flags[i] = 0
    kernel = cupy.RawKernel(HOLD, "hold")
    kernel.max_dynamic_shared_size_bytes = most
    stream = cupy.cuda.Stream(non_blocking=True)
    device.synchronize()
    with stream:
        kernel((blocks,), (32,), (words.ptr, words.ptr + 4 * blocks), shared_mem=most)
    try:
        while not all(flags[:blocks]):
            time.sleep(0.001)
        yield
    finally:
        flags[blocks] = 1
        stream.synchronize()


def all_written(torch: Any, outputs: list[Any], seconds: float) -> bool:
    """Whether no NaN is left within the time; copied to the host, which takes no multiprocessor."""
    stream = torch.cuda.Stream()
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in outputs]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with torch.cuda.stream(stream):
            for copy, output in zip(copies, outputs, strict=True):
                copy.copy_(output, non_blocking=True)
        stream.synchronize()
        if not any(bool(copy.isnan().any()) for copy in copies):
            return True
    return False


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if "queries" not in name])
def test_backward_on_part_of_the_gpu(name: str, deterministic: bool) -> None:
    """All of dQ, dK and dV is there while another kernel holds 100 multiprocessors and more, on
    which blocks of the backward can begin only later: what they would have done, others have."""
    torch, q, k, v, options = _problem(CASES[name])
    o, stats = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device="cuda")
    tensors = {"q": q, "k": k, "v": v}
    graph, pack, workspace = built(
        torch, "sdpa", tensors, [o, stats], {**options, "generate_stats": True}
    )
    graph.execute(pack, workspace)
    tensors |= {"o": o, "dO": torch.randn_like(q), "stats": stats}
    options["use_deterministic_algorithm"] = deterministic
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    call = built(torch, "sdpa_backward", tensors, gradients, options)
    _ends_on_part_of_the_gpu(torch, call, gradients)


@pytest.mark.parametrize("name", CASES)
def test_forward_on_part_of_the_gpu(name: str) -> None:
    """All of o is there while another kernel holds 100 multiprocessors and more, whether blocks
    have all keys of their queries or parts of them that are merged."""
    torch, q, k, v, options = _problem(CASES[name])
    o, stats = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device="cuda")
    options["generate_stats"] = True
    call = built(torch, "sdpa", {"q": q, "k": k, "v": v}, [o, stats], options)
    _ends_on_part_of_the_gpu(torch, call, [o])


def _problem(
    case: tuple[int, int, int, int, int, int, dict[str, Any]],
) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """PyTorch, q, k, v, and the options of a case."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's kernels wait for other blocks")
    batch, heads, groups, seq_q, seq_kv, dim, options = case
    sizes = ((heads, seq_q), (groups, seq_kv), (groups, seq_kv))
    q, k, v = (torch.randn(batch, *size, dim, device="cuda").bfloat16() for size in sizes)
    return torch, q, k, v, {**options, "attn_scale": dim**-0.5}


def _ends_on_part_of_the_gpu(torch: Any, call: tuple[Any, Any, Any], outputs: list[Any]) -> None:
    """What a call leaves on few multiprocessors is what it leaves on all."""
    cupy = pytest.importorskip("cupy")
    graph, pack, workspace = call
    graph.execute(pack, workspace)
    want = [output.float() for output in outputs]
    for output in outputs:
        output.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with held(cupy, free=16):
        with torch.cuda.stream(stream):
            graph.execute(pack, workspace)
        ended = all_written(torch, outputs, seconds=10)
    stream.synchronize()
    assert ended
    for output, exact in zip(outputs, want, strict=True):
        assert (output.float() - exact).norm() < 0.01 * exact.norm()
