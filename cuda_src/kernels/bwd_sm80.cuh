// Attention backward for sm_80 and up (FlashAttention-2, algorithm 2).
//
// A block owns tile_k keys and walks the query tiles of every query head that shares them, so that
// dK and dV stay in registers across a whole group of grouped-query attention. Per query tile:
//   S = Q K^T, P = exp(S - stats), dP = dO V^T, dS = P (dP - delta)
//   dV += P^T dO, dK += dS^T Q, dQ += dS K
// P and dS pass through shared memory, because each product divides the tile among the warps in
// its own way. dQ is summed over key tiles in global memory, in accumulator order (bwd_dq.cuh).
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/score_mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/signs.cuh"
#include "attn/walk.cuh"
#include "base/math.cuh"
#include "kernels/bwd_tile.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm80 : PortableBwdShapes<Problem, Tiling> {
  using Shapes = PortableBwdShapes<Problem, Tiling>;
  using T = typename Shapes::T;
  using Shapes::dim_qk;
  using Shapes::dim_v;
  using Shapes::threads;
  using Shapes::tile_k;
  using Shapes::tile_q;
  static constexpr int access_bytes = Problem::access_bytes;
  static constexpr bool drops = Problem::Dropout::drops;
  static constexpr bool ragged = Problem::ragged;

  using SGrid = WarpGrid<tile_q, tile_k, Tiling::warps, Tiling::warps_s>;
  using DKGrid = WarpGrid<tile_k, dim_qk, Tiling::warps, Tiling::warps_kv>;
  using DVGrid = WarpGrid<tile_k, dim_v, Tiling::warps, Tiling::warps_kv>;
  using DQGrid = typename Shapes::DQGrid;
  using Scores = typename SGrid::Block;
  using DK = typename DKGrid::Block;
  using DV = typename DVGrid::Block;
  using DQ = typename DQGrid::Block;

  using QTile = SharedTile<T, tile_q, dim_qk>;
  using DOTile = SharedTile<T, tile_q, dim_v>;
  using KTile = SharedTile<T, tile_k, dim_qk>;
  using VTile = SharedTile<T, tile_k, dim_v>;
  using PTile = SharedTile<T, tile_q, tile_k>;
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;

  // Where the rows of the head at work begin. In shared memory, because dK, dV and the scores take
  // nearly all registers.
  struct HeadRows {
    const T *q, *dO;
    const float* row_stats;
    float* dq_accum;
  };

  struct SharedMemory {
    QTile q[Tiling::stages_q];
    DOTile dO[Tiling::stages_do];
    KTile k;
    VTile v;
    PTile p, dS;
    alignas(16) float row_stats[2][2 * tile_q];
    alignas(16) HeadRows head_rows;
  };

  const Params& p;
  SharedMemory& shared;
  int head;  // the query head at work
  int batch;
  const Lengths length;
  const ScoreValues values;
  const Interval keys;  // of this tile that exist

  DLATTN_DEVICE BwdSm80(const Params& params, SharedMemory& shared_memory, WorkItem work)
      : p(params),
        shared(shared_memory),
        head(work.head * params.heads_per_block.number),
        batch(work.batch),
        length(params, work.batch),
        values(params),
        keys{work.tile * tile_k, least((work.tile + 1) * tile_k, length.kv)} {}

  // Anew each time: no quotient is worth a register across the walk over queries.
  DLATTN_DEVICE int head_k() const { return p.heads_per_k.quotient(opaque(head)); }
  DLATTN_DEVICE int head_v() const { return p.heads_per_v.quotient(opaque(head)); }

  DLATTN_DEVICE void load_k() {
    load_tile<threads, Problem::head_dim_qk, access_bytes>(
        shared.k, key_rows<Problem, Problem::paged_k>(p.k, p.k_pages, batch, head_k(), keys.first),
        keys.last - keys.first);
  }
  DLATTN_DEVICE void load_v() {
    load_tile<threads, Problem::head_dim_v, access_bytes>(
        shared.v, key_rows<Problem, Problem::paged_v>(p.v, p.v_pages, batch, head_v(), keys.first),
        keys.last - keys.first);
  }
  DLATTN_DEVICE void load_q(int tile, int iteration) {
    load_tile<threads, Problem::head_dim_qk, access_bytes>(
        shared.q[iteration % Tiling::stages_q],
        strided(shared.head_rows.q + tile * tile_q * p.q.row, p.q.row), length.q - tile * tile_q);
  }
  DLATTN_DEVICE void load_do(int tile, int iteration) {
    load_tile<threads, Problem::head_dim_v, access_bytes>(
        shared.dO[iteration % Tiling::stages_do],
        strided(shared.head_rows.dO + tile * tile_q * p.dO.row, p.dO.row),
        length.q - tile * tile_q);
  }
  DLATTN_DEVICE void load_row_stats(int tile, int iteration) {
    const float* g_stats = shared.head_rows.row_stats + tile * (2 * tile_q);
    const int i = 4 * threadIdx.x;
    static_assert(4 * threads >= 2 * tile_q);
    if (i < 2 * tile_q) {
      cp_async_16(shared_address(&shared.row_stats[iteration % 2][i]), g_stats + i, true);
    }
  }

  DLATTN_DEVICE Position position(int tile, int m, int n, int i) const {
    return {batch,
            head,
            length.q,
            length.kv,
            tile * tile_q + SGrid::first_row() + Scores::row(0, 0),
            keys.first + SGrid::first_column() + Scores::column(0, 0),
            Scores::row_step(m, i),
            Scores::column_step(n, i)};
  }

  // Turns raw products into probabilities, where all keys are attended.
  DLATTN_DEVICE void exponentiate(Scores& probability, const Scores& raw, int tile,
                                  const float* s_stats) {
    const float log2_factor = Problem::Score::factor(values) * log2_e;
    probability.for_each([&](float& value, int m, int n, int i) {
      const float score = Problem::Score::apply(raw.at[m][n][i], position(tile, m, n, i), values);
      value = exp2_approx(score * log2_factor - s_stats[SGrid::first_row() + Scores::row(m, i)]);
    });
  }
  DLATTN_DEVICE void mask(Scores& probability, int tile) {
    const int first_query = opaque(tile * tile_q + SGrid::first_row());
    const int first_key = opaque(keys.first + SGrid::first_column());
    probability.for_each([&](float& value, int m, int n, int i) {
      const int query = first_query + Scores::row(m, i), key = first_key + Scores::column(n, i);
      if (!Problem::Mask::keep(query, key, length, p)) value = 0.f;
    });
  }

  // Of the keys that are not dropped.
  DLATTN_DEVICE void store_probability(Scores probability) {
    if constexpr (drops) {
      probability.for_each([](float& value, int, int, int) { value = value < 0.f ? 0.f : value; });
    }
    store_accumulator(shared.p, SGrid::first_row(), SGrid::first_column(), probability);
  }

  // The first query tile to visit from this one on.
  DLATTN_DEVICE int tile_from(int tile, int last_tile) const {
    return Tiles::first_queries(p, {keys.first / tile_k, head, batch}, tile, last_tile);
  }

  // Whether a user's function masks nothing of a tile.
  DLATTN_DEVICE bool is_whole(int tile) const {
    if constexpr (!MasksElements<Problem>) return true;
    return Tiles::is_whole(p, batch, head, tile, keys.first / tile_k);
  }
  DLATTN_DEVICE void mask_by_function(Scores& probability, int tile) {
    if constexpr (MasksElements<Problem>) {
      drop_masked<typename Problem::ElementMask>(probability, 0.f, position(opaque(tile), 0, 0, 0),
                                                 values);
    }
  }

  // One query tile of one head. Prefetches the next one.
  DLATTN_DEVICE void step(int tile, int next, int last_tile, int iteration, DK& dK, DV& dV) {
    const bool more = next < last_tile, whole = is_whole(tile);
    cp_async_wait_all();
    __syncthreads();
    if (more) {
      load_row_stats(next, iteration + 1);
      if constexpr (Tiling::stages_q == 2) load_q(next, iteration + 1);
      if constexpr (Tiling::stages_do == 2) load_do(next, iteration + 1);
    }
    QTile& s_q = shared.q[iteration % Tiling::stages_q];
    DOTile& s_do = shared.dO[iteration % Tiling::stages_do];
    const float* s_stats = shared.row_stats[iteration % 2];
    const float* s_minus_delta = s_stats + tile_q;

    Scores raw;
    raw.clear();
    gemm<T, dim_qk / 16>(raw, SharedLeft<QTile, false>(s_q, SGrid::first_row()),
                         SharedRight<KTile, false>(shared.k, SGrid::first_column()));
    Problem::Score::prepare(raw, values);
    Scores probability;
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, length.q)};
    const bool full =
        Problem::Mask::full_keys(queries, length, p).contains({keys.first, keys.first + tile_k});
    exponentiate(probability, raw, tile, s_stats);
    if (!full) mask(probability, tile);
    if (!whole) mask_by_function(probability, tile);
    if constexpr (drops) {
      const typename Problem::Dropout dropout(p, batch, head, length);
      mark_dropped(probability, dropout, queries.first + SGrid::first_row(),
                   keys.first + SGrid::first_column());
    }
    store_probability(probability);

    const auto minus_delta = [&](int m, int i) {
      return s_minus_delta[SGrid::first_row() + Scores::row(m, i)];
    };
    Scores dS;
    dS.for_each([&](float& value, int m, int, int i) { value = drops ? 0.f : minus_delta(m, i); });
    gemm<T, dim_v / 16>(dS, SharedLeft<DOTile, false>(s_do, SGrid::first_row()),
                        SharedRight<VTile, false>(shared.v, SGrid::first_column()));
    dS.for_each([&](float& value, int m, int n, int i) {
      const float grad = drops ? weigh_dropped(probability.at[m][n][i], value, minus_delta(m, i))
                               : probability.at[m][n][i] * value;
      value = Problem::Score::backward(grad, raw.at[m][n][i], position(tile, m, n, i), values);
    });
    store_accumulator(shared.dS, SGrid::first_row(), SGrid::first_column(), dS);
    __syncthreads();

    gemm<T, tile_q / 16>(dV, SharedLeft<PTile, true>(shared.p, DVGrid::first_row()),
                         SharedRight<DOTile, true>(s_do, DVGrid::first_column()));
    if constexpr (Tiling::stages_do == 1) {
      __syncthreads();
      if (more) load_do(next, 0);
    }
    add_dq(tile);
    gemm<T, tile_q / 16>(dK, SharedLeft<PTile, true>(shared.dS, DKGrid::first_row()),
                         SharedRight<QTile, true>(s_q, DKGrid::first_column()));
    if constexpr (Tiling::stages_q == 1) {
      __syncthreads();
      if (more) load_q(next, 0);
    }
  }

  // In column chunks, so that few registers beside dK and dV are live.
  DLATTN_DEVICE void add_dq(int tile) {
    constexpr int m_tiles = DQGrid::m_tiles, n_tiles = DQGrid::n_tiles;
    constexpr int chunk = greatest_common_divisor(n_tiles, least(4, n_tiles));
    float* g_sum = shared.head_rows.dq_accum + int64(tile) * (tile_q * dim_qk);
    const SharedLeft<PTile, false> left(shared.dS, DQGrid::first_row());
#pragma unroll
    for (int first = 0; first < n_tiles; first += chunk) {
      Accumulator<m_tiles, chunk> dQ;
      dQ.clear();
      gemm<T, tile_k / 16>(dQ, left,
                           SharedRight<KTile, true>(shared.k, DQGrid::first_column() + 8 * first));
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < chunk; ++n) {
          reduce_add_x4(g_sum + Shapes::dq_offset(m, first + n, 0), Shapes::dq_stride, dQ.at[m][n]);
        }
    }
  }

  // All query tiles of one head.
  DLATTN_DEVICE void walk_queries(DK& dK, DV& dV) {
    const Interval queries = Problem::Mask::queries(keys, length, p);
    const int last_tile = ceil_div(queries.last, tile_q);
    int tile = opaque(queries.first / tile_q);
    // Pages may have keys beyond those that a block mask knows.
    if (Tiles::skips && !keys.empty()) tile = tile_from(tile, last_tile);
    const bool some = !Tiles::skips || tile < last_tile;
    if (!keys.empty() && !queries.empty() && some) {
      if (threadIdx.x == 0) {
        const int first_tile = Shapes::row_tile(p, batch, head, 0);
        shared.head_rows = {p.q.rows<T, ragged>(batch, head, 0),
                            p.dO.rows<T, ragged>(batch, head, 0), Shapes::row_stats(p, first_tile),
                            Shapes::dq_accum(p, first_tile)};
      }
      __syncthreads();
      load_row_stats(tile, 0);
      load_q(tile, 0);
      load_do(tile, 0);
#pragma unroll 1
      for (int iteration = 0, next; tile < last_tile; tile = next, ++iteration) {
        next = tile_from(tile + 1, last_tile);
        step(tile, next, last_tile, iteration, dK, dV);
      }
    }
    cp_async_wait_all();
    __syncthreads();
  }

  // Through the shared tile that held the keys or values, which are not needed any more.
  DLATTN_DEVICE void store_dk(DK& dK) {
    const float factor = gradient_factor<Problem>(values);
    dK.for_each([&](float& value, int, int, int) { value *= factor; });
    store_accumulator(shared.k, DKGrid::first_row(), DKGrid::first_column(), dK);
    __syncthreads();
    store_tile<threads, Problem::head_dim_qk, access_bytes>(
        key_rows<Problem, Problem::paged_k>(p.dK, p.k_pages, batch, head_k(), keys.first), shared.k,
        stored_keys<Problem, Problem::paged_k>(p, p.dK, p.k_pages, length.kv) - keys.first);
    __syncthreads();
  }
  DLATTN_DEVICE void store_dv(DV& dV) {
    const float factor = dropout_scale<Problem>(p);
    dV.for_each([&](float& value, int, int, int) { value *= factor; });
    store_accumulator(shared.v, DVGrid::first_row(), DVGrid::first_column(), dV);
    __syncthreads();
    store_tile<threads, Problem::head_dim_v, access_bytes>(
        key_rows<Problem, Problem::paged_v>(p.dV, p.v_pages, batch, head_v(), keys.first), shared.v,
        stored_keys<Problem, Problem::paged_v>(p, p.dV, p.v_pages, length.kv) - keys.first);
    __syncthreads();
  }

  // Whether there is nothing to store: the tile is beyond the end of a sequence, and nothing padded.
  DLATTN_DEVICE bool is_void() const {
    return keys.empty() && p.dK.is_ragged<ragged>() && p.dV.is_ragged<ragged>();
  }

  // All query heads of the block; dK and dV are stored when the last head that shares them is done.
  DLATTN_DEVICE void walk_heads() {
    DK dK;
    DV dV;
    dK.clear();
    dV.clear();
    do {
      batch = opaque(batch);  // no address is worth a register across the walk over queries
      if (p.heads_per_k.rest(head) == 0) load_k();
      if (p.heads_per_v.rest(head) == 0) load_v();
      walk_queries(dK, dV);
      if (p.heads_per_k.rest(head + 1) == 0) {
        store_dk(dK);
        dK.clear();
      }
      if (p.heads_per_v.rest(head + 1) == 0) {
        store_dv(dV);
        dV.clear();
      }
    } while (p.heads_per_block.rest(++head) != 0);
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_sm80(const Params& p) {
  using Kernel = BwdSm80<Problem, Tiling>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(
      p, shared,
      first_first(blockIdx.x, ceil_div(rows_of_gradients<Problem>(p), Tiling::tile_k), p));
  if (kernel.is_void()) return;
  kernel.walk_heads();
}

}  // namespace dlattn
