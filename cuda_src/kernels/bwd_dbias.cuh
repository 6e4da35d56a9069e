// After the backward's bwd_delta: the gradient of a bias, P * (dP - delta), summed where the bias
// broadcasts. Or of what a user's function reads in the place of it: times the function's derivative.
//
// A block owns a tile of dBias and walks the tiles of scores that are added to it, one after
// another: those of all batch entries, or heads, that share the bias, and if queries, or keys,
// share it, those of all queries, or keys. Where that leaves few blocks, several share a tile: each
// takes a part of its walk, and the last to be done adds theirs. Sums stay in registers, and have one
// order. Per tile:
//   S = Q K^T, P = exp(S - stats), dP = dO V^T; dBias += P (dP - delta) dS/dBias
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/seqlen.cuh"
#include "attn/signs.cuh"
#include "kernels/bwd_dbias_walk.cuh"
#include "kernels/bwd_tile.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

// Main is the tiling of the main kernel: row statistics are laid out for it.
template <int tile_q_, int tile_k_, int warps_, int warps_q_, class Main_>
struct DBiasTiling {
  using Main = Main_;
  static constexpr int tile_q = tile_q_, tile_k = tile_k_;
  static constexpr int warps = warps_;
  static constexpr int warps_q = warps_q_;  // along queries
  static constexpr int columns = 32;        // what head dimensions are rounded up to
};

template <class Problem, class Tiling>
struct BwdDBias {
  using T = typename Problem::Element;
  using DBias = typename Problem::DBias;
  using Score = typename Problem::Score;
  using Main = typename Tiling::Main;
  using MainShapes = BwdShapes<Problem, Main>;
  using Walk = DBiasWalk<Problem, Tiling>;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int warps_q = Tiling::warps_q, warps_k = Tiling::warps / warps_q;
  static constexpr int threads = 32 * Tiling::warps;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, Tiling::columns);
  static constexpr int dim_v = round_up(Problem::head_dim_v, Tiling::columns);
  static constexpr int access_bytes = Problem::access_bytes;
  static constexpr bool drops = Problem::Dropout::drops;
  // What is read is more than added: scores have a derivative by it.
  static constexpr bool is_bent = requires { typename Problem::Partial; };

  using Grid = WarpGrid<tile_q, tile_k, Tiling::warps, warps_q>;
  using Scores = typename Grid::Block;
  struct NoSlopes {};
  using Slopes = Either<is_bent, Scores, NoSlopes>;
  using QTile = SharedTile<T, tile_q, dim_qk>;
  using KTile = SharedTile<T, tile_k, dim_qk>;
  using DOTile = SharedTile<T, tile_q, dim_v>;
  using VTile = SharedTile<T, tile_k, dim_v>;

  struct SharedMemory {
    QTile q;
    KTile k;
    DOTile dO;
    VTile v;
    alignas(16) float log_sum_exp[tile_q];
    alignas(16) float minus_delta[tile_q];
    // Of this step and of the next: sums and products take all registers.
    alignas(16) Walk walks[2];
  };

  // The elements of the bias that a lane's scores are added to, two neighbouring keys at a time. Where
  // there is none, the nearest that exists: no branch, and the mask drops what becomes of it.
  struct StagedBias {
    using Position = BiasedPosition<float>;
    using Element = typename Score::StagedBias::Element;
    static constexpr bool is_short = sizeof(Element) == 2;
    using Pair = Either<is_short, uint32, float2>;
    Pair at[Grid::m_tiles][Grid::n_tiles][2];

    DLATTN_DEVICE StagedBias(const Params& p, const Walk& walk, const dlattn::Position& first) {
      if (walk.is_inside()) {
        read<true>(p, first);
      } else {
        read<false>(p, first);
      }
    }

    DLATTN_DEVICE Position with(const dlattn::Position& at, int m, int n, int i) const {
      return {at, element(m, n, i)};
    }
    DLATTN_DEVICE float element(int m, int n, int i) const {
      const Pair& pair = at[m][n][i / 2];
      if constexpr (is_short) {
        return i % 2 == 0 ? Convert<Element>::low(pair) : Convert<Element>::high(pair);
      } else {
        return i % 2 == 0 ? pair.x : pair.y;
      }
    }

   private:
    template <bool inside>
    DLATTN_DEVICE void read(const Params& p, const dlattn::Position& first) {
      const auto* g_bias = static_cast<const Element*>(p.bias.data) + first.batch * p.bias.batch +
                           first.head * p.bias.head;
      const int last_query = first.length_q - 1, last_key = first.length_kv - 1;
#pragma unroll
      for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = first.query + Scores::row_step(m, 2 * half);
          const Element* g_row = g_bias + (inside ? query : least(query, last_query)) * p.bias.row;
          if (inside && Problem::bias_pairs) g_row += first.key;
#pragma unroll
          for (int n = 0; n < Grid::n_tiles; ++n) {
            const int step = Scores::column_step(n, 0), key = first.key + step;
            Pair& pair = at[m][n][half];
            if constexpr (Problem::bias_pairs) {
              const auto* g_pair = g_row + (inside ? step : least(key, last_key & ~1));
              pair = start_load(reinterpret_cast<const uint32*>(g_pair));
            } else {
              const int next = key + 1;
              pair = pair_of(
                  load_constant(g_row + (inside ? key : least(key, last_key)) * p.bias.column),
                  load_constant(g_row + (inside ? next : least(next, last_key)) * p.bias.column));
            }
          }
        }
    }

    static DLATTN_DEVICE Pair pair_of(Element low, Element high) {
      if constexpr (is_short) {
        return low.bits | uint32(high.bits) << 16;
      } else {
        return {low, high};
      }
    }
  };

  struct NoBias {
    DLATTN_DEVICE NoBias(const Params&, const Walk&, const Position&) {}
    static DLATTN_DEVICE Position with(const Position& at, int, int, int) { return at; }
  };
  using BiasTile = Either<Score::stages_bias, StagedBias, NoBias>;

  const Params& p;
  SharedMemory& shared;
  const ScoreValues values;
  const int first_row, first_column;  // of this warp, in the tile

  DLATTN_DEVICE BwdDBias(const Params& params, SharedMemory& shared_memory)
      : p(params),
        shared(shared_memory),
        values(params),
        first_row(Grid::first_row()),
        first_column(Grid::first_column()) {}

  DLATTN_DEVICE const BiasRef& dBias() const { return written<Problem>(p); }

  static DLATTN_DEVICE StridedRows<T> query_rows(const TensorRef& tensor, const DBiasStep& at) {
    return {tensor.rows<T, Problem::ragged>(at.batch, at.head, at.query), tensor.row};
  }
  DLATTN_DEVICE void load_q_and_k(const Walk& walk) {
    const DBiasStep& at = walk.at;
    load_tile<threads, Problem::head_dim_qk, access_bytes>(shared.q, query_rows(p.q, at),
                                                           walk.length.q - at.query);
    load_tile<threads, Problem::head_dim_qk, access_bytes>(
        shared.k,
        key_rows<Problem, Problem::paged_k>(p.k, p.k_pages, at.batch,
                                            p.heads_per_k.quotient(at.head), at.key),
        walk.length.kv - at.key);
    load_row_stats(shared.log_sum_exp, 0, walk);
  }
  DLATTN_DEVICE void load_do_and_v(const Walk& walk) {
    const DBiasStep& at = walk.at;
    load_tile<threads, Problem::head_dim_v, access_bytes>(shared.dO, query_rows(p.dO, at),
                                                          walk.length.q - at.query);
    load_tile<threads, Problem::head_dim_v, access_bytes>(
        shared.v,
        key_rows<Problem, Problem::paged_v>(p.v, p.v_pages, at.batch,
                                            p.heads_per_v.quotient(at.head), at.key),
        walk.length.kv - at.key);
    load_row_stats(shared.minus_delta, Main::tile_q, walk);
  }
  // From their tiles of the main kernel: which numbers of a row, and for how many rows there are.
  DLATTN_DEVICE void load_row_stats(float (&s_rows)[tile_q], int offset, const Walk& walk) {
    static_assert(tile_q % 4 == 0 && Main::tile_q % 4 == 0 && 4 * threads >= tile_q);
    const int row = 4 * threadIdx.x, query = walk.at.query + row;
    if (row < tile_q) {
      const bool exists = query < walk.length.q;
      const int tile = exists ? query / Main::tile_q : 0;
      const float* g_stats =
          MainShapes::row_stats(p, MainShapes::row_tile(p, walk.at.batch, walk.at.head, tile));
      cp_async_16(shared_address(&s_rows[row]), g_stats + offset + query % Main::tile_q, exists);
    }
    __syncwarp();
  }

  // Adds a product in a loop: unrolled, ptxas has so many operands on their way that sums spill.
  template <int columns, class Left, class Right>
  DLATTN_DEVICE void multiply(Scores& c, Left& s_left, Right& s_right) const {
    SharedLeft<Left, false> left(s_left, first_row);
    SharedRight<Right, false> right(s_right, first_column);
    constexpr int at_a_time = columns > 64 && columns % 64 == 0 ? 64 : 32;
#pragma unroll 1
    for (int column = 0; column < opaque(columns); column += at_a_time) {
      gemm<T, at_a_time / 16>(c, left, right);
      left.base += 2 * at_a_time;
      right.base += 2 * at_a_time;
    }
  }

  // Turns raw products into probabilities, and derivatives into factors of theirs: unless their signs
  // will say what is dropped.
  DLATTN_DEVICE void exponentiate(Scores& score, Slopes& slope, const BiasTile& bias,
                                  const Walk& walk) const {
    const auto exponentiate_by = [&](auto exponent) {
      score.for_each([&](float& value, int m, int n, int i) {
        const float base = -shared.log_sum_exp[first_row + Scores::row(m, i)], raw = value;
        const auto at = bias.with(position(walk, m, n, i), m, n, i);
        value = exp2_approx(exponent(raw, at, base));
        if constexpr (is_bent) {
          float& factor = slope.at[m][n][i];
          factor = value == 0.f ? 0.f : Problem::Partial::apply(raw, at, values);
          if (!drops) value *= factor;
        }
      });
    };
    if constexpr (Score::is_quick) {
      const auto products = [&](auto visit) {
        score.for_each([&](float raw, int, int, int i) { visit(raw, i); });
      };
      Score::in_form(Score::range(products), values, [&](auto form) {
        exponentiate_by([&](float raw, const auto& at, float base) {
          return Score::outer(Score::inner(form, raw, values), at, values, base);
        });
      });
    } else {
      Score::prepare(score, values);
      const float log2_factor = Score::factor(values) * log2_e;
      exponentiate_by([&](float raw, const auto& at, float base) {
        return fmaf(Score::apply(raw, at, values), log2_factor, base);
      });
    }
    if (walk.is_full(p)) return;
    const int first_query = opaque(walk.at.query + first_row);
    const int first_key = opaque(walk.at.key + first_column);
    score.for_each([&](float& value, int m, int n, int i) {
      const int query = first_query + Scores::row(m, i), key = first_key + Scores::column(n, i);
      const bool keep = Problem::Mask::keep(query, key, walk.length, p) & (query < walk.length.q);
      value = keep ? value : 0.f;
    });
  }

  DLATTN_DEVICE Position position(const Walk& walk, int m, int n, int i) const {
    return {walk.at.batch,
            walk.at.head,
            walk.length.q,
            walk.length.kv,
            walk.at.query + first_row + Scores::row(0, 0),
            walk.at.key + first_column + Scores::column(0, 0),
            Scores::row_step(m, i),
            Scores::column_step(n, i)};
  }

  // Adds a tile of scores, and moves on. False after the last.
  DLATTN_DEVICE bool step(Scores& sum, int iteration) {
    cp_async_wait_all();
    __syncthreads();
    const Walk& walk = shared.walks[iteration % 2];
    load_do_and_v(walk);
    Scores probability;
    Slopes slope;
    probability.clear();
    if constexpr (Problem::bias_pairs) {
      const BiasTile bias(p, walk, position(walk, 0, 0, 0));  // on its way beside the products
      multiply<dim_qk>(probability, shared.q, shared.k);
      exponentiate(probability, slope, bias, walk);
    } else {
      multiply<dim_qk>(probability, shared.q, shared.k);
      exponentiate(probability, slope, BiasTile(p, walk, position(walk, 0, 0, 0)), walk);
    }
    if constexpr (drops) {
      const typename Problem::Dropout dropout(p, walk.at.batch, walk.at.head, walk.length);
      mark_dropped(probability, dropout, walk.at.query + first_row, walk.at.key + first_column);
    }
    cp_async_wait_all();
    __syncthreads();
    const bool more = start_next(iteration);
    Scores dP;
    const auto minus_delta = [&](int m, int i) {
      return shared.minus_delta[first_row + Scores::row(m, i)];
    };
    dP.for_each([&](float& value, int m, int, int i) { value = drops ? 0.f : minus_delta(m, i); });
    multiply<dim_v>(dP, shared.dO, shared.v);
    sum.for_each([&](float& value, int m, int n, int i) {
      const float weight = probability.at[m][n][i], grad = dP.at[m][n][i];
      if constexpr (drops && is_bent) {
        const float dS = weigh_dropped(weight, grad, minus_delta(m, i));
        value += dS == 0.f ? 0.f : dS * slope.at[m][n][i];  // masked, whatever the derivative
      } else if constexpr (drops) {
        value += weigh_dropped(weight, grad, minus_delta(m, i));
      } else {
        value = fmaf(weight, grad, value);
      }
    });
    return more;
  }

  DLATTN_DEVICE bool start_next(int iteration) {
    Walk next = shared.walks[iteration % 2];
    next.at = uniform(next.at);  // or ptxas holds the warp for divided from here on
    next.advance(p);
    return start(next, iteration + 1);
  }
  DLATTN_DEVICE bool start(const Walk& walk, int iteration) {
    if (threadIdx.x == 0) shared.walks[iteration % 2] = walk;
    __syncwarp();
    if (walk.done(p)) return false;
    load_q_and_k(walk);
    return true;
  }

  // The tile itself, two neighbouring keys at a time where they are neighbours in memory.
  DLATTN_DEVICE void store_tile_of(const Scores& sum, DBias* g_dBias, const DBiasStep& tile) const {
    const bool pairs = dBias().column == 1 &&
                       ((dBias().row | dBias().head | dBias().batch) & 1) == 0 &&
                       reinterpret_cast<uint64>(dBias().data) % (2 * sizeof(DBias)) == 0;
    const int first_query = tile.query + first_row + Scores::row(0, 0);
    const int first_key = tile.key + first_column + Scores::column(0, 0);
#pragma unroll
    for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int query = first_query + Scores::row_step(m, i);
        if (query >= p.seq_q) continue;
        DBias* g_row = g_dBias + query * dBias().row;
#pragma unroll
        for (int n = 0; n < Grid::n_tiles; ++n) {
          const int key = first_key + Scores::column_step(n, 0);
          const float low = sum.at[m][n][i], high = sum.at[m][n][i + 1];
          if (pairs && key + 1 < p.seq_kv) {
            store_pair(g_row + key, low, high);
          } else {
            if (key < p.seq_kv) g_row[key * dBias().column] = from_float<DBias>(low);
            if (key + 1 < p.seq_kv) g_row[(key + 1) * dBias().column] = from_float<DBias>(high);
          }
        }
      }
  }

  static DLATTN_DEVICE void store_pair(DBias* g_pair, float low, float high) {
    if constexpr (same_type<DBias, float>) {
      *reinterpret_cast<float2*>(g_pair) = float2{low, high};
    } else {
      *reinterpret_cast<uint32*>(g_pair) = Convert<DBias>::pack(low, high);
    }
  }

  // The sums of the tile's columns: a row of dBias, or the only element.
  DLATTN_DEVICE void store_column_sums(const Scores& sum, DBias* g_dBias, int first_key) const {
    float* s_sums = free_memory();  // [warps_q][tile_k]
    float* s_own = s_sums + first_row / Grid::warp_rows * tile_k + first_column;
#pragma unroll
    for (int n = 0; n < Grid::n_tiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float part = 0.f;
#pragma unroll
        for (int m = 0; m < Grid::m_tiles; ++m) part += sum.at[m][n][j] + sum.at[m][n][j + 2];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          part += __shfl_xor_sync(0xffffffffu, part, lanes);
        }
        if (threadIdx.x % 32 < 4) s_own[Scores::column(n, j)] = part;
      }
    __syncthreads();
    if (dBias().column == 0) {
      if (threadIdx.x != 0) return;
      float total = 0.f;
      for (int i = 0; i < warps_q * tile_k; ++i) total += s_sums[i];
      *g_dBias = from_float<DBias>(total);
    } else {
      const int key = first_key + threadIdx.x;
      if (threadIdx.x < tile_k && key < p.seq_kv) {
        g_dBias[key * dBias().column] = from_float<DBias>(sum_of<warps_q, tile_k>(s_sums));
      }
    }
  }

  // The sums of its rows: a column of dBias().
  DLATTN_DEVICE void store_row_sums(const Scores& sum, DBias* g_dBias, int first_query) const {
    float* s_sums = free_memory();  // [warps_k][tile_q]
    float* s_own = s_sums + first_column / Grid::warp_columns * tile_q + first_row;
#pragma unroll
    for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float part = 0.f;
#pragma unroll
        for (int n = 0; n < Grid::n_tiles; ++n) part += sum.at[m][n][i] + sum.at[m][n][i + 1];
        part += __shfl_xor_sync(0xffffffffu, part, 1);
        part += __shfl_xor_sync(0xffffffffu, part, 2);
        if (threadIdx.x % 4 == 0) s_own[Scores::row(m, i)] = part;
      }
    __syncthreads();
    const int query = first_query + threadIdx.x;
    if (threadIdx.x < tile_q && query < p.seq_q) {
      g_dBias[query * dBias().row] = from_float<DBias>(sum_of<warps_k, tile_q>(s_sums));
    }
  }

  // When every warp is done with the tiles.
  DLATTN_DEVICE float* free_memory() const {
    static_assert(threads >= tile_q && threads >= tile_k);
    static_assert(sizeof(SharedMemory) >= 4 * most(warps_q * tile_k, warps_k * tile_q));
    __syncthreads();
    return reinterpret_cast<float*>(&shared);
  }

  // What the warps have for the element of this thread.
  template <int warps, int elements>
  static DLATTN_DEVICE float sum_of(const float* s_sums) {
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) total += s_sums[warp * elements + threadIdx.x];
    return total;
  }

  // Adds up what all blocks of a tile have, in their order, in the last of them; false in others.
  DLATTN_DEVICE bool join(Scores& sum) const {
    // Of an aligned bias there are tiles of every query and key, and no registers left.
    if constexpr (Problem::bias_pairs && Problem::gradient_of < 0) return true;
    const int parts = gridDim.y * gridDim.z, part = blockIdx.z * gridDim.y + blockIdx.y;
    if (parts == 1) return true;
    constexpr int part_size = tile_q * tile_k, thread_step = threads * 4;
    float* g_parts = p.dbias_parts + int64(blockIdx.x) * parts * part_size + 4 * threadIdx.x;
    const auto each = [&](float* g_part, auto take) {
#pragma unroll
      for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < Grid::n_tiles; ++n) {
          take(*reinterpret_cast<float4*>(g_part + (m * Grid::n_tiles + n) * thread_step),
               sum.at[m][n]);
        }
    };
    each(g_parts + int64(part) * part_size,
         [](float4& stored, const float (&own)[4]) { stored = {own[0], own[1], own[2], own[3]}; });
    fence_gpu();
    __syncthreads();
    int* s_done = reinterpret_cast<int*>(&shared);
    if (threadIdx.x == 0) *s_done = fetch_add(p.dbias_arrivals + blockIdx.x, 1) + 1;
    __syncthreads();
    if (*s_done != parts) return false;
    fence_gpu();
    if (threadIdx.x == 0) p.dbias_arrivals[blockIdx.x] = 0;  // for the next gradient
    sum.clear();
#pragma unroll 1
    for (int i = 0; i < parts; ++i) {
      each(g_parts + int64(i) * part_size, [](const float4& stored, float (&total)[4]) {
        const float4 other = load_relaxed(&stored);
        total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
      });
    }
    return true;
  }

  // All of a tile of dBias, or a part of what is added to it.
  DLATTN_DEVICE void compute(const DBiasStep& tile) {
    Scores sum;
    sum.clear();
    bool more = start(Walk(p, tile), 0);
#pragma unroll 1
    for (int iteration = 0; more; ++iteration) more = step(sum, iteration);
    if (!join(sum)) return;
    constexpr float lowering = 1.f / (1 << Main::template raised<T>);
    const float factor = lowering * dropout_scale<Problem>(p);
    sum.for_each([&](float& value, int, int, int) { value *= factor; });
    DBias* g_dBias =
        static_cast<DBias*>(dBias().data) + tile.batch * dBias().batch + tile.head * dBias().head;
    if (dBias().row == 0) {
      store_column_sums(sum, g_dBias, tile.key);
    } else if (dBias().column == 0) {
      store_row_sums(sum, g_dBias, tile.query);
    } else {
      store_tile_of(sum, g_dBias, tile);
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_dbias(const Params& p) {
  using Kernel = BwdDBias<Problem, Tiling>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);
  Kernel(p, shared).compute(first_dbias_step<Problem, Tiling>(blockIdx.x, p));
}

}  // namespace dlattn
