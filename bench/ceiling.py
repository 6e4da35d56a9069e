"""What the tensor cores of a Hopper GPU sustain: ``python -m bench.ceiling [seconds]``.

Every multiprocessor runs two warpgroups that do nothing but wgmma from shared memory, eight
m64n128k16 to a commit, without any load; on bf16, then on fp16, whose longer mantissas take more
power. On normally distributed data the limit is power, not
issue, so that attention cannot reach more however well it is scheduled; measure it in the same
run as the kernels that are held against it, because it moves with the GPU's temperature.
"""

from __future__ import annotations

import ctypes
import struct
import sys

from bench.machine import require_gpu
from bench.timing import time_once

#: Warpgroups of a block, wgmma of a commit, and the instruction's shape.
WARPGROUPS, BATCH = 2, 8
M, N, K = 64, 128, 16

#: Bytes of shared memory: a 64 x 128 tile of A per warpgroup, and a 128 x 128 tile of B, in halves
#: of 64 columns so that a row is the 128 bytes of the widest swizzle.
A_BYTES, B_BYTES = M * 128 * 2, N * 128 * 2
SHARED_BYTES = WARPGROUPS * A_BYTES + B_BYTES

_ACCUMULATORS = M * N // 128

_TEMPLATE = """\
struct Params {
  const uint4* data;  // what shared memory is filled with
  float* sums;        // (blocks, threads)
  int iterations;
};

// PTX ISA, "Asynchronous wgmma": matrix descriptor, K-major, 128-byte swizzle, 8 rows = 1024 bytes.
__device__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// PTX ISA, "wgmma.mma_async". It always accumulates: ptxas leaves out products that a later one
// without accumulation would overwrite.
__device__ void wgmma(float (&d)[@COUNT@], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.@TYPE@.@TYPE@"
      " {@REGISTERS@}, %@A@, %@B@, 1, 1, 1, 0, 0;"
      : @READ_WRITE@
      : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(@THREADS@, 1)
@NAME@(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint4 s_tiles[];
  for (int i = threadIdx.x; i < @SHARED_BYTES@ / 16; i += @THREADS@) s_tiles[i] = p.data[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  const unsigned base = (unsigned)__cvta_generic_to_shared(s_tiles);
  const unsigned warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const unsigned long long a = descriptor(base + @B_BYTES@ + warpgroup * @A_BYTES@);
  const unsigned long long b = descriptor(base);
  float d[@COUNT@] = {};
#pragma unroll 1
  for (int i = 0; i < p.iterations; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < @BATCH@; ++k) {  // 32 bytes a step, then the second half of the columns
      const unsigned long long step = 2 * (k % 4);
      wgmma(d, a + k / 4 * (@A_BYTES@ / 32) + step, b + k / 4 * (@B_BYTES@ / 32) + step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : @READ_WRITE@ :: "memory");
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < @COUNT@; ++i) sum += d[i];
  p.sums[blockIdx.x * @THREADS@ + threadIdx.x] = sum;
}
"""


def source(dtype: str = "bf16"):  # type: ignore[no-untyped-def]
    """The kernel for "bf16" or "f16", as :class:`dlattn.runtime.jit.KernelSource`."""
    from dlattn.runtime.jit import KernelSource

    words = {
        "COUNT": _ACCUMULATORS,
        "REGISTERS": ", ".join(f"%{i}" for i in range(_ACCUMULATORS)),
        "READ_WRITE": ", ".join(f'"+f"(d[{i}])' for i in range(_ACCUMULATORS)),
        "A": _ACCUMULATORS,
        "B": _ACCUMULATORS + 1,
        "THREADS": WARPGROUPS * 128,
        "A_BYTES": A_BYTES,
        "B_BYTES": B_BYTES,
        "SHARED_BYTES": SHARED_BYTES,
        "BATCH": BATCH,
        "NAME": "bench_ceiling",
        "TYPE": dtype,
    }
    text = _TEMPLATE
    for word, value in words.items():
        text = text.replace(f"@{word}@", str(value))
    return KernelSource("bench_ceiling", text)


def measure(
    seconds: float = 1.0, iterations: int = 15000, dtype: str = "bf16"
) -> tuple[float, float]:
    """TFLOP/s of one launch after a pause, and sustained over ``seconds`` after as long a warm-up.

    Args:
        iterations: commits of a launch; 15000 take about 10 ms.
        dtype: "bf16" or "f16".

    Raises:
        RuntimeError: the device is not of compute capability 9.0, or computed nothing.
    """
    import torch

    from dlattn.runtime import jit
    from dlattn.runtime.launch import Launch
    from dlattn.runtime.target import cuda_target

    device = torch.cuda.current_device()
    target = cuda_target(device)
    if target.capability != (9, 0):
        raise RuntimeError(f"wgmma needs compute capability 9.0, but the device has {target.arch}.")
    kernel = jit.load(jit.compile_kernel(source(dtype), target.arch), device)
    kernel.set_shared(SHARED_BYTES)
    blocks, threads = target.multiprocessors, WARPGROUPS * 128
    element = torch.bfloat16 if dtype == "bf16" else torch.float16
    data = torch.randn(SHARED_BYTES // 2, device="cuda", dtype=element)
    sums = torch.zeros(blocks * threads, device="cuda")
    params = struct.pack("<QQi4x", data.data_ptr(), sums.data_ptr(), iterations)
    memory = ctypes.create_string_buffer(params, len(params))
    address = ctypes.addressof(memory)
    launch = Launch(kernel.function, (blocks, 1, 1), threads, SHARED_BYTES, address)
    stream = torch.cuda.current_stream().cuda_stream
    flops = blocks * WARPGROUPS * iterations * BATCH * 2 * M * N * K

    def call() -> None:
        launch(stream)

    call()
    torch.cuda.synchronize()
    if not torch.isfinite(sums).all() or float(sums.abs().max()) == 0:
        raise RuntimeError("The kernel computed nothing; its figures would mean nothing.")
    first = time_once(call, 1)
    repeats = max(1, round(seconds * 1e3 / first))
    time_once(call, repeats)
    return flops / first * 1e-9, flops / time_once(call, repeats) * 1e-9


def main() -> None:
    require_gpu("bench.ceiling")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    for dtype in ("bf16", "f16"):
        first, sustained = measure(seconds, dtype=dtype)
        print(
            f"wgmma ceiling, {dtype}, normal data: {sustained:.0f} TFLOP/s sustained over "
            f"{seconds:g} s ({first:.0f} in a first launch of 10 ms)"
        )


if __name__ == "__main__":
    main()
