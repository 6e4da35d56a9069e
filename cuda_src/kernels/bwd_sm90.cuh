// Attention backward for Hopper: wgmma, TMA, warp specialisation.
//
// A block owns 128 keys, 64 for each of two warpgroups of key workers, and walks the query tiles of
// every query head that shares them, so that dK and dV stay in registers across a whole group.
// Scores are transposed, keys by queries: probabilities and dS are then left operands in registers of
//   dV += P^T dO, dK += dS^T Q
// and only dS passes through shared memory, to a third warpgroup, which loads all tiles and computes
//   dQ = dS K
// summed over key tiles in global memory, in accumulator order (bwd_dq.cuh). A reduction holds its
// registers until memory has taken it: this warpgroup has nothing else to do.
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
  TensorMap q, k, v, dO, dK, dV;  // boxes: tile_q, 128, 128, tile_q, 64 and 64 rows of 64 columns
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
  static constexpr int key_workers = 2, stages = Tiling::stages;
  static constexpr int query_registers = Tiling::query_registers;
  static constexpr int key_registers = (504 - query_registers) / 2;  // the block has 3 x 168
  static_assert(key_registers % 8 == 0 && query_registers % 8 == 0);

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using DOTile = SlabTile<T, tile_q, dim_v>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using DSTile = SlabTile<T, tile_q, tile_k>;
  using Scores = Accumulator<1, tile_q / 8>;  // keys by queries
  using Rounded = RegisterLeft<T, 1, tile_q / 16>;
  using DK = Accumulator<1, dim_qk / 8>;
  using DV = Accumulator<1, dim_v / 8>;
  using DQ = Accumulator<1, dim_qk / 8>;  // of 64 queries
  static constexpr int pieces = tile_q / 64;

  // A query tile of a head, as the walk over heads that share keys and values meets it.
  struct alignas(16) Step {
    int head, tile;
    int row_tile;       // its number among the query tiles of all heads
    bool last, masked;  // of the walk; some of its scores do not exist
  };

  // The next step to be loaded, of q or of dO; counted from the first one of the block.
  struct alignas(16) Loading {
    int head, tile;
    int heads_left;  // of the walk
    uint32 landings;
  };

  struct SharedMemory {
    KTile k[1];
    VTile v[1];
    QTile q[stages];
    DOTile dO[stages];
    DSTile dS[stages];
    float row_stats[stages][2 * tile_q];  // log-sum-exps in log2 units, -deltas; they come with q
    Step steps[stages];                   // what is in q
    Loading loading[2];                   // for want of registers
    Ring<1> k_ring, v_ring;
    Ring<stages> q_ring, do_ring;
    Ring<stages> ds_ring;  // from the key workers to the query worker
    uint64 landed[4];      // what warp i is to clear
  };

  // Named barriers, by event.
  enum Barrier {
    keys_read = 1,
    values_read,
    rows_staged,  // + warpgroup
  };

  const MappedBwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const WorkItem work;
  const Lengths length;
  const Interval keys;   // of this tile that exist
  const Interval tiles;  // of queries that attend to them
  const int warpgroup;   // among the key workers

  DLATTN_DEVICE BwdSm90(const MappedBwdParams& params, SharedMemory& shared_memory,
                        WorkItem work_item)
      : m(params),
        p(params.p),
        shared(shared_memory),
        work(work_item),
        length(p, work.batch),
        keys{work.tile * tile_k, least((work.tile + 1) * tile_k, length.kv)},
        tiles(query_tiles()),
        warpgroup(warp_index() / 4 - 1) {}

  DLATTN_DEVICE Interval query_tiles() const {
    const Interval queries = Problem::Mask::queries(keys, length, p);
    if (keys.empty() || queries.empty()) return {0, 0};
    return {queries.first / tile_q, ceil_div(queries.last, tile_q)};
  }

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      shared.k_ring.init(4 * key_workers);
      shared.v_ring.init(4 * key_workers);
      shared.q_ring.init(4 * key_workers + 4);  // the query worker reads steps
      shared.do_ring.init(4 * key_workers);
      shared.ds_ring.init(4, 4 * key_workers);
#pragma unroll
      for (uint64& landed : shared.landed) mbarrier_init(landed, 1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  DLATTN_DEVICE int first_head() const { return work.head * p.heads_per_block; }

  // Heads that share their keys and their values.
  DLATTN_DEVICE int heads_per_walk() const {
    return p.heads_per_k == p.heads_per_v ? p.heads_per_k : 1;
  }

  // ---- Query worker: dQ; and all loads, a warp each for q, dO, keys and values ----

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zeros do. A tile with such rows is full once they are cleared.
  template <int ring_stages, class Tile, class Start>
  DLATTN_DEVICE void fill_rows(Ring<ring_stages>& ring, Place<ring_stages>& place,
                               Tile (&tile)[ring_stages], int rows, uint64& landed,
                               uint32& landings, uint32 bytes, Start start) {
    if (rows >= Tile::rows) return fill(ring, place, bytes, start);
    mbarrier_wait(ring.empty[place.stage], place.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect(landed, bytes);
      start(place.stage, landed);
    }
    mbarrier_wait(landed, landings);
    landings ^= 1;
    tile[place.stage].clear_rows(rows, threadIdx.x % 32, 32);
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full[place.stage]);
    place.advance();
  }

  // The keys or values of the head of this number in the block.
  template <class Tile>
  DLATTN_DEVICE void load_keys(Tile (&tile)[1], Ring<1>& ring, uint64& landed, int number,
                               const TensorMap& map, int heads_per_key) {
    Place<1> place{0, uint32(number % 2)};
    uint32 landings = number % 2;
    fill_rows(ring, place, tile, most(keys.last - keys.first, 0), landed, landings, Tile::bytes,
              [&](int, uint64& full) {
                tile[0].load(map, full, keys.first, first_head() / heads_per_key + number,
                             work.batch);
              });
  }

  DLATTN_DEVICE int existing_rows(int tile) const {
    return p.seq_len_q.data == nullptr ? tile_q : length.q - tile * tile_q;
  }

  DLATTN_DEVICE void load_queries(Loading& at, Place<stages> place, int head, int tile) {
    constexpr uint32 stats_bytes = sizeof(shared.row_stats[0]);
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, length.q)};
    const bool full =
        Problem::Mask::full_keys(queries, length, p).contains({keys.first, keys.first + tile_k});
    const Step step{head, tile, Shapes::row_tile(p, work.batch, head, tile),
                    at.heads_left == 1 && tile == tiles.last - 1, !full};
    mbarrier_wait(shared.q_ring.empty[place.stage], place.parity ^ 1);
    if (threadIdx.x % 32 == 0) shared.steps[place.stage] = step;
    fill_rows(shared.q_ring, place, shared.q, existing_rows(tile), shared.landed[0], at.landings,
              QTile::bytes + stats_bytes, [&](int stage, uint64& full) {
                shared.q[stage].load(m.q, full, tile * tile_q, head, work.batch);
                bulk_load(shared_address(shared.row_stats[stage]),
                          Shapes::row_stats(p, step.row_tile), stats_bytes, full);
              });
  }

  DLATTN_DEVICE void load_gradients(Loading& at, Place<stages> place, int head, int tile) {
    fill_rows(shared.do_ring, place, shared.dO, existing_rows(tile), shared.landed[1], at.landings,
              DOTile::bytes, [&](int stage, uint64& full) {
                shared.dO[stage].load(m.dO, full, tile * tile_q, head, work.batch);
              });
  }

  // Orders the tiles of the next step that has none yet, if there is one.
  DLATTN_DEVICE void load_step(Place<stages> place) {
    const int warp = warp_index();
    if (warp >= 2) return;
    Loading at = shared.loading[warp];
    at.head = uniform(at.head);
    at.tile = uniform(at.tile);
    if (at.head == p.heads_per_block) return;
    const int head = first_head() + at.head, tile = tiles.first + at.tile;
    if (warp == 0) {
      load_queries(at, place, head, tile);
    } else {
      load_gradients(at, place, head, tile);
    }
    if (++at.tile == tiles.last - tiles.first) {
      at.tile = 0;
      ++at.head;
      if (--at.heads_left == 0) at.heads_left = heads_per_walk();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.loading[warp] = at;
    __syncwarp();
  }

  // Starts 64 rows of dQ = dS K.
  DLATTN_DEVICE void start_dq(DQ& dQ, int first_row, int stage) {
    auto& d = reinterpret_cast<float (&)[dim_qk / 2]>(dQ.at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_k / 16; ++k) {
      WgmmaShape<dim_qk>::template shared_shared<T, 1>(
          d, shared.dS[stage].along_columns(first_row, k), shared.k[0].along_rows(k), k > 0);
    }
    wgmma_commit();
  }

  DLATTN_DEVICE void add_dq(const DQ& dQ, int first_row, int row_tile) {
    using Grid = typename Shapes::DQGrid;
    float* g_sum = Shapes::dq_accum(p, row_tile) + Shapes::dq_offset(0, 0, 0, warp_index());
#pragma unroll
    for (int n = 0; n < dim_qk / 8; ++n) {
      const int warp = first_row / 16 + 4 * (n / Grid::n_tiles);
      reduce_add_x4(g_sum + 128 * (warp * Grid::n_tiles + n % Grid::n_tiles), Shapes::dq_stride,
                    dQ.at[0][n]);
    }
  }

  DLATTN_DEVICE void work_on_queries() {
    Place<stages> place;
    if (threadIdx.x < 64) shared.loading[threadIdx.x / 32] = {0, 0, heads_per_walk(), 0};
    __syncwarp();
    for (int i = 0; i < p.heads_per_block; i += heads_per_walk()) {
      if (warp_index() == 2 && i % p.heads_per_k == 0) {
        load_keys(shared.k, shared.k_ring, shared.landed[2], i / p.heads_per_k, m.k, p.heads_per_k);
      }
      if (warp_index() == 3 && i % p.heads_per_v == 0) {
        load_keys(shared.v, shared.v_ring, shared.landed[3], i / p.heads_per_v, m.v, p.heads_per_v);
      }
      if (!tiles.empty()) {
        if (i == 0) {
#pragma unroll 1
          for (int stage = 0; stage < stages; ++stage) load_step({stage, 0});
        }
        mbarrier_wait(shared.k_ring.full[0], i / p.heads_per_k % 2);
        bool last;
#pragma unroll 1
        do {
          const int stage = place.stage;
          mbarrier_wait(shared.ds_ring.full[stage], place.parity);
          last = uniform(shared.steps[stage].last);
          const int row_tile = uniform(shared.steps[stage].row_tile);
          release(shared.q_ring.empty[stage]);
          DQ dQ[pieces];
#pragma unroll
          for (int piece = 0; piece < pieces; ++piece) start_dq(dQ[piece], 64 * piece, stage);
          if constexpr (pieces == 2) {
            wgmma_wait<1>();
            tie(dQ[0]);
            add_dq(dQ[0], 0, row_tile);
          }
          wgmma_wait<0>();
          tie(dQ[pieces - 1]);
          release(shared.ds_ring.empty[stage]);
          add_dq(dQ[pieces - 1], 64 * (pieces - 1), row_tile);
          load_step({stage, place.parity ^ 1});
          place.advance();
        } while (!last);
      }
      if ((i + heads_per_walk()) % p.heads_per_k == 0) {
        named_barrier_arrive(keys_read, 128 * (key_workers + 1));
      }
    }
  }

  // ---- Key workers: dK and dV ----

  // Of this warpgroup among the keys. Known to be uniform, and computed where it is needed:
  // descriptors are not worth registers.
  DLATTN_DEVICE int first_own_row() const { return 64 * uniform(opaque(warpgroup)); }

  DLATTN_DEVICE int first_key() const { return keys.first + 16 * (warp_index() - 4); }

  // Turns raw scores into probabilities.
  DLATTN_DEVICE void exponentiate(Scores& probability, const Scores& raw, int stage,
                                  const ScoreValues& values) {
    const float* s_log_sum_exp = shared.row_stats[stage];
    const float log2_factor = Problem::Score::factor(values) * log2_e;
    const Step step = shared.steps[stage];
    probability.for_each([&](float& value, int, int n, int i) {
      const float score = Problem::Score::apply(raw.at[0][n][i], position(step, n, i), values);
      value = exp2_approx(score * log2_factor - s_log_sum_exp[Scores::column(n, i)]);
    });
    if (step.masked) mask(probability, step.tile * tile_q);
  }

  DLATTN_DEVICE void mask(Scores& probability, int first_query) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int key = first_key() + Scores::row(0, i);
      const uint32 kept = kept_elements(Problem::Mask::queries({key, key + 1}, length, p),
                                        first_query + Scores::column(0, 0));
#pragma unroll
      for (int e = 0; e < tile_q / 4; ++e) {
        if ((kept >> e & 1) == 0) probability.at[0][e / 2][i + e % 2] = 0.f;
      }
    }
  }

  DLATTN_DEVICE Position position(const Step& step, int n, int i) const {
    return {work.batch, step.head, step.tile * tile_q + Scores::column(n, i),
            first_key() + Scores::row(0, i)};
  }

  // Transposed, queries by keys.
  DLATTN_DEVICE void store_ds(const Rounded& dS, int stage) {
    const int lane = opaque(threadIdx.x % 32);
    const int unit = 2 * (warp_index() - 4) + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) {
      const auto& r = dS.at[0][k];
      stmatrix_x4_transposed(shared.dS[stage].unit_address(16 * k + lane / 16 * 8 + lane % 8, unit),
                             r[0], r[1], r[2], r[3]);
    }
  }

  // One query tile of one head. False after the last of a walk.
  DLATTN_DEVICE bool step(DK& dK, DV& dV, const Place<stages>& place, const ScoreValues& values) {
    const int stage = place.stage;
    const float* s_minus_delta = shared.row_stats[stage] + tile_q;
    mbarrier_wait(shared.q_ring.full[stage], place.parity);
    Scores raw;
    start_product(raw, shared.k[0], first_own_row(), shared.q[stage]);
    wgmma_wait<0>();
    tie(raw);
    Scores probability;
    exponentiate(probability, raw, stage, values);
    // dP only now: two products in flight take 16 registers more, which the query worker needs.
    mbarrier_wait(shared.do_ring.full[stage], place.parity);
    Scores dP;
    dP.for_each(
        [&](float& value, int, int n, int i) { value = s_minus_delta[Scores::column(n, i)]; });
    start_product<true>(dP, shared.v[0], first_own_row(), shared.dO[stage]);
    wgmma_wait<0>();
    tie(dP);
    dP.for_each([&](float& value, int, int n, int i) {
      value = Problem::Score::backward(probability.at[0][n][i] * value, raw.at[0][n][i],
                                       position(shared.steps[stage], n, i), values);
    });
    const Rounded rounded_p(probability), rounded_ds(dP);
    mbarrier_wait(shared.ds_ring.empty[stage], place.parity ^ 1);
    store_ds(rounded_ds, stage);
    start_accumulation(dV, rounded_p, shared.dO[stage]);
    fence_proxy_async();
    __syncwarp();  // an arrival speaks for the writes of its own lane
    release(shared.ds_ring.full[stage]);
    start_accumulation(dK, rounded_ds, shared.q[stage]);
    wgmma_wait<1>();
    tie(dV);
    release(shared.do_ring.empty[stage]);
    wgmma_wait<0>();
    tie(dK);
    const bool more = !shared.steps[stage].last;
    __syncwarp();
    release(shared.q_ring.empty[stage]);
    return more;
  }

  // Through the tile that held the keys or values, which nobody needs any more.
  template <int n_tiles, class Tile>
  DLATTN_DEVICE void store(Accumulator<1, n_tiles>& gradient, Tile& tile, const TensorMap& map,
                           int head, float factor) {
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
  DLATTN_DEVICE void work_on_keys() {
    const ScoreValues values(p);
    Place<stages> place;
    DK dK;
    DV dV;
    dK.clear();
    dV.clear();
    for (int i = 0; i < p.heads_per_block; i += heads_per_walk()) {
      const int head = first_head() + i, last = i + heads_per_walk();
      mbarrier_wait(shared.k_ring.full[0], i / p.heads_per_k % 2);
      mbarrier_wait(shared.v_ring.full[0], i / p.heads_per_v % 2);
      bool more = !tiles.empty();
#pragma unroll 1
      while (more) {
        more = step(dK, dV, place, values);
        place.advance();
      }
      if (last % p.heads_per_k == 0) {
        named_barrier_sync(keys_read, 128 * (key_workers + 1));
        store(dK, shared.k[0], m.dK, head / p.heads_per_k, Problem::Score::gradient_factor(values));
        release(shared.k_ring.empty[0]);
      }
      if (last % p.heads_per_v == 0) {
        named_barrier_sync(values_read, 128 * key_workers);
        store(dV, shared.v[0], m.dV, head / p.heads_per_v, 1.f);
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
    give_registers<Kernel::query_registers>();
    kernel.work_on_queries();
  } else {
    take_registers<Kernel::key_registers>();
    kernel.work_on_keys();
  }
}

}  // namespace dlattn
