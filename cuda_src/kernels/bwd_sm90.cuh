// Attention backward for Hopper: wgmma, TMA, warp specialisation (FlashAttention-3, section 3).
//
// A block owns 128 keys, 64 for each of two consumer warpgroups, and walks the query tiles of every
// query head that shares them, so that dK and dV stay in registers across a whole group. Scores are
// transposed, keys by queries: probabilities and dS are then left operands in registers of
//   dV += P^T dO, dK += dS^T Q
// and only dS passes through shared memory, for dQ += dS K, of which each consumer computes half the
// columns. dQ is summed over key tiles in global memory, in accumulator order (bwd_dq.cuh).
#pragma once

#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "base/math.cuh"
#include "kernels/bwd_tile.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedBwdParams {
  TensorMap q, k, v, dO, dK, dV;  // boxes: 64, 128, 128, 64, 64 and 64 rows of 64 columns
  Params p;
};

template <class Problem, class Tiling>
struct BwdSm90 : BwdShapes<Problem, Tiling> {
  using Shapes = BwdShapes<Problem, Tiling>;
  using T = typename Shapes::T;
  using Shapes::dim_qk;
  using Shapes::dim_v;
  using Shapes::tile_k;
  using Shapes::tile_q;
  static constexpr int consumers = 2, stages = Tiling::stages, ds_stages = Tiling::ds_stages;
  static constexpr int producer_registers = 24, consumer_registers = 240;

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using DOTile = SlabTile<T, tile_q, dim_v>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using DSTile = SlabTile<T, tile_q, tile_k>;
  using Scores = Accumulator<1, tile_q / 8>;  // keys by queries
  using Rounded = RegisterLeft<T, 1, tile_q / 16>;
  using DK = Accumulator<1, dim_qk / 8>;
  using DV = Accumulator<1, dim_v / 8>;
  using DQ = Accumulator<1, dim_qk / 16>;  // half the columns

  struct SharedMemory {
    KTile k;
    VTile v;
    QTile q[stages];
    DOTile dO[stages];
    DSTile dS[ds_stages];
    float row_stats[stages][2 * tile_q];  // log-sum-exps in log2 units, deltas; they come with q
    Ring<1> k_ring, v_ring;
    Ring<stages> q_ring, do_ring;
    Ring<ds_stages> ds_ring;  // filled and read by the consumers
  };

  // Named barriers, by event.
  enum Barrier {
    keys_read = 1,
    rows_cleared,                    // + warpgroup
    rows_staged = rows_cleared + 2,  // + warpgroup
  };

  const MappedBwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const WorkItem work;
  const Lengths length;
  const Interval keys;  // of this tile that exist
  const int warpgroup;  // among the consumers

  DLATTN_DEVICE BwdSm90(const MappedBwdParams& params, SharedMemory& shared_memory,
                        WorkItem work_item)
      : m(params),
        p(params.p),
        shared(shared_memory),
        work(work_item),
        length(p, work.batch),
        keys{work.tile * tile_k, least((work.tile + 1) * tile_k, length.kv)},
        warpgroup(warp_index() / 4 - 1) {}

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      shared.k_ring.init(4 * consumers);
      shared.v_ring.init(4 * consumers);
      shared.q_ring.init(4 * consumers);
      shared.do_ring.init(4 * consumers);
      shared.ds_ring.init(4 * consumers, 4 * consumers);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // The query tiles that attend to these keys.
  DLATTN_DEVICE Interval query_tiles() const {
    const Interval queries = Problem::Mask::queries(keys, length, p);
    if (keys.empty() || queries.empty()) return {0, 0};
    return {queries.first / tile_q, ceil_div(queries.last, tile_q)};
  }

  DLATTN_DEVICE int first_head() const { return work.head * p.heads_per_block; }

  // ---- Loaders: a warp each for k and v, q and dO, of which one lane gives the orders ----

  template <class Tile>
  DLATTN_DEVICE void load_keys(Tile& tile, Ring<1>& ring, Place<1>& place, const TensorMap& map,
                               int head) {
    fill(ring, place, Tile::bytes,
         [&](int, uint64& full) { tile.load(map, full, keys.first, head, work.batch); });
  }

  DLATTN_DEVICE void load_keys_and_values() {
    Place<1> k_place, v_place;
    for (int i = 0; i < p.heads_per_block; ++i) {
      const int head = first_head() + i;
      if (i % p.heads_per_k == 0) {
        load_keys(shared.k, shared.k_ring, k_place, m.k, head / p.heads_per_k);
      }
      if (i % p.heads_per_v == 0) {
        load_keys(shared.v, shared.v_ring, v_place, m.v, head / p.heads_per_v);
      }
    }
  }

  template <class Visit>
  DLATTN_DEVICE void for_each_tile(Visit visit) {
    const Interval tiles = query_tiles();
    for (int head = first_head(); head < first_head() + p.heads_per_block; ++head) {
      for (int tile = tiles.first; tile < tiles.last; ++tile) visit(head, tile);
    }
  }

  DLATTN_DEVICE void load_queries() {
    constexpr uint32 stats_bytes = sizeof(shared.row_stats[0]);
    Place<stages> place;
    for_each_tile([&](int head, int tile) {
      fill(shared.q_ring, place, QTile::bytes + stats_bytes, [&](int stage, uint64& full) {
        shared.q[stage].load(m.q, full, tile * tile_q, head, work.batch);
        bulk_load(shared_address(shared.row_stats[stage]),
                  Shapes::row_stats(p, work.batch, head, tile), stats_bytes, full);
      });
    });
  }

  DLATTN_DEVICE void load_gradients() {
    Place<stages> place;
    for_each_tile([&](int head, int tile) {
      fill(shared.do_ring, place, DOTile::bytes, [&](int stage, uint64& full) {
        shared.dO[stage].load(m.dO, full, tile * tile_q, head, work.batch);
      });
    });
  }

  DLATTN_DEVICE void produce() {
    switch (warp_index()) {
      case 0:
        return load_keys_and_values();
      case 1:
        return load_queries();
      case 2:
        return load_gradients();
    }
  }

  // ---- Consumer ----

  // What a consumer carries from tile to tile.
  struct State {
    DK dK;
    DV dV;
    Place<1> k, v;
    Place<stages> tile;             // of q and of dO
    Place<ds_stages> stored, read;  // of dS
    int head, tile_of_dq;           // of the dS to be read
    bool pending = false;           // there is one
  };

  // Of this consumer among the keys. Known to be uniform, and computed where it is needed:
  // descriptors are not worth registers.
  DLATTN_DEVICE int first_own_row() const { return 64 * uniform(opaque(warpgroup)); }

  // Starts this consumer's columns of dQ = dS K.
  DLATTN_DEVICE void start_dq(DQ& dQ, int ds_stage) {
    constexpr int columns = dim_qk / 2;
    auto& d = reinterpret_cast<float (&)[columns / 2]>(dQ.at);
    const int first = first_own_row() * columns / 64;
    const int offset = first / 64 * KTile::slab_bytes + first % 64 * 2;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_k / 16; ++k) {
      WgmmaShape<columns>::template shared_shared<T, 1>(d, shared.dS[ds_stage].along_columns(0, k),
                                                        shared.k.along_rows(k) + (offset >> 4),
                                                        k > 0);
    }
    wgmma_commit();
  }

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zeros do. Every consumer clears for itself.
  template <class Tile>
  DLATTN_DEVICE void clear_rows(Tile& tile, int first) {
    if (first >= Tile::rows) return;
    tile.clear_rows(first, opaque(threadIdx.x % 128), 128);
    fence_proxy_async();
    named_barrier_sync(rows_cleared + warpgroup, 128);
  }

  DLATTN_DEVICE int first_key() const { return keys.first + 16 * (warp_index() - 4); }

  DLATTN_DEVICE Position position(int head, int tile, int n, int i) const {
    return {work.batch, head, tile * tile_q + Scores::column(n, i),
            first_key() + Scores::row(0, i)};
  }

  // Turns raw scores into probabilities.
  DLATTN_DEVICE void exponentiate(Scores& probability, const Scores& raw, const float* s_stats,
                                  int head, int tile, const ScoreValues& values) {
    const float log2_factor = Problem::Score::factor(values) * log2_e;
    probability.for_each([&](float& value, int, int n, int i) {
      const float score =
          Problem::Score::apply(raw.at[0][n][i], position(head, tile, n, i), values);
      value = exp2_approx(score * log2_factor - s_stats[Scores::column(n, i)]);
    });
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, length.q)};
    if (Problem::Mask::full_keys(queries, length, p).contains({keys.first, keys.first + tile_k})) {
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int key = first_key() + Scores::row(0, i);
      const uint32 kept = kept_elements(Problem::Mask::queries({key, key + 1}, length, p),
                                        tile * tile_q + Scores::column(0, 0));
#pragma unroll
      for (int e = 0; e < tile_q / 4; ++e) {
        if ((kept >> e & 1) == 0) probability.at[0][e / 2][i + e % 2] = 0.f;
      }
    }
  }

  // Transposed, queries by keys.
  DLATTN_DEVICE void store_ds(const Rounded& dS, int ds_stage) {
    const int lane = opaque(threadIdx.x % 32);
    const int unit = 2 * (warp_index() - 4) + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) {
      const auto& r = dS.at[0][k];
      stmatrix_x4_transposed(
          shared.dS[ds_stage].unit_address(16 * k + lane / 16 * 8 + lane % 8, unit), r[0], r[1],
          r[2], r[3]);
    }
    fence_proxy_async();
  }

  DLATTN_DEVICE void add_dq(const DQ& dQ, int head, int tile) {
    float* g_sum = Shapes::dq_accum(p, work.batch, head, tile);
#pragma unroll
    for (int n = 0; n < dim_qk / 16; ++n) {
      reduce_add_x4(g_sum + Shapes::dq_offset(0, n, 0, warp_index() - 4), Shapes::dq_stride,
                    dQ.at[0][n]);
    }
  }

  // One query tile of one head.
  DLATTN_DEVICE void step(State& state, int head, int tile, const ScoreValues& values) {
    const int stage = state.tile.stage;
    QTile& s_q = shared.q[stage];
    DOTile& s_do = shared.dO[stage];
    const float* s_stats = shared.row_stats[stage];
    const int rows = p.seq_len_q.data == nullptr ? tile_q : length.q - tile * tile_q;

    Scores raw, dP;
    mbarrier_wait(shared.q_ring.full[stage], state.tile.parity);
    clear_rows(s_q, rows);
    start_product(raw, shared.k, first_own_row(), s_q);
    mbarrier_wait(shared.do_ring.full[stage], state.tile.parity);
    clear_rows(s_do, rows);
    start_product(dP, shared.v, first_own_row(), s_do);
    wgmma_wait<1>();
    tie(raw);
    Scores probability;
    exponentiate(probability, raw, s_stats, head, tile, values);
    wgmma_wait<0>();
    tie(dP);
    dP.for_each([&](float& value, int, int n, int i) {
      value = Problem::Score::backward(
          probability.at[0][n][i] * (value - s_stats[tile_q + Scores::column(n, i)]),
          raw.at[0][n][i], position(head, tile, n, i), values);
    });
    const Rounded rounded_p(probability), rounded_ds(dP);
    mbarrier_wait(shared.ds_ring.empty[state.stored.stage], state.stored.parity ^ 1);
    store_ds(rounded_ds, state.stored.stage);
    __syncwarp();  // an arrival speaks for the writes of its own lane
    release(shared.ds_ring.full[state.stored.stage]);
    state.stored.advance();
    start_accumulation(state.dV, rounded_p, s_do);
    if (!Tiling::late_dq) expect_dq(state, head, tile);
    DQ dQ;
    const bool due = state.pending;
    // Without a tile before, of whatever is there, which nobody looks at: a branch around the products
    // costs registers.
    if (due) await_ds(state);
    start_dq(dQ, state.read.stage);
    start_accumulation(state.dK, rounded_ds, s_q);
    wgmma_wait<2>();
    tie(state.dV);
    release(shared.do_ring.empty[stage]);
    wgmma_wait<1>();
    tie(dQ);
    if (due) end_dq(state, dQ);
    if (Tiling::late_dq) expect_dq(state, head, tile);
    wgmma_wait<0>();
    tie(state.dK);
    release(shared.q_ring.empty[stage]);
    state.tile.advance();
  }

  DLATTN_DEVICE void expect_dq(State& state, int head, int tile) {
    state.head = head;
    state.tile_of_dq = tile;
    state.pending = true;
  }
  DLATTN_DEVICE void await_ds(State& state) {
    mbarrier_wait(shared.ds_ring.full[state.read.stage], state.read.parity);
  }
  DLATTN_DEVICE void end_dq(State& state, const DQ& dQ) {
    release(shared.ds_ring.empty[state.read.stage]);
    state.read.advance();
    add_dq(dQ, state.head, state.tile_of_dq);
    state.pending = false;
  }
  // The last one, which no step follows.
  DLATTN_DEVICE void finish_dq(State& state) {
    if (!state.pending) return;
    DQ dQ;
    await_ds(state);
    start_dq(dQ, state.read.stage);
    wgmma_wait<0>();
    tie(dQ);
    end_dq(state, dQ);
  }

  // Through the tile that held the keys or values, which nobody needs any more.
  template <int n_tiles, class Tile>
  DLATTN_DEVICE void store(Accumulator<1, n_tiles>& gradient, Tile& tile, const TensorMap& map,
                           int head, float factor) {
    named_barrier_sync(keys_read, 128 * consumers);
    const int lane = opaque(threadIdx.x % 32);
    const int row = 16 * (warp_index() - 4) + lane % 16;
    gradient.for_each([&](float& value, int, int, int) { value *= factor; });
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      const RegisterLeft<T, 1, 1> packed(reinterpret_cast<Accumulator<1, 2>&>(gradient.at[0][n]));
      stmatrix_x4(tile.unit_address(row, n + lane / 16), packed.at[0][0][0], packed.at[0][0][1],
                  packed.at[0][0][2], packed.at[0][0][3]);
    }
    fence_proxy_async();
    named_barrier_sync(rows_staged + warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int slab = 0; slab < Tile::slabs; ++slab) {
        tma_store_4d(map, tile.address() + slab * Tile::slab_bytes + warpgroup * 64 * 128,
                     slab * 64, keys.first + 64 * warpgroup, head, work.batch);
      }
      tma_commit();
      tma_wait_read<0>();
    }
    __syncwarp();
    gradient.clear();
  }

  // All query heads of the block; dK and dV are stored when the last head that shares them is done.
  DLATTN_DEVICE void consume() {
    const ScoreValues values(p);
    const Interval tiles = query_tiles();
    const int existing = most(keys.last - keys.first, 0);
    State state;
    state.dK.clear();
    state.dV.clear();
    for (int i = 0; i < p.heads_per_block; ++i) {
      const int head = first_head() + i;
      if (i % p.heads_per_k == 0) {
        mbarrier_wait(shared.k_ring.full[0], state.k.parity);
        clear_rows(shared.k, existing);
        state.k.advance();
      }
      if (i % p.heads_per_v == 0) {
        mbarrier_wait(shared.v_ring.full[0], state.v.parity);
        clear_rows(shared.v, existing);
        state.v.advance();
      }
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) step(state, head, tile, values);
      if ((i + 1) % p.heads_per_k == 0) finish_dq(state);  // reads k for the last time
      if ((i + 1) % p.heads_per_k == 0) {
        store(state.dK, shared.k, m.dK, head / p.heads_per_k,
              Problem::Score::gradient_factor(values));
        release(shared.k_ring.empty[0]);
      }
      if ((i + 1) % p.heads_per_v == 0) {
        store(state.dV, shared.v, m.dV, head / p.heads_per_v, 1.f);
        release(shared.v_ring.empty[0]);
      }
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_sm90(const MappedBwdParams& params) {
  using Kernel = BwdSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  const Params& p = params.p;
  Kernel kernel(params, shared,
                first_first(blockIdx.x, ceil_div(p.seq_kv, Tiling::tile_k),
                            p.heads_q / p.heads_per_block, p));
  kernel.init();
  if (warp_index() / 4 == 0) {
    give_registers<Kernel::producer_registers>();
    kernel.produce();
  } else {
    take_registers<Kernel::consumer_registers>();
    kernel.consume();
  }
}

}  // namespace dlattn
