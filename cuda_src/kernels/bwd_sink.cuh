// After the backward's bwd_delta: the gradient of the sinks, from what each query tile adds to it.
// One block per head.
#pragma once

#include "attn/params.cuh"
#include "kernels/bwd_tile.cuh"
#include "tile/reduce.cuh"

namespace dlattn {

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_sink(const Params& p) {
  using Shapes = BwdShapes<Problem, Tiling>;
  const int head = blockIdx.x;
  const int parts = p.batch * ceil_div(p.seq_q, Shapes::tile_q);
  float sum = 0.f;
  for (int part = threadIdx.x; part < parts; part += Shapes::threads) {
    sum += p.sink_parts[int64(head) * parts + part];
  }
  sum = block_sum<Shapes::threads>(sum);
  if (threadIdx.x == 0) *p.dSink_token.rows<float>(0, head, 0) = sum;
}

}  // namespace dlattn
