// What the kernels of a backward share: the tiling, and the scratch layouts that one kernel writes and
// another reads.
#pragma once

#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "kernels/bwd_stats.cuh"
#include "ptx/memory.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

template <int tile_q_, int tile_k_, int warps_, int warps_s_, int warps_kv_, int warps_dq_,
          int stages_q_, int stages_do_>
struct BwdTiling {
  static constexpr int tile_q = tile_q_, tile_k = tile_k_;
  static constexpr int warps = warps_;
  static constexpr int warps_s = warps_s_;    // along queries in the score products
  static constexpr int warps_kv = warps_kv_;  // along keys in dK and dV
  static constexpr int warps_dq = warps_dq_;  // along queries in dQ
  static constexpr int stages_q = stages_q_, stages_do = stages_do_;
  // Probabilities are multiplied by 2 to this.
  template <class T>
  static constexpr int raised = 0;
  // What head dimensions are rounded up to: 32 is what the narrowest division of dK, dV and dQ among
  // warps can hold.
  static constexpr int columns = 32;
  static constexpr int piece_columns = 0;  // sums of dQ are no pieces
  static constexpr bool stats_in_products = false, adds_keys = false, relays = false;
};

// Of the Hopper backward: dlattn/plans/bwd_sm90_tiling.py says what these are.
template <int tile_q_, int tile_k_, bool by_product_, int stages_, int ds_stages_,
          int piece_columns_, int dq_slots_, int share_slots_, int do_stages_, int cluster_,
          int query_registers_, bool stats_in_products_, bool keys_in_registers_, bool adds_keys_,
          bool shares_last_, bool relays_>
struct Sm90BwdTiling {
  static constexpr int tile_q = tile_q_, tile_k = tile_k_;
  static constexpr int cluster = cluster_;
  static constexpr bool by_product = by_product_;
  static constexpr int stages = stages_, do_stages = do_stages_, ds_stages = ds_stages_;
  static constexpr int piece_columns = piece_columns_, dq_slots = dq_slots_;
  // Of which dQ has a multiple, so that the pieces of a step fill all slots equally often.
  static constexpr int columns =
      piece_columns * (tile_q > 64 && dq_slots % 2 == 0 ? dq_slots / 2 : dq_slots) * cluster;
  static constexpr int share_slots = share_slots_;
  static constexpr int query_registers = query_registers_;
  static constexpr bool stats_in_products = stats_in_products_;
  static constexpr bool keys_in_registers = keys_in_registers_;
  static constexpr bool adds_keys = adds_keys_, shares_last = shares_last_;
  static constexpr bool relays = relays_;
  static constexpr int warps = 8;  // of the kernel before
  // Probabilities are rounded to T before dP is multiplied by them. In fp16, small ones would lose what
  // precision the others have.
  template <class T>
  static constexpr int raised = same_type<T, half> ? 12 : 0;
};

// How wide the Hopper backward computes dK or dV: as wgmma has it.
template <class Problem>
constexpr int result_width(int dim) {
  // Narrow, ptxas spills a register of the loaders that look at a block mask.
  const int step = dim <= 32 && Problem::Mask::by_blocks ? 64 : 32;
  return dim > 192 ? 256 : round_up(dim, step);
}

// How a block's warps divide a (rows x columns) product, rows first.
template <int rows, int columns, int warps, int warps_along_rows>
struct WarpGrid {
  static constexpr int warp_rows = rows / warps_along_rows;
  static constexpr int warp_columns = columns / (warps / warps_along_rows);
  static constexpr int m_tiles = warp_rows / 16, n_tiles = warp_columns / 8;
  static_assert(warp_rows % 16 == 0 && warp_columns % 8 == 0);

  using Block = Accumulator<m_tiles, n_tiles>;
  static DLATTN_DEVICE int first_row() { return warp_index() % warps_along_rows * warp_rows; }
  static DLATTN_DEVICE int first_column() { return warp_index() / warps_along_rows * warp_columns; }
};

template <class Problem, class Tiling>
struct BwdShapes {
  using T = typename Problem::Element;
  static constexpr int threads = 32 * Tiling::warps;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, Tiling::columns);
  static constexpr int dim_v = round_up(Problem::head_dim_v, Tiling::columns);

  // The number of a query tile among those of all heads.
  static DLATTN_DEVICE int row_tile(const Params& p, int batch, int head, int tile) {
    if constexpr (Problem::ragged) {
      const RaggedEntry entry = p.ragged.entries[batch];
      return entry.tile_of_head(head, p.heads_q) + tile;
    }
    return (batch * p.heads_q + head) * ceil_div(p.seq_q, tile_q) + tile;
  }

  // The statistics of one query tile: ProductStats, or tile_q log-sum-exps in log2 units, then tile_q
  // negative deltas.
  static constexpr int stats_words = tile_q * (Tiling::stats_in_products ? ProductStats::words : 2);
  static DLATTN_DEVICE float* row_stats(const Params& p, int row_tile) {
    return p.row_stats + int64(row_tile) * stats_words;
  }

  // Query tiles of a batch entry.
  static DLATTN_DEVICE int query_tiles(const Params& p, int batch) {
    if constexpr (Problem::ragged) return p.ragged.entries[batch].query_tiles;
    return ceil_div(p.seq_q, tile_q);
  }

  // The number of a (batch, group of heads) pair.
  static DLATTN_DEVICE int pair(const Params& p, int batch, int group) {
    return batch * p.items.heads.number + group;
  }

  // The first query that this value of a query tile's sum, or its neighbours, may be of: 16 rows after 16
  // rows of 64 by piece_columns.
  static DLATTN_DEVICE int first_row_of_sum(int i) {
    if constexpr (Tiling::piece_columns == 0) return 0;
    constexpr int piece = most(1, 64 * Tiling::piece_columns);
    return i / (64 * dim_qk) * 64 + i % piece * 4 / piece * 16;
  }

  // Where the sum of a query tile's dQ is, of all that a place has room for: pairs share dq_places places,
  // or bundles of several shorter ones (RaggedEntry).
  static DLATTN_DEVICE int slot(const Params& p, int pair, int head_of_pair, int tile) {
    const int place = p.shares.places.rest(pair) * p.heads_per_block.number + head_of_pair;
    return place * ceil_div(p.seq_q, tile_q) + tile;
  }
  // Of a ragged problem, of the first query tile of a head that is in this bundle.
  static DLATTN_DEVICE int first_sum(const Params& p, const RaggedEntry& entry, int bundle,
                                     int head) {
    if (p.dq_places == 0) return entry.tile_of_head(head, p.heads_q);
    const int first_head = entry.groups_of(bundle, 0).first * p.heads_per_block.number;
    return slot(p, bundle, 0, (head - first_head) * entry.query_tiles);
  }

  // That fp32 sum.
  static DLATTN_DEVICE float* dq_accum(const Params& p, int sum_tile) {
    return p.dq_accum + int64(sum_tile) * (tile_q * dim_qk);
  }
};

// Where a block mask drops key tiles, how many the others are is counted before; but in a fixed order,
// all of them take turns.
template <class Problem>
inline constexpr bool counts_additions = Problem::Mask::by_blocks && !Problem::deterministic;

// The same, and how the portable backward's warps divide dQ and lay out its sums.
template <class Problem, class Tiling>
struct PortableBwdShapes : BwdShapes<Problem, Tiling> {
  using DQGrid =
      WarpGrid<Tiling::tile_q, BwdShapes<Problem, Tiling>::dim_qk, Tiling::warps, Tiling::warps_dq>;

  // Where value i of a lane's accumulator (m, n) lies in a dq_accum tile: in the order of the
  // accumulators, so that every reduction of a warp covers contiguous memory.
  static constexpr int dq_stride = wide_reductions ? 1 : 32;
  static DLATTN_DEVICE int dq_offset(int m, int n, int i, int warp = warp_index()) {
    const int lane = threadIdx.x % 32;
    const int group = (warp * DQGrid::m_tiles + m) * DQGrid::n_tiles + n;
    return group * 128 + lane * (wide_reductions ? 4 : 1) + i * dq_stride;
  }
};

}  // namespace dlattn
