// After the Hopper backward's main kernel, where items divide groups of heads: the fp32 sums of dK and dV
// become their rows. One block per key tile.
#pragma once

#include "kernels/bwd_key_sums.cuh"

namespace dlattn {

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_key_rows(const Params& p) {
  const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const KeySums<Problem, Tiling> sums(p, batch, head, tile);
  for (int first = 16 * warp_index(); first < Tiling::tile_k; first += 16 * Tiling::warps) {
    const int key = tile * Tiling::tile_k + first;
    sums.template store<KeyGradients<Problem>>(first, key, batch, head, p);
    sums.template store<ValueGradients<Problem, Tiling>>(first, key, batch, head, p);
  }
}

}  // namespace dlattn
