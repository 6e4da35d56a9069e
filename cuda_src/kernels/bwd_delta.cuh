// Before the backward's main kernel: per query row, the log-sum-exp in log2 units and
// -delta = -rowsum(dO * O); what the tile adds to the gradient of its head's sink; and zeros for the
// dQ sums, and for those of dK and dV of a ragged problem. One block per query tile.
#pragma once

#include "attn/params.cuh"
#include "attn/remade.cuh"
#include "attn/seqlen.cuh"
#include "attn/walk.cuh"
#include "base/math.cuh"
#include "kernels/bwd_key_sums.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "tile/reduce.cuh"

namespace dlattn {

// 8 elements of a row.
template <class T, int access_bytes>
DLATTN_DEVICE uint4 load_unit(const T* g_unit) {
  if constexpr (access_bytes == 16) return *reinterpret_cast<const uint4*>(g_unit);
  uint32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = g_unit[2 * i].bits | g_unit[2 * i + 1].bits << 16;
  return {words[0], words[1], words[2], words[3]};
}

template <class T>
DLATTN_DEVICE float dot(uint4 a, uint4 b) {
  const uint32 words_a[4] = {a.x, a.y, a.z, a.w}, words_b[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += Convert<T>::low(words_a[i]) * Convert<T>::low(words_b[i]) +
           Convert<T>::high(words_a[i]) * Convert<T>::high(words_b[i]);
  }
  return sum;
}

// How many key tiles visit a query tile. A warp's.
template <class Problem, class Tiling>
DLATTN_DEVICE int key_tiles_of(const Params& p, int batch, int head, int tile,
                               const Lengths& length) {
  constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  const Interval queries{tile * tile_q, least((tile + 1) * tile_q, length.q)};
  if (queries.empty()) return 0;
  const Interval keys = Problem::Mask::keys(queries, length, p);
  if (keys.empty()) return 0;
  return Walk<typename Problem::Mask, tile_q, tile_k>::count_keys(
      p, {tile, head, batch}, {keys.first / tile_k, ceil_div(keys.last, tile_k)});
}

// Sums that a query tile is added to, and what counts additions.
template <class Problem, class Tiling>
DLATTN_DEVICE void clear_sums(const Params& p, int batch, int head, int tile, int row_tile,
                              bool has_room, int length_q) {
  using Shapes = BwdShapes<Problem, Tiling>;
  if (!Problem::ragged && p.items_taken != nullptr && row_tile == 0 && threadIdx.x == 0) {
    *p.items_taken = 0;
    *p.shares_taken = 0;
  }
  if constexpr (Problem::ragged && Tiling::adds_keys) KeySums<Problem, Tiling>::clear(p, batch);

  if constexpr (Problem::ragged && Tiling::relays) return;  // an item has all of dQ
  int sum_tile = row_tile, rows = Shapes::tile_q;
  if (Problem::ragged && p.dq_places == 0) {
    if (!has_room) return;
    rows = length_q - tile * Shapes::tile_q;  // a sum of its own is read no further
  } else {
    const Divisor& heads = p.heads_per_block;
    const int group = heads.quotient(head), head_of_group = head - group * heads.number;
    const int pair = Shapes::pair(p, batch, group);
    if (pair >= p.dq_places) return;
    sum_tile = Shapes::slot(p, pair, head_of_group, tile);
    if (threadIdx.x == 0 && p.dq_stored != nullptr) p.dq_stored[pair] = 0;
  }
  if (threadIdx.x == 0 && p.dq_arrivals != nullptr) p.dq_arrivals[sum_tile] = 0;
  if constexpr (Tiling::relays) return;  // parts of dQ are stored, not added
  auto* g_dq = reinterpret_cast<float4*>(Shapes::dq_accum(p, sum_tile));
#pragma unroll 4
  for (int i = threadIdx.x; i < Shapes::tile_q * Shapes::dim_qk / 4; i += Shapes::threads) {
    if (Problem::ragged && Shapes::first_row_of_sum(4 * i) >= rows) continue;
    g_dq[i] = float4{0.f, 0.f, 0.f, 0.f};
  }
}

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_delta(const Params& p) {
  using Shapes = BwdShapes<Problem, Tiling>;
  using T = typename Problem::Element;
  launch_dependents();
  if constexpr (Problem::ragged) await_kernel_before();
  constexpr int units = Problem::head_dim_v / 8;
  constexpr int lanes_per_row = least(32, power_of_two_at_least(units));
  constexpr int rows_per_pass = Shapes::threads / lanes_per_row;
  const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % lanes_per_row;
  const Lengths length(p, batch);
  const int row_tile = Shapes::row_tile(p, batch, head, tile);
  float* g_stats = Shapes::row_stats(p, row_tile);
  float sink_part = 0.f;  // of this thread

  // A ragged problem has room only for tiles that exist.
  const bool has_room = !Problem::ragged || tile < Shapes::query_tiles(p, batch);
  const float log2_factor = Problem::Score::factor(ScoreValues(p)) * log2_e;

  // First, because nothing is waited for.
  clear_sums<Problem, Tiling>(p, batch, head, tile, row_tile, has_room, length.q);

  // A row in each pass, of which a lane has every n-th unit; what some passes read is on its way
  // before any of it is used.
  constexpr int units_per_lane = ceil_div(units, lanes_per_row);
  constexpr int passes = ceil_div(Shapes::tile_q, rows_per_pass);
  constexpr int passes_at_once = most(1, least(passes, 4) / units_per_lane);
  using Stats = typename Problem::Stats;
  const int first_row = threadIdx.x / lanes_per_row;
  const int first_query = tile * Shapes::tile_q + first_row;
  const T* g_o = p.o.rows<T, Problem::ragged>(batch, head, first_query) + 8 * lane;
  const T* g_dO = p.dO.rows<T, Problem::ragged>(batch, head, first_query) + 8 * lane;
  const auto* g_row_stats = p.stats.rows<Stats, Problem::ragged>(batch, head, first_query);
#pragma unroll
  for (int first_pass = 0; first_pass < passes; first_pass += passes_at_once) {
    uint4 o[passes_at_once][units_per_lane], dO[passes_at_once][units_per_lane];
    float row_stats[passes_at_once];
#pragma unroll
    for (int i = 0; i < passes_at_once; ++i) {
      const int below = (first_pass + i) * rows_per_pass;
      const bool exists =
          has_room && first_row + below < Shapes::tile_q && first_query + below < length.q;
      row_stats[i] = exists ? to_float(g_row_stats[below * p.stats.row]) : -infinity();
#pragma unroll
      for (int j = 0; j < units_per_lane; ++j) {
        const bool reads = exists && lane + j * lanes_per_row < units;
        const auto load = [&](const T* g_first, const TensorRef& ref) {
          const T* g_unit = g_first + below * ref.row + 8 * j * lanes_per_row;
          return reads ? load_unit<T, Problem::access_bytes>(g_unit) : uint4{0, 0, 0, 0};
        };
        o[i][j] = load(g_o, p.o);
        dO[i][j] = load(g_dO, p.dO);
      }
    }
#pragma unroll
    for (int i = 0; i < passes_at_once; ++i) {
      if (!has_room) break;
      const int row = first_row + (first_pass + i) * rows_per_pass;
      const int query = tile * Shapes::tile_q + row;
      const float stats = row_stats[i];
      float delta = 0.f;
#pragma unroll
      for (int j = 0; j < units_per_lane; ++j) delta += dot<T>(o[i][j], dO[i][j]);
#pragma unroll
      for (int offset = lanes_per_row / 2; offset > 0; offset /= 2) {
        delta += __shfl_xor_sync(0xffffffffu, delta, offset);
      }
      if (lane == 0 && row < Shapes::tile_q) {
        // Rows beyond the length have no stats, and are as those without keys.
        const float log_sum_exp = log2_of_sum(stats, Tiling::template raised<T>);
        if constexpr (Problem::d_stats) {
          // dS = P (dP - delta + dStats): stats are the log of what P is divided by.
          if (stats != -infinity()) {
            delta -= *p.dStats.rows<float, Problem::ragged>(batch, head, query);
          }
        }
        // What the sums of dP begin with, which dropout's scale is not a factor of yet.
        const float minus_delta = -delta * dropout_scale_inv<Problem>(p);
        if constexpr (Tiling::stats_in_products) {
          ProductStats::write(g_stats, row, -log_sum_exp / log2_factor, minus_delta);
        } else {
          g_stats[row] = log_sum_exp;
          g_stats[Shapes::tile_q + row] = minus_delta;
        }
        if constexpr (Problem::delta) {
          const bool stored = query < p.delta.stored_rows<Problem::ragged>(length.q, p.seq_q);
          if (stored) *p.delta.rows<float, Problem::ragged>(batch, head, query) = -minus_delta;
        }
        if constexpr (Problem::sink) {
          if (stats != -infinity()) sink_part -= expf(p.sink(head) - stats) * delta;
        }
      }
    }
  }

  if constexpr (Problem::sink) {
    const float part = block_sum<Shapes::threads>(sink_part);
    const int64 entry = int64(head) * p.batch + batch;
    if (threadIdx.x == 0) p.sink_parts[entry * gridDim.x + tile] = part;
  }

  if constexpr (counts_additions<Problem>) {
    if (has_room && threadIdx.x < 32 && p.dq_additions != nullptr) {
      const int count = key_tiles_of<Problem, Tiling>(p, batch, head, tile, length);
      if (threadIdx.x == 0) p.dq_additions[row_tile] = count;
    }
  }
}

}  // namespace dlattn
