// After the Hopper backward's main kernel, where some items are in parts: the fp32 sums of their dK and dV
// become rows. One block per key tile.
#pragma once

#include "kernels/bwd_key_sums.cuh"

namespace dlattn {

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_key_rows(const Params& p) {
  const KeySums<Problem, Tiling> sums(p, int(blockIdx.x));
  const int tiles = ceil_div(p.seq_kv, Tiling::tile_k), heads = p.heads_q / p.heads_per_k;
  const int number = p.whole_items + blockIdx.x;  // among the key tiles of all heads
  const int tile = number % tiles, head = number / tiles % heads, batch = number / tiles / heads;
  for (int first = 16 * warp_index(); first < Tiling::tile_k; first += 16 * Tiling::warps) {
    const int key = tile * Tiling::tile_k + first;
    sums.template store<KeyGradients<Problem>>(first, key, batch, head, p);
    sums.template store<ValueGradients<Problem, Tiling>>(first, key, batch, head, p);
  }
}

}  // namespace dlattn
