// The probabilities of a forward, after it and before dropout: `exp(score - stats)` of what is
// attended, else 0, with the sign set of what dropout drops, at every position, of a tensor whose rows
// and columns are rounded up to 128, or exactly those of the scores. A look inside, not a fast path: scores are computed once more, by
// mma on every architecture, a tile a block.
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/remade.cuh"
#include "attn/seqlen.cuh"
#include "attn/walk.cuh"
#include "base/math.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

template <int warps_, bool exact_ = false>
struct DebugSoftmaxTiling {
  static constexpr bool exact = exact_;
  static constexpr int warps = warps_;
  static constexpr int tile_q = 16 * warps, tile_k = 32;
};

template <class Problem, class Tiling>
struct DebugSoftmax {
  using T = typename Problem::Element;
  static constexpr int threads = 32 * Tiling::warps;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim = round_up(Problem::head_dim_qk, 16);
  static constexpr int rounded_to = Tiling::exact ? tile_k : 128;
  using QTile = SharedTile<T, tile_q, dim>;
  using KTile = SharedTile<T, tile_k, dim>;
  using Scores = Accumulator<1, tile_k / 8>;

  struct SharedMemory {
    QTile q;
    KTile k;
  };

  const Params& p;
  SharedMemory& shared;
  const int batch, head;
  const Lengths length;
  const int first_row;               // of this warp, in the tile
  const int first_query, first_key;  // of the tile

  DLATTN_DEVICE DebugSoftmax(const Params& params, SharedMemory& shared_memory)
      : p(params),
        shared(shared_memory),
        batch(blockIdx.z),
        head(blockIdx.y),
        length(params, batch),
        first_row(16 * warp_index()),
        first_query(blockIdx.x / key_tiles(params) * tile_q),
        first_key(blockIdx.x % key_tiles(params) * tile_k) {}

  static DLATTN_DEVICE int key_tiles(const Params& p) {
    return round_up(p.seq_kv, rounded_to) / tile_k;
  }

  // Whether there is anything to compute: the same for all threads.
  DLATTN_DEVICE bool attends() const {
    using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
    return first_query < length.q && first_key < length.kv &&
           Tiles::visits(p, batch, head, first_query / tile_q, first_key / tile_k);
  }

  DLATTN_DEVICE void compute_probabilities(Scores& scores) {
    load_tile<threads, Problem::head_dim_qk, Problem::access_bytes>(
        shared.q, strided(p.q.rows<T, Problem::ragged>(batch, head, first_query), p.q.row),
        length.q - first_query);
    load_tile<threads, Problem::head_dim_qk, Problem::access_bytes>(
        shared.k,
        key_rows<Problem, Problem::paged_k>(p.k, p.k_pages, batch, p.heads_per_k.quotient(head),
                                            first_key),
        length.kv - first_key);
    cp_async_wait_all();
    __syncthreads();
    gemm<T, dim / 16>(scores, SharedLeft<QTile, false>(shared.q, first_row),
                      SharedRight<KTile, false>(shared.k, 0));

    const ScoreValues values(p);
    Problem::Score::prepare(scores, values);
    const float log2_factor = Problem::Score::factor(values) * log2_e;
    float log_sum_exp[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + first_row + Scores::row(0, 2 * half);
      log_sum_exp[half] = infinity();
      if (query < length.q) {
        using Stats = typename Problem::Stats;
        log_sum_exp[half] =
            log2_of_sum(to_float(*p.stats.rows<Stats, Problem::ragged>(batch, head, query)));
      }
    }
    scores.for_each([&](float& score, int m, int n, int i) {
      const Position at{batch,
                        head,
                        length.q,
                        length.kv,
                        first_query + first_row + Scores::row(0, 0),
                        first_key + Scores::column(0, 0),
                        Scores::row_step(m, i),
                        Scores::column_step(n, i)};
      score = Problem::Score::apply(score, at, values);
      const int query = first_query + first_row + Scores::row(m, i);
      const int key = first_key + Scores::column(n, i);
      const bool keep = Problem::Mask::keep(query, key, length, p) & (query < length.q);
      const float exponential = exp2_approx(score * log2_factor - log_sum_exp[i / 2]);
      score = keep ? exponential : 0.f;
    });
  }

  DLATTN_DEVICE void store(const Scores& probability) const {
#pragma unroll
    for (int block = 0; block < tile_k / 16; ++block) {
      uint32 pairs[4] = {};
      if constexpr (Problem::Dropout::drops) {
        const typename Problem::Dropout dropout(p, batch, head, Lengths(p));
        dropout.signs(pairs, first_query + first_row, first_key + 16 * block);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int n = 2 * block + e / 4, i = e % 4;
        const bool dropped = (pairs[i / 2 + e / 4 * 2] >> (i % 2 == 0 ? 15 : 31) & 1) != 0;
        const int query = first_query + first_row + Scores::row(0, i);
        const int key = first_key + Scores::column(n, i);
        const float value = probability.at[0][n][i];
        const bool exists = query < p.seq_q && key < p.seq_kv;
        if (Tiling::exact && !exists) continue;
        p.debug_softmax.rows<T>(batch, head, query)[key] =
            from_float<T>(dropped && exists ? -value : value);
      }
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void debug_softmax(const Params& p) {
  using Kernel = DebugSoftmax<Problem, Tiling>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(p, shared);
  typename Kernel::Scores probability;
  probability.clear();
  if (kernel.attends()) kernel.compute_probabilities(probability);
  kernel.store(probability);
}

}  // namespace dlattn
