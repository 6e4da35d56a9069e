// Sums over a block, always in the same order.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// The sum of a number of each thread, in thread 0. Once in a kernel: nothing guards its memory.
template <int threads>
DLATTN_DEVICE float block_sum(float value) {
  __shared__ float s_parts[threads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % 32 == 0) s_parts[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < threads / 32; ++warp) value += s_parts[warp];
  }
  return value;
}

}  // namespace dlattn
