// Which probabilities dropout keeps, as numbers, for every position: those that masks or lengths
// leave out, too. A block per 16 queries of a head.
#pragma once

#include "attn/dropout.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/seqlen.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

template <int warps_>
struct DumpTiling {
  static constexpr int warps = warps_;
};

template <class Problem, class Tiling>
DLATTN_DEVICE void rng_dump(const Params& p) {
  using Block = Accumulator<1, 2>;
  const int first_query = 16 * blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const typename Problem::Dropout dropout(p, batch, head, Lengths(p));
  for (int first = 16 * warp_index(); first < p.seq_kv; first += 16 * Tiling::warps) {
    uint32 pairs[4];
    dropout.signs(pairs, first_query, first);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int query = first_query + Block::row(0, e % 4), key = first + Block::column(e / 4, e);
      const uint32 pair = pairs[e % 4 / 2 + e / 4 * 2];
      const bool dropped = (pair >> (e % 2 == 0 ? 15 : 31) & 1) != 0;
      if (query < p.seq_q && key < p.seq_kv) {
        p.rng_dump.rows<float>(batch, head, query)[key] = dropped ? 0.f : 1.f;
      }
    }
  }
}

}  // namespace dlattn
