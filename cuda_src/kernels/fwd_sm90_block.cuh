// What the warpgroups of a Hopper forward block share.
#pragma once

#include "attn/mask.cuh"
#include "attn/paged_boxes.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "attn/walk.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"

namespace dlattn {

template <int consumers_, int tile_k_, int stages_, int q_stages_, int o_slabs_, bool ping_pong_,
          bool exponentials_first_>
struct Sm90FwdTiling {
  static constexpr int consumers = consumers_;  // warpgroups, of 64 query rows each
  static constexpr int tile_q = 64 * consumers, tile_k = tile_k_;
  static constexpr int stages = stages_;         // key tiles, and value tiles, in shared memory
  static constexpr int q_stages = q_stages_;     // query tiles in shared memory
  static constexpr int o_slabs = o_slabs_;       // 64-column slabs of o staged by each consumer
  static constexpr bool ping_pong = ping_pong_;  // consumers take turns at the tensor cores
  // Of one tile; then the wait for the output of the tile before. Or the other way round.
  static constexpr bool exponentials_first = exponentials_first_;
};

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedFwdParams {
  // Boxes: tile_q, tile_k, tile_k and 64 rows of 64 columns; of pages, fewer (attn/paged_boxes.cuh).
  TensorMap q, k, v, o;
  TensorMap bias;  // 64 rows; if it is staged
  Params p;
};

template <class Problem, class Tiling>
struct FwdSm90Block {
  using T = typename Problem::Element;
  using Score = typename Problem::Score;
  static constexpr int consumers = Tiling::consumers;
  static constexpr int stages = Tiling::stages, q_stages = Tiling::q_stages;
  static constexpr int o_slabs = Tiling::o_slabs;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, 16);
  static constexpr int dim_v = Problem::value_columns;  // head_dim_v, up to a width of wgmma
  static constexpr int producer_registers = consumers == 2 ? 40 : 32;
  static constexpr int consumer_registers = consumers == 2 ? 232 : 160;

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using OSlab = SlabTile<T, 64, 64>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using BiasTile = SlabTile<Either<Score::stages_bias, typename Score::BiasElement, T>, 64, tile_k>;
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
  static constexpr bool stages_bias = Score::stages_bias;
  struct Nothing {};

  // Query tiles handed out: one at work, the next being loaded, one more.
  static constexpr int item_stages = 3;

  struct SharedMemory {
    QTile q[q_stages];
    KTile k[stages];
    VTile v[stages];
    OSlab o[consumers][o_slabs];
    Either<stages_bias, BiasTile, Nothing> bias[consumers];
    int4 items[item_stages];  // tile, head, batch
    Ring<q_stages> q_ring;
    Ring<stages> k_ring, v_ring;
    Ring<item_stages> item_ring;
    Ring<1> bias_ring[consumers];
    uint64 nearly_loaded;  // the keys of an item
  };

  // Named barriers, by event; + warpgroup.
  enum Barrier { turn = 2, rows_free = 5, rows_staged = 8, values_cleared = 11 };

  // What a query tile means for both roles.
  struct Work {
    WorkItem item;
    Lengths length;
    Interval queries;  // that exist
    Interval full;     // keys that every query attends to
    int first_tile, last_tile;

    DLATTN_DEVICE Work(const Params& p, WorkItem work_item)
        : item(work_item),
          length(p, item.batch),
          queries{item.tile * tile_q, least((item.tile + 1) * tile_q, length.q)},
          full(Problem::Mask::full_keys(queries, length, p)) {
      const Interval keys = Problem::Mask::keys(queries, length, p);
      const bool none = queries.empty() || keys.empty();
      first_tile = none ? 0 : keys.first / tile_k;
      last_tile = none ? -1 : ceil_div(keys.last, tile_k) - 1;
      if constexpr (Tiles::skips) {
        last_tile = Tiles::last_keys(p, item, last_tile, first_tile);
        first_tile = Tiles::first_keys(p, item, first_tile, last_tile);
      }
    }
    DLATTN_DEVICE bool empty() const { return last_tile < first_tile; }
    DLATTN_DEVICE bool is_full(int tile) const {
      return full.contains({tile * tile_k, (tile + 1) * tile_k});
    }
  };

  const MappedFwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const int warpgroup;  // among the consumers

  DLATTN_DEVICE FwdSm90Block(const MappedFwdParams& params, SharedMemory& shared_memory)
      : m(params), p(params.p), shared(shared_memory), warpgroup(warp_index() / 4 - 1) {}

  // Of this warp, in the tile.
  static DLATTN_DEVICE int first_row() { return 16 * (warp_index() - 4); }

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      tma_prefetch(m.q);
      tma_prefetch(m.k);
      tma_prefetch(m.v);
      tma_prefetch(m.o);
      shared.q_ring.init(4 * consumers);
      shared.k_ring.init(4 * consumers);
      shared.v_ring.init(4 * consumers);
      shared.item_ring.init(3 + 4 * consumers);
      for (Ring<1>& ring : shared.bias_ring) ring.init(4);
      mbarrier_init(shared.nearly_loaded, 1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // The query tile in a buffer of the ring; after the last one, a negative tile. Read anew whenever
  // it is needed, which costs less than its registers do.
  DLATTN_DEVICE WorkItem item(int stage) const {
    const int4 row = shared.items[stage];
    return {uniform(row.x), uniform(row.y), uniform(row.z)};
  }
  DLATTN_DEVICE WorkItem await_item(const Place<item_stages>& place) {
    mbarrier_wait(shared.item_ring.full[place.stage], place.parity);
    return item(place.stage);
  }

  // The key tile to visit after this one.
  template <class Item>
  DLATTN_DEVICE int tile_before(Item item, const Work& work, int tile) const {
    if constexpr (!Tiles::skips) return tile - 1;
    return Tiles::last_keys(p, item(), tile - 1, work.first_tile);
  }
};

}  // namespace dlattn
