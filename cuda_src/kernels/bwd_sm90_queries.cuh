// What the warpgroups of a Hopper backward block share, and the query worker: the warpgroup that
// computes dQ and orders all loads.
#pragma once

#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "kernels/bwd_tile.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedBwdParams {
  TensorMap q, k, v, dO, dK, dV;  // boxes: tile_q, tile_k, tile_k, tile_q, 64 and 64 rows
  Params p;
};

template <class Problem, class Tiling>
struct BwdSm90Queries : BwdShapes<Problem, Tiling> {
  using Shapes = BwdShapes<Problem, Tiling>;
  using T = typename Shapes::T;
  using Shapes::dim_qk;
  using Shapes::dim_v;
  using Shapes::tile_k;
  using Shapes::tile_q;
  static constexpr bool by_product = Tiling::by_product;
  static constexpr int stages = Tiling::stages;
  // Warps that work on keys: on dK and dV, and those of them that make dS.
  static constexpr int key_warps = 8, ds_warps = by_product ? 4 : 8;
  static constexpr int query_registers = Tiling::query_registers;
  static constexpr int key_registers = (504 - query_registers) / 2;  // the block has 3 x 168
  static_assert(key_registers % 8 == 0 && query_registers % 8 == 0);

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using DOTile = SlabTile<T, tile_q, dim_v>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using DSTile = SlabTile<T, tile_q, tile_k>;
  static constexpr int dq_columns = Tiling::dq_columns;
  using DQ = Accumulator<1, dq_columns / 8>;  // a piece, 64 queries of it
  static_assert(dim_qk % dq_columns == 0);

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

  // What the worker on values sends to the worker on keys: 16 words a thread, at its own place.
  struct Weights {
    uint4 at[tile_k / 64][tile_q / 16][128];
  };
  struct Nothing {};

  struct SharedMemory {
    KTile k[1];
    VTile v[1];
    QTile q[stages];
    DOTile dO[stages];
    DSTile dS[stages];
    Either<by_product, Weights, Nothing> weights[stages];
    // Log-sum-exps in log2 units, then negative deltas; they come with q.
    alignas(16) float row_stats[stages][2 * tile_q];
    Step steps[stages];  // what is in q
    Loading loading[2];  // for want of registers
    Ring<1> k_ring, v_ring;
    Ring<stages> q_ring, do_ring;
    Ring<stages> ds_ring;                    // from the key workers to the query worker
    Ring<stages> weights_ring[tile_k / 64];  // between the key workers, of each 64 keys
    uint64 landed[4];                        // what warp i is to clear
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

  DLATTN_DEVICE BwdSm90Queries(const MappedBwdParams& params, SharedMemory& shared_memory,
                               WorkItem work_item)
      : m(params),
        p(params.p),
        shared(shared_memory),
        work(work_item),
        length(p, work.batch),
        keys{work.tile * tile_k, least((work.tile + 1) * tile_k, length.kv)},
        tiles(query_tiles()) {}

  DLATTN_DEVICE Interval query_tiles() const {
    const Interval queries = Problem::Mask::queries(keys, length, p);
    if (keys.empty() || queries.empty()) return {0, 0};
    return {queries.first / tile_q, ceil_div(queries.last, tile_q)};
  }

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      shared.k_ring.init(key_warps);
      shared.v_ring.init(key_warps);
      shared.q_ring.init(key_warps + 4);  // the query worker reads steps
      shared.do_ring.init(key_warps);
      shared.ds_ring.init(4, ds_warps);
#pragma unroll
      for (auto& ring : shared.weights_ring) ring.init(4, 4);
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

  // ---- Loads: a warp each for q, dO, keys and values ----

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zeros do. A tile with such rows is full once they are cleared.
  template <int ring_stages, class Tile, class Start>
  DLATTN_DEVICE void fill_rows(Ring<ring_stages>& ring, Place<ring_stages>& place,
                               Tile (&tile)[ring_stages], int rows, uint64& landed,
                               uint32& landings, uint32 bytes, Start start) {
    if (rows >= Tile::rows) return fill(ring, place, bytes, start);
    order(ring, place, landed, bytes, start);
    mbarrier_wait(landed, landings);
    landings ^= 1;
    tile[place.stage].clear_rows(rows, threadIdx.x % 32, 32);
    fence_proxy_async();
    __syncwarp();
    release(ring.full[place.stage]);
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
    // Before the arrival that publishes it, hence not where the copies start.
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

  // ---- dQ ----

  // Starts 64 rows of dQ = dS K, and dq_columns columns.
  DLATTN_DEVICE void start_dq(DQ& dQ, int first_row, int first_column, int stage) {
    auto& d = reinterpret_cast<float (&)[dq_columns / 2]>(dQ.at);
    const int first_slab = first_column / 64;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_k / 16; ++k) {
      WgmmaShape<dq_columns>::template shared_shared<T, 1>(
          d, shared.dS[stage].along_columns(first_row, k),
          shared.k[0].along_rows(k) + (first_slab * KTile::slab_bytes >> 4), k > 0);
    }
    wgmma_commit();
  }

  DLATTN_DEVICE void add_dq(const DQ& dQ, int first_row, int first_column, int row_tile) {
    using Grid = typename Shapes::DQGrid;
    float* g_sum = Shapes::dq_accum(p, row_tile) + Shapes::dq_offset(0, 0, 0, warp_index());
#pragma unroll
    for (int n = 0; n < dq_columns / 8; ++n) {
      const int column = first_column / 8 + n;
      const int warp = first_row / 16 + 4 * (column / Grid::n_tiles);
      reduce_add_x4(g_sum + 128 * (warp * Grid::n_tiles + column % Grid::n_tiles),
                    Shapes::dq_stride, dQ.at[0][n]);
    }
  }

  // The dQ of a step, piece by piece.
  DLATTN_DEVICE void step_of_dq(int stage, int row_tile) {
#pragma unroll
    for (int row = 0; row < tile_q; row += 64) {
#pragma unroll
      for (int column = 0; column < dim_qk; column += dq_columns) {
        DQ dQ;
        start_dq(dQ, row, column, stage);
        wgmma_wait<0>();
        tie(dQ);
        const bool last = row + 64 == tile_q && column + dq_columns == dim_qk;
        if (last) release(shared.ds_ring.empty[stage]);
        add_dq(dQ, row, column, row_tile);
      }
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
      if (i == 0 && !tiles.empty()) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) load_step({stage, 0});
      }
      // Even without tiles: or it would arrive at keys_read for these keys before the last ones' turn.
      mbarrier_wait(shared.k_ring.full[0], i / p.heads_per_k % 2);
      if (!tiles.empty()) {
        bool last;
#pragma unroll 1
        do {
          const int stage = place.stage;
          mbarrier_wait(shared.ds_ring.full[stage], place.parity);
          last = uniform(shared.steps[stage].last);
          const int row_tile = uniform(shared.steps[stage].row_tile);
          release(shared.q_ring.empty[stage]);
          step_of_dq(stage, row_tile);
          load_step({stage, place.parity ^ 1});
          place.advance();
        } while (!last);
      }
      if ((i + heads_per_walk()) % p.heads_per_k == 0) {
        named_barrier_arrive(keys_read, 128 * 3);
      }
    }
  }
};

}  // namespace dlattn
