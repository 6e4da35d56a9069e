// Attention forward for sm_80 and up: mma.sync, cp.async, ldmatrix (FlashAttention-2, algorithm 1).
//
// A block owns tile_q queries of one head and walks its key tiles from the last to the first. A tile
// that some query does not attend to in full (the end of the sequence, the diagonal) takes a branch
// to the element mask, the same for all threads. Each warp owns whole rows: the probabilities that
// one product leaves in its registers are the left operand of the next, and a row's maximum needs
// no barrier.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/score_mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/signs.cuh"
#include "attn/softmax.cuh"
#include "attn/walk.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

template <int tile_q_, int tile_k_, int warps_, int stages_>
struct FwdTiling {
  static constexpr int tile_q = tile_q_, tile_k = tile_k_;
  static constexpr int warps = warps_;
  static constexpr int stages = stages_;  // key and value tiles in shared memory: 1 or 2
};

template <class Problem, class Tiling>
struct FwdSm80 {
  using T = typename Problem::Element;
  static constexpr bool ragged = Problem::ragged;
  static constexpr int threads = 32 * Tiling::warps;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, 16);
  // Of the output, wide rows of which several blocks divide, each with all of the scores.
  static constexpr int slices = ceil_div(Problem::head_dim_v, 256);
  static constexpr int columns_v = round_up(ceil_div(Problem::head_dim_v, slices), 8);
  static constexpr int dim_v = round_up(columns_v, 16);
  static constexpr int rows_per_warp = tile_q / Tiling::warps;
  static constexpr int m_tiles = rows_per_warp / 16;
  static_assert(rows_per_warp % 16 == 0 && tile_k % 16 == 0);

  using QTile = SharedTile<T, tile_q, dim_qk>;
  using KTile = SharedTile<T, tile_k, dim_qk>;
  using VTile = SharedTile<T, tile_k, dim_v>;
  using OTile = SharedTile<T, tile_q, dim_v>;
  using Scores = Accumulator<m_tiles, tile_k / 8>;
  using Output = Accumulator<m_tiles, dim_v / 8>;
  using Softmax = OnlineSoftmax<m_tiles, wants_maxima<Problem>>;
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;

  struct SharedMemory {
    union {
      QTile q;
      OTile o;  // written after the last use of q
    };
    KTile k[Tiling::stages];
    VTile v[Tiling::stages];
  };

  const Params& p;
  SharedMemory& shared;
  const WorkItem item;
  const Lengths length;
  const ScoreValues values;
  const Interval queries;  // of this tile that exist
  const int first_row;     // of this warp, in the tile

  DLATTN_DEVICE FwdSm80(const Params& params, SharedMemory& shared_memory, WorkItem work)
      : p(params),
        shared(shared_memory),
        item(work),
        length(params, work.batch),
        values(params),
        queries{work.tile * tile_q, least((work.tile + 1) * tile_q, length.q)},
        first_row(warp_index() * rows_per_warp) {}

  // Of the output, and of v. The last slice overlaps the one before where they do not divide the row:
  // both write the same there.
  static DLATTN_DEVICE int first_column() {
    return least(blockIdx.x % slices * columns_v, Problem::head_dim_v - columns_v);
  }

  DLATTN_DEVICE void load_q() {
    load_tile<threads, Problem::head_dim_qk, Problem::access_bytes>(
        shared.q, strided(p.q.rows<T, ragged>(item.batch, item.head, queries.first), p.q.row),
        queries.last - queries.first);
  }
  DLATTN_DEVICE void load_k(int tile, int stage) {
    load_tile<threads, Problem::head_dim_qk, Problem::access_bytes>(
        shared.k[stage],
        key_rows<Problem, Problem::paged_k>(p.k, p.k_pages, item.batch,
                                            p.heads_per_k.quotient(item.head), tile * tile_k),
        length.kv - tile * tile_k);
  }
  DLATTN_DEVICE void load_v(int tile, int stage) {
    load_tile<threads, columns_v, Problem::access_bytes>(
        shared.v[stage],
        key_rows<Problem, Problem::paged_v>(p.v, p.v_pages, item.batch,
                                            p.heads_per_v.quotient(item.head), tile * tile_k,
                                            first_column()),
        length.kv - tile * tile_k);
  }

  DLATTN_DEVICE void edit(Scores& scores, int tile) {
    Problem::Score::prepare(scores, values);
    Position at = position(queries.first + first_row, tile * tile_k);
    scores.for_each([&](float& score, int m, int n, int i) {
      at.down = Scores::row_step(m, i);
      at.right = Scores::column_step(n, i);
      score = Problem::Score::apply(score, at, values);
    });
  }
  // Of this lane's first element.
  DLATTN_DEVICE Position position(int first_query, int first_key) const {
    return {item.batch,
            item.head,
            length.q,
            length.kv,
            first_query + Scores::row(0, 0),
            first_key + Scores::column(0, 0),
            0,
            0};
  }
  DLATTN_DEVICE void mask(Scores& scores, int tile) {
    const int first_query = queries.first + first_row, first_key = tile * tile_k;
    scores.for_each([&](float& score, int m, int n, int i) {
      const int query = first_query + Scores::row(m, i), key = first_key + Scores::column(n, i);
      if (!Problem::Mask::keep(query, key, length, p)) score = -infinity();
    });
  }

  // The tile to visit after this one.
  DLATTN_DEVICE int tile_before(int tile, int first_tile) const {
    return Tiles::last_keys(p, item, tile - 1, first_tile);
  }

  // Whether a user's function masks nothing of a tile.
  DLATTN_DEVICE bool is_whole(int tile) const {
    if constexpr (!MasksElements<Problem>) return true;
    return Tiles::is_whole(p, item.batch, item.head, item.tile, tile);
  }
  DLATTN_DEVICE void mask_by_function(Scores& scores, int tile) {
    if constexpr (MasksElements<Problem>) {
      drop_masked<typename Problem::ElementMask>(
          scores, -infinity(), position(opaque(queries.first + first_row), opaque(tile * tile_k)),
          values);
    }
  }

  // One key tile: scores, probabilities, output. Prefetches the next one, before it.
  DLATTN_DEVICE void step(int tile, int next, int first_tile, Interval full, int stage,
                          Softmax& softmax, Output& output) {
    const bool more = tile > first_tile, whole = is_whole(tile);
    cp_async_wait_all();
    __syncthreads();
    if constexpr (Tiling::stages == 1) {
      load_v(tile, 0);
    } else if (more) {
      load_k(next, stage ^ 1);
      load_v(next, stage ^ 1);
    }

    Scores scores;
    scores.clear();
    gemm<T, dim_qk / 16>(scores, SharedLeft<QTile, false>(shared.q, first_row),
                         SharedRight<KTile, false>(shared.k[stage], 0));
    edit(scores, tile);
    if (!full.contains({tile * tile_k, (tile + 1) * tile_k})) mask(scores, tile);
    if (!whole) mask_by_function(scores, tile);

    if constexpr (Tiling::stages == 1) {
      cp_async_wait_all();
      __syncthreads();
      if (more) load_k(next, 0);
    }
    float factor[2 * m_tiles];
    if (softmax.advance(scores, factor)) softmax.rescale(output, factor);
    softmax.add(softmax.exponentiate(scores));
    RegisterLeft<T, m_tiles, tile_k / 16> probabilities(scores);
    if constexpr (Problem::Dropout::drops) {
      const typename Problem::Dropout dropout(p, item.batch, item.head, length);
      drop(probabilities, dropout, queries.first + first_row, tile * tile_k);
    }
    gemm<T, tile_k / 16>(output, probabilities, SharedRight<VTile, true>(shared.v[stage], 0));
  }

  DLATTN_DEVICE void attend(Softmax& softmax, Output& output) {
    const Interval keys = Problem::Mask::keys(queries, length, p);
    if (queries.empty() || keys.empty()) return;
    const Interval full = Problem::Mask::full_keys(queries, length, p);
    // A first tile known to be zero makes the compiler count pointers down to it, in more registers.
    int first_tile = opaque(keys.first / tile_k);
    int tile = tile_before(ceil_div(keys.last, tile_k), first_tile);
    if constexpr (Tiles::skips) {
      if (tile < first_tile) return;
      first_tile = Tiles::first_keys(p, item, first_tile, tile);
    }

    load_q();
    load_k(tile, 0);
    if constexpr (Tiling::stages == 2) load_v(tile, 0);
    int stage = 0;
#pragma unroll 1
    for (int next; tile >= first_tile; tile = next) {
      next = tile_before(tile, first_tile);
      step(tile, next, first_tile, full, stage, softmax, output);
      if constexpr (Tiling::stages == 2) stage ^= 1;
    }
  }

  // Beyond the end of a sequence there may be nothing to store.
  DLATTN_DEVICE bool is_void() const {
    return ragged && queries.empty() && !stores_padding<Problem>(p);
  }

  DLATTN_DEVICE void store(Softmax& softmax, Output& output) {
    // Read again: a length kept for here would hold a register during the walk over keys.
    const int length_q = p.seq_len_q.at(opaque(item.batch), p.seq_q);
    const int first_query = item.tile * tile_q;
    finish_rows<Problem>(p, item.batch, item.head, first_query + first_row, length_q, softmax,
                         output);
    __syncthreads();
    store_accumulator(shared.o, first_row, 0, output);
    __syncthreads();
    store_tile<threads, columns_v, Problem::access_bytes>(
        strided(p.o.rows<T, ragged>(item.batch, item.head, first_query) + first_column(), p.o.row),
        shared.o, p.o.stored_rows<ragged>(length_q, p.seq_q) - first_query);
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void fwd_sm80(const Params& p) {
  using Kernel = FwdSm80<Problem, Tiling>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(p, shared,
                longest_first(blockIdx.x / Kernel::slices, ceil_div(p.seq_q, Tiling::tile_q), p));
  if (kernel.is_void()) return;
  typename Kernel::Softmax softmax(Problem::Score::factor(kernel.values));
  typename Kernel::Output output;
  output.clear();
  kernel.attend(softmax, output);
  kernel.store(softmax, output);
}

}  // namespace dlattn
