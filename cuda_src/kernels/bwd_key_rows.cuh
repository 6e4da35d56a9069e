// After the Hopper backward's main kernel, where some items are in parts: the fp32 sums of their dK and dV
// become rows. One block per key tile; of a ragged problem, of the longest entry's, for each head and entry.
#pragma once

#include "kernels/bwd_key_sums.cuh"

namespace dlattn {

template <class Problem, class Tiling>
DLATTN_DEVICE void store_tile(const KeySums<Problem, Tiling>& sums, int tile, int head, int batch,
                              const Params& p) {
  for (int first = 16 * warp_index(); first < Tiling::tile_k; first += 16 * Tiling::warps) {
    const int key = tile * Tiling::tile_k + first;
    sums.template store<KeyGradients<Problem>>(first, key, batch, head, p);
    sums.template store<ValueGradients<Problem, Tiling>>(first, key, batch, head, p);
  }
}

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_key_rows(const Params& p) {
  using Sums = KeySums<Problem, Tiling>;
  if constexpr (Problem::ragged) {
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    if (tile * Tiling::tile_k >= p.seq_len_kv.at(batch, p.seq_kv)) return;
    if (Sums::tile_of_all(p, batch, tile) >= p.ragged.key_tiles) return;  // more than promised
    return store_tile(Sums::of_entry(p, batch, head, tile), tile, head, batch, p);
  }
  const int tiles = ceil_div(p.seq_kv, Tiling::tile_k), heads = Sums::heads(p);
  const int number = p.whole_items + blockIdx.x;  // among the key tiles of all heads
  const int tile = number % tiles, head = number / tiles % heads, batch = number / tiles / heads;
  store_tile(Sums(p, int(blockIdx.x)), tile, head, batch, p);
}

}  // namespace dlattn
