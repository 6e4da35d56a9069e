// The gradient of a bias on Hopper: what bwd_dbias.cuh computes, by wgmma and TMA, where neither
// queries nor keys share an element of it.
//
// A block takes tiles of dBias one after another. Of each, a producer warp loads the tiles of scores
// that are added to it, two operands of a product at a time; two consumers have 64 queries each:
//   S = Q K^T, P = exp(S - stats), dP = dO V^T; dBias += P (dP - delta)
// The tile of the bias is loaded once: it is the same for all of them.
#pragma once

#include "attn/mask.cuh"
#include "attn/staged_bias.cuh"
#include "kernels/bwd_dbias_walk.cuh"
#include "kernels/bwd_sm90_block.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/pipeline.cuh"
#include "tile/quad.cuh"
#include "tile/slab_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

// Main is the tiling of the main kernel: row statistics are laid out for it, and boxes of maps.
template <int stages_, class Main_>
struct Sm90DBiasTiling {
  using Main = Main_;
  static constexpr int tile_q = 128, tile_k = 128;
  static constexpr int stages = stages_;  // pairs of operands in shared memory
  static_assert(tile_q % Main::tile_q == 0 && Main::tile_k == tile_k);
};

template <class Problem, class Tiling>
struct BwdDBiasSm90 {
  using T = typename Problem::Element;
  using DBias = typename Problem::DBias;
  using Score = typename Problem::Score;
  using Main = typename Tiling::Main;
  using MainShapes = BwdShapes<Problem, Main>;
  using Walk = DBiasWalk<Problem, Tiling>;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k, stages = Tiling::stages;
  static constexpr int consumers = 2;
  static constexpr int steps = stages / 2 + 1;  // whose operands, some of them, may be there
  static_assert(Score::stages_bias && !Problem::ragged && !Problem::Dropout::drops);

  using Scores = Accumulator<1, tile_k / 8>;
  // Q and K, or dO and V.
  template <int head_dim>
  struct Operands {
    using Tile = SlabTile<T, 128, round_up(head_dim, 16)>;
    static constexpr uint32 bytes = 2 * Tile::bytes;
    Tile queries, keys;
  };
  using Q_K = Operands<Problem::head_dim_qk>;
  using DO_V = Operands<Problem::head_dim_v>;
  using Slot = Operands<most(Problem::head_dim_qk, Problem::head_dim_v)>;
  using BiasTile = StagedTile<typename Score::StagedBias, tile_q, tile_k>;

  // Of the main kernel's query tiles, one after the other.
  struct RowStats {
    struct {
      float log_sum_exp[Main::tile_q], minus_delta[Main::tile_q];
    } tile[tile_q / Main::tile_q];
    DLATTN_DEVICE float minus_log_sum_exp(int row) const {
      return -tile[row / Main::tile_q].log_sum_exp[row % Main::tile_q];
    }
    DLATTN_DEVICE float minus_delta(int row) const {
      return tile[row / Main::tile_q].minus_delta[row % Main::tile_q];
    }
  };

  struct SharedMemory {
    Slot slots[stages];
    BiasTile bias;
    alignas(16) RowStats row_stats[steps];  // they come with Q and K
    Ring<stages> ring;
    Ring<1> bias_ring;
  };

  const MappedBwdParams& m;
  const Params& p;
  SharedMemory& shared;

  DLATTN_DEVICE BwdDBiasSm90(const MappedBwdParams& params, SharedMemory& shared_memory)
      : m(params), p(params.p), shared(shared_memory) {}

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      shared.ring.init(4 * consumers);
      shared.bias_ring.init(4 * consumers);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // Calls visit(tile) for this block's tiles of dBias.
  template <class Visit>
  DLATTN_DEVICE void for_each_tile(Visit visit) {
    const int heads = p.dBias.head == 0 ? 1 : p.heads_q, batch = p.dBias.batch == 0 ? 1 : p.batch;
    const int tiles = ceil_div(p.seq_kv, tile_k) * ceil_div(p.seq_q, tile_q) * heads * batch;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      visit(first_dbias_step<Problem, Tiling>(tile, p));
    }
  }

  // ---- The producer: a warp, one lane of which gives the orders ----

  template <class Tile>
  static DLATTN_DEVICE void load_queries(Tile& tile, const TensorMap& map, uint64& full, int query,
                                         int head, int batch, int first_column = 0) {
#pragma unroll
    for (int row = 0; row < tile_q; row += Main::tile_q) {
      tile.load_rows(row, map, full, query + row, head, batch, first_column);
    }
  }

  DLATTN_DEVICE void load_row_stats(RowStats& stats, uint64& full, const DBiasStep& at,
                                    uint32 bytes) {
    const int tile = MainShapes::row_tile(p, at.batch, at.head, at.query / Main::tile_q);
    bulk_load(shared_address(&stats), MainShapes::row_stats(p, tile), bytes, full);
  }

  // Of the tiles that exist.
  DLATTN_DEVICE uint32 row_stats_bytes(int query) const {
    const int tiles = ceil_div(p.seq_q - query, Main::tile_q);
    return least(tiles, tile_q / Main::tile_q) * uint32(sizeof(RowStats::tile[0]));
  }

  DLATTN_DEVICE void produce() {
    Place<stages> place;
    Place<1> bias_place;
    int step = 0;
    for_each_tile([&](const DBiasStep& tile) {
      Walk walk(p, tile);
      if (walk.done(p)) return;
      fill(shared.bias_ring, bias_place, BiasTile::bytes, [&](int, uint64& full) {
        load_queries(shared.bias, m.bias, full, tile.query, p.bias.head == 0 ? 0 : tile.head,
                     p.bias.batch == 0 ? 0 : tile.batch, tile.key);
      });
      const uint32 stats_bytes = row_stats_bytes(tile.query);
#pragma unroll 1
      for (; !walk.done(p); walk.advance(p)) {
        const DBiasStep& at = walk.at;
        fill(shared.ring, place, Q_K::bytes + stats_bytes, [&](int stage, uint64& full) {
          auto& slot = reinterpret_cast<Q_K&>(shared.slots[stage]);
          load_queries(slot.queries, m.q, full, at.query, at.head, at.batch);
          slot.keys.load(m.k, full, at.key, p.heads_per_k.quotient(at.head), at.batch);
          load_row_stats(shared.row_stats[step % steps], full, at, stats_bytes);
        });
        fill(shared.ring, place, DO_V::bytes, [&](int stage, uint64& full) {
          auto& slot = reinterpret_cast<DO_V&>(shared.slots[stage]);
          load_queries(slot.queries, m.dO, full, at.query, at.head, at.batch);
          slot.keys.load(m.v, full, at.key, p.heads_per_v.quotient(at.head), at.batch);
        });
        ++step;
      }
    });
  }

  // ---- Consumers ----

  static DLATTN_DEVICE int first_row() { return 16 * (warp_index() - 4); }

  DLATTN_DEVICE Position position(const Walk& walk) const {
    return {walk.at.batch,
            walk.at.head,
            walk.length.q,
            walk.length.kv,
            walk.at.query + first_row() + Scores::row(0, 0),
            walk.at.key + Scores::column(0, 0)};
  }

  // Turns raw products into probabilities.
  DLATTN_DEVICE void exponentiate(Scores& score, const Walk& walk, const RowStats& stats,
                                  const ScoreValues& values) {
    const Position first = position(walk);
    const float base[2] = {stats.minus_log_sum_exp(first_row() + Scores::row(0, 0)),
                           stats.minus_log_sum_exp(first_row() + Scores::row(0, 2))};
    const auto range = Score::range(
        [&](auto visit) { score.for_each([&](float raw, int, int, int i) { visit(raw, i); }); });
    Score::in_form(range, values, [&](auto form) {
#pragma unroll
      for (int pair = 0; pair < tile_k / 8; pair += 2) {
        const auto bias = staged_rows(shared.bias, first_row(), 8 * pair);
#pragma unroll
        for (int n = pair; n < pair + 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            auto at = biased(first, bias.element(n - pair, i));
            at.down = Scores::row_step(0, i);
            at.right = Scores::column_step(n, i);
            float& value = score.at[0][n][i];
            value = exp2_approx(
                Score::outer(Score::inner(form, value, values), at, values, base[i / 2]));
          }
      }
    });
  }

  // Where a query does not attend to a key, either may be NaN.
  DLATTN_DEVICE void drop_unattended(Scores& probability, Scores& dP, const Walk& walk) {
    const int first_query = walk.at.query + first_row();
    const int first_key = walk.at.key + Scores::column(0, 0);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int query = first_query + Scores::row(0, i);
      Interval keys = Problem::Mask::keys({query, query + 1}, walk.length, p);
      if (query >= walk.length.q) keys = {0, 0};
#pragma unroll
      for (int n = 0; n < tile_k / 8; n += 16) {
        const uint32 kept = kept_elements(keys, first_key + 8 * n);
#pragma unroll
        for (int e = 0; e < 32; ++e) {
          if ((kept >> e & 1) == 0) {
            probability.at[0][n + e / 2][i + e % 2] = 0.f;
            dP.at[0][n + e / 2][i + e % 2] = 0.f;
          }
        }
      }
    }
  }

  // A product of the next operands of the ring.
  template <class Operands>
  DLATTN_DEVICE int begin(Scores& product, Place<stages>& place) {
    const int stage = place.stage;
    mbarrier_wait(shared.ring.full[stage], place.parity);
    const auto& operands = reinterpret_cast<Operands&>(shared.slots[stage]);
    start_product(product, operands.queries, first_row() / 64 * 64, operands.keys);
    place.advance();
    return stage;
  }

  // Adds P (dP - delta) of a tile of scores.
  DLATTN_DEVICE void add_step(Scores& sum, const Walk& walk, Place<stages>& place,
                              const RowStats& stats, const ScoreValues& values) {
    Scores probability, dP;
    const int first = begin<Q_K>(probability, place);
    const int second = begin<DO_V>(dP, place);
    wgmma_wait<1>();
    tie(probability);
    exponentiate(probability, walk, stats, values);
    const float minus_delta[2] = {stats.minus_delta(first_row() + Scores::row(0, 0)),
                                  stats.minus_delta(first_row() + Scores::row(0, 2))};
    release(shared.ring.empty[first]);
    wgmma_wait<0>();
    tie(dP);
    release(shared.ring.empty[second]);
    if (!walk.is_full(p)) drop_unattended(probability, dP, walk);
    sum.for_each([&](float& value, int m, int n, int i) {
      value = fmaf(probability.at[m][n][i], dP.at[m][n][i] + minus_delta[i / 2], value);
    });
  }

  DLATTN_DEVICE void consume() {
    const ScoreValues values(p);
    Place<stages> place;
    Place<1> bias_place;
    int step = 0;
    for_each_tile([&](const DBiasStep& tile) {
      Scores sum;
      sum.clear();
      Walk walk(p, tile);
      const bool any = !walk.done(p);
      if (any) mbarrier_wait(shared.bias_ring.full[0], bias_place.parity);
#pragma unroll 1
      for (; !walk.done(p); walk.advance(p)) {
        add_step(sum, walk, place, shared.row_stats[step++ % steps], values);
      }
      if (any) {
        release(shared.bias_ring.empty[0]);
        bias_place.advance();
      }
      store(sum, tile);
      __syncwarp();
    });
  }

  // ---- The tile of dBias ----

  DLATTN_DEVICE void store(Scores& sum, const DBiasStep& tile) const {
    constexpr float lowering = 1.f / (1 << Main::template raised<T>);
    if constexpr (lowering != 1.f) {
      sum.for_each([&](float& value, int, int, int) { value *= lowering; });
    }
    DBias* g_dBias =
        static_cast<DBias*>(p.dBias.data) + tile.batch * p.dBias.batch + tile.head * p.dBias.head;
    constexpr int unit = 16 / sizeof(DBias);
    const bool by_units = tile.key + tile_k <= p.seq_kv && p.dBias.column == 1 &&
                          ((p.dBias.row | p.dBias.head | p.dBias.batch) % unit) == 0 &&
                          reinterpret_cast<uint64>(p.dBias.data) % 16 == 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int query = tile.query + first_row() + Scores::row(0, i);
      DBias* g_row = g_dBias + query * p.dBias.row;
      if (by_units) {
        store_units(sum, g_row + tile.key, i, query < p.seq_q);
      } else if (query < p.seq_q) {
        store_elements(sum, g_row, tile.key + Scores::column(0, 0), i);
      }
    }
  }

  // By a whole warp: whole sectors at a time.
  static DLATTN_DEVICE void store_units(const Scores& sum, DBias* g_row, int i, bool exists) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < tile_k / 8; n += 4) {
      if constexpr (sizeof(DBias) == 2) {
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = Convert<DBias>::pack(sum.at[0][n + j][i], sum.at[0][n + j][i + 1]);
        }
        transpose_quad(words, lane);
        if (!exists) continue;
        *reinterpret_cast<uint4*>(g_row + 8 * (n + lane)) =
            uint4{words[0], words[1], words[2], words[3]};
      } else {
        if (!exists) continue;
#pragma unroll
        for (int j = n; j < n + 4; ++j) {
          *reinterpret_cast<float2*>(g_row + 8 * j + 2 * lane) =
              float2{sum.at[0][j][i], sum.at[0][j][i + 1]};
        }
      }
    }
  }

  DLATTN_DEVICE void store_elements(const Scores& sum, DBias* g_row, int first_key, int i) const {
#pragma unroll
    for (int n = 0; n < tile_k / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = first_key + Scores::column_step(n, j);
        if (key < p.seq_kv) g_row[key * p.dBias.column] = from_float<DBias>(sum.at[0][n][i + j]);
      }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_dbias_sm90(const MappedBwdParams& params) {
  using Kernel = BwdDBiasSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(params, shared);
  kernel.init();
  if (warp_index() / 4 == 0) {
    give_registers<24>();
    if (warp_index() == 0) kernel.produce();
  } else {
    take_registers<240>();
    kernel.consume();
  }
}

}  // namespace dlattn
