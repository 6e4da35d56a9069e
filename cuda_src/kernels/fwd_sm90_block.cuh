// What the warpgroups of a Hopper forward block share.
#pragma once

#include "attn/key_parts.cuh"
#include "attn/mask.cuh"
#include "attn/paged_boxes.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/score_mask.cuh"
#include "attn/seqlen.cuh"
#include "attn/staged_bias.cuh"
#include "attn/walk.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"

namespace dlattn {

template <int consumers_, int tile_k_, int stages_, int q_stages_, bool ping_pong_,
          bool exponentials_first_, bool alternates_>
struct Sm90FwdTiling {
  static constexpr int consumers = consumers_;  // warpgroups, of 64 query rows each
  static constexpr int tile_q = 64 * consumers, tile_k = tile_k_;
  static constexpr int stages = stages_;         // key tiles, and value tiles, in shared memory
  static constexpr int q_stages = q_stages_;     // query tiles in shared memory
  static constexpr bool ping_pong = ping_pong_;  // consumers take turns at the tensor cores
  // Of one tile; then the wait for the output of the tile before. Or the other way round.
  static constexpr bool exponentials_first = exponentials_first_;
  static constexpr bool alternates = alternates_;  // items may visit their key tiles either way
  static constexpr bool shares_more = false;
};

// Blocks share the keys of query tiles under a mask that gives each its own, too, and may leave parts to a
// later kernel.
template <class Tiling>
struct SharesMore : Tiling {
  static constexpr bool shares_more = true;
};

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedFwdParams {
  // Boxes: rows of a head that a consumer has (64, unless it has several heads), tile_k, tile_k and
  // output_rows rows of 64 columns; of pages, fewer (attn/paged_boxes.cuh).
  TensorMap q, k, v, o;
  TensorMap bias;  // 64 rows, or one; if it is staged
  Params p;
};

template <class Problem, class Tiling>
struct FwdSm90Block {
  using T = typename Problem::Element;
  using Score = typename Problem::Score;
  static constexpr int consumers = Tiling::consumers;
  static constexpr int stages = Tiling::stages, q_stages = Tiling::q_stages;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, 16);
  static constexpr int dim_v = Problem::value_columns;  // head_dim_v, up to a width of wgmma
  static constexpr int producer_registers = consumers == 2 ? 40 : consumers == 3 ? 56 : 32;
  static constexpr int consumer_registers = consumers == 2 ? 232 : consumers == 3 ? 152 : 112;

  using QTile = SlabTile<T, 64, dim_qk>;  // of a consumer
  using OSlab = SlabTile<T, 64, 64>;
  static constexpr int o_slabs = Problem::output_slabs;  // in shared memory at a time
  static constexpr int output_rows = 16;                 // a warp's, which it stores by itself
  using Zeros = SlabTile<T, output_rows, 64>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using BiasTile = StagedTile<typename Score::StagedBias, 64, tile_k>;
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
  using Parts = KeyParts<4 * consumers, dim_v / 8>;
  static constexpr bool stages_bias = Score::stages_bias;
  struct Nothing {};

  // Query tiles handed out: one at work, the next being loaded, one more.
  static constexpr int item_stages = 3;

  // Whether every consumer visits the tiles that the block does: those of a block mask are found one
  // by one, and a bias comes with each.
  static constexpr bool visits_all = Tiles::skips || stages_bias;
  // Whether a consumer may have rows of several heads. Three have no registers for that beside elements of
  // a bias.
  static constexpr bool packs_heads = !visits_all && (consumers == 2 || !Score::reads_memory);

  // Whether blocks may share the keys of a query tile (dlattn/plans/schedule.py, or where the device alone
  // knows lengths kernels/fwd_sm90_division.cuh).
  static constexpr bool shares_bands = Tiling::shares_more && !Problem::Mask::same_keys;
  static constexpr bool shares_keys =
      Tiling::shares_more || (Problem::Mask::same_keys && !Problem::ragged);

  // A tile of fewer rows takes as long as one of all, because its last rows have as many keys. Under a
  // causal mask the first tile has fewer, then, for which there are the fewest keys: this is by how many
  // rows a sequence is short of whole tiles, in consumers' parts.
  static DLATTN_DEVICE int rows_missing(const Params& p, int length_q) {
    constexpr bool is_causal = Problem::Mask::bounded_right && !Tiles::skips;
    if constexpr (!is_causal || tile_q <= tile_k) return 0;
    const int parts = parts_of(p, length_q);
    return (tiles_of(p, length_q) * parts_per_tile(p) - parts) << log2_head_rows(p);
  }

  static_assert(!Tiling::alternates || !(Problem::ragged || Tiles::skips));

  // What a query tile means, for some of its rows or all.
  struct alignas(16) Work {
    WorkItem item;
    Lengths length;
    Interval queries;  // that exist
    Interval full;     // keys that every query attends to
    int first_tile, last_tile;
    int first_row;  // of the tile: before the first query where that has fewer
    int heads;      // that it is of, from the item's on

    DLATTN_DEVICE Work(const Params& p, WorkItem work_item, const Lengths& lengths, Interval rows,
                       int heads_of_work = 1)
        : item(work_item),
          length(lengths),
          queries{most(rows.first, 0), least(rows.last, length.q)},
          full(Problem::Mask::full_keys(queries, length, p)),
          first_row(rows.first),
          heads(heads_of_work) {
      const Interval keys = Problem::Mask::keys(queries, length, p);
      const bool none = queries.empty() || keys.empty();
      first_tile = none ? 0 : keys.first / tile_k;
      last_tile = none ? -1 : ceil_div(keys.last, tile_k) - 1;
    }
    // Of a tile, whose lengths are known.
    static DLATTN_DEVICE Work of(const Params& p, WorkItem item, const Lengths& lengths) {
      return {p, item, lengths};
    }
    // For the block.
    DLATTN_DEVICE Work(const Params& p, WorkItem item) : Work(p, item, Lengths(p, item.batch)) {
      if constexpr (Tiles::skips) {
        last_tile = Tiles::last_keys(p, item, last_tile, first_tile);
        first_tile = Tiles::first_keys(p, item, first_tile, last_tile);
      }
    }
    DLATTN_DEVICE bool empty() const { return last_tile < first_tile; }
    // The way through its key tiles, from one end to the other.
    DLATTN_DEVICE bool ascends() const { return Tiling::alternates && item.ascends; }
    DLATTN_DEVICE int step() const { return ascends() ? 1 : -1; }
    DLATTN_DEVICE int start() const { return ascends() ? first_tile : last_tile; }
    DLATTN_DEVICE int stop() const { return ascends() ? last_tile : first_tile; }
    // How many come after this one; negative beyond the last.
    DLATTN_DEVICE int left_after(int tile) const {
      return ascends() ? last_tile - tile : tile - first_tile;
    }
    DLATTN_DEVICE bool visits(int tile) const { return left_after(tile) >= 0; }
    DLATTN_DEVICE bool is_full(int tile) const {
      return full.contains({tile * tile_k, (tile + 1) * tile_k});
    }

   private:
    DLATTN_DEVICE Work(const Params& p, WorkItem item, const Lengths& lengths)
        : Work(p, item, lengths, item.tile * rows_per_tile(p) - rows_missing(p, lengths.q)) {}
    DLATTN_DEVICE Work(const Params& p, WorkItem item, const Lengths& lengths, int first)
        : Work(p, item, lengths, Interval{first, first + rows_per_tile(p)},
               heads_of_tile(p, item.head)) {}
  };

  // The 64 rows of a consumer, or 16 of a warp. A consumer may have those of several heads, or of one that
  // another consumer has as well.
  struct OwnRows {
    int head, first, heads = 1;
  };

  // For a consumer, whose rows may attend to fewer tiles of keys.
  struct alignas(16) OwnWork : Work {
    int unseen_before, unseen_after;  // tiles of keys that only others of the block attend to

    DLATTN_DEVICE OwnWork(const Params& p, const Work& all, OwnRows rows)
        : Work(p, all.item, all.length, {rows.first, rows.first + (1 << log2_head_rows(p))},
               rows.heads) {
      this->item.head = rows.head;
      // Of a part, or one that has no keys there would leave nothing to add.
      const bool part = shares_keys && (!shares_bands || all.item.parts != 0);
      if (visits_all || (part && !this->empty())) {
        this->first_tile = all.first_tile;
        this->last_tile = all.last_tile;
      }
      if (this->empty()) {
        unseen_before = all.last_tile - all.first_tile + 1;
        unseen_after = 0;
      } else {
        unseen_before = all.left_after(all.start()) - all.left_after(this->start());
        unseen_after = all.left_after(this->stop());
      }
    }
  };

  // What the scheduler tells of a query tile; after the last one, of a negative tile.
  struct Told {
    Work all;
    OwnWork own[consumers];
  };

  // A user's function masks some elements of a key tile; and where tiles are skipped, which comes after it.
  struct Visit {
    bool partial = false;
    int next = 0;
  };

  struct SharedMemory {
    QTile q[q_stages][consumers];
    KTile k[stages];
    VTile v[stages];
    OSlab o[consumers][o_slabs];
    Zeros zeros;  // what rows without keys, or beyond a length, are stored from
    Either<stages_bias, BiasTile, Nothing> bias[consumers];
    Told told[item_stages];
    Either<Tiles::skips, int, Nothing> visits[stages];  // of the key tile in a buffer: visit_from
    Ring<q_stages> q_ring[consumers];
    Ring<stages> k_ring, v_ring;
    Ring<item_stages> item_ring;
    Ring<1> bias_ring[consumers];
    uint64 nearly_loaded[item_stages];  // the keys of an item
    uint64 padded_values;  // a tile of v has landed, of which some rows are to be cleared
    int item_count;        // where blocks ask for items; the scheduler has no register for it
    int counts;  // this block has seen the mark beside the counter of items; not of a ragged problem
  };

  // Named barriers, by event; + warpgroup.
  enum Barrier { turn = 2 };

  const MappedFwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const int warpgroup;  // among the consumers

  DLATTN_DEVICE FwdSm90Block(const MappedFwdParams& params, SharedMemory& shared_memory)
      : m(params), p(params.p), shared(shared_memory), warpgroup(warp_index() / 4 - 1) {}

  // Heads whose keys are visited alike, at the most.
  static DLATTN_DEVICE int heads_per_tile(const Params& p) {
    return visits_all ? 1 : p.heads_per_block.number;
  }
  // Of a consumer's 64 rows, how many each of its heads has.
  static DLATTN_DEVICE int log2_head_rows(const Params& p) {
    return packs_heads ? p.log2_head_rows : 6;
  }
  // Queries are divided into parts, of a consumer each, and these into tiles.
  static DLATTN_DEVICE int parts_per_tile(const Params& p) {
    return visits_all ? consumers : p.parts_per_tile;
  }
  // Whether consumers have the same queries, of other heads each; else other queries, of the same heads.
  static DLATTN_DEVICE bool heads_apart(const Params& p) { return parts_per_tile(p) == 1; }
  static DLATTN_DEVICE int rows_per_tile(const Params& p) {
    return parts_per_tile(p) << log2_head_rows(p);
  }
  static DLATTN_DEVICE int parts_of(const Params& p, int queries) {
    const int log2_rows = log2_head_rows(p);
    return (queries + (1 << log2_rows) - 1) >> log2_rows;
  }
  static DLATTN_DEVICE int tiles_of(const Params& p, int queries) {
    const int parts = parts_of(p, queries);
    return heads_apart(p) ? parts : ceil_div(parts, consumers);
  }
  // From this one on: those that share keys may not fill their last tile.
  static DLATTN_DEVICE int heads_of_tile(const Params& p, int head) {
    if (heads_per_tile(p) == 1) return 1;
    const Divisor& together = p.tile_heads.together;
    return least(heads_per_tile(p), together.number - together.rest(head));
  }
  // The first head of the tiles of this number, of a batch entry.
  static DLATTN_DEVICE int first_head(const Params& p, int number) {
    const Divisor& of_keys = p.tile_heads.of_keys;
    const int together = of_keys.quotient(number), tile = number - together * of_keys.number;
    return together * p.tile_heads.together.number + tile * heads_per_tile(p);
  }
  static DLATTN_DEVICE int tiles_of_heads(const Params& p) { return p.tile_heads.tiles.number; }

  // They take turns at the last rows, which a causal mask leaves more keys than the first. Where each has
  // other heads, which share the keys, and none is left for it, it has the last one's once more, which it
  // does not store: then tiles of the same keys go on at one pace, and find them in L2.
  static DLATTN_DEVICE OwnRows own_rows(const Params& p, const Work& work, int warpgroup) {
    if (heads_apart(p)) {
      const int each = ceil_div(work.heads, consumers), before = warpgroup * each;
      const int left = work.heads - before;
      const int head = work.item.head + least(before, work.heads - 1);
      return {head, work.first_row, most(0, least(each, left))};
    }
    const int part = work.item.reversed ? consumers - 1 - warpgroup : warpgroup;
    return {work.item.head, work.first_row + (part << log2_head_rows(p)), work.heads};
  }
  // Of this warp, among those of its consumer.
  static DLATTN_DEVICE int first_row() { return 16 * (uint32(warp_index()) % 4); }
  // Where the rows of a warp, of which the first is this one of its consumer's, come after those.
  static DLATTN_DEVICE OwnRows rows_from(const Params& p, int row) {
    const int log2_rows = log2_head_rows(p);
    return {row >> log2_rows, row & ((1 << log2_rows) - 1)};
  }
  DLATTN_DEVICE int own_head(const Work& work) const {
    return work.item.head + of_heads(work.heads, rows_from(p, first_row()).head);
  }
  // The last one once more, where there are fewer.
  static DLATTN_DEVICE int of_heads(int heads, int number) {
    return most(0, least(number, heads - 1));
  }
  DLATTN_DEVICE int first_query(const Work& work) const {
    return work.queries.first + rows_from(p, first_row()).first;
  }

  DLATTN_DEVICE void init() {
    if (threadIdx.x < 128) {
      shared.zeros.clear_rows(0, threadIdx.x, 128);
      fence_proxy_async();
    }
    if (threadIdx.x == 0) {
      tma_prefetch(m.q);
      tma_prefetch(m.k);
      tma_prefetch(m.v);
      for (Ring<q_stages>& ring : shared.q_ring) ring.init(4);
      shared.k_ring.init(4 * consumers);
      shared.v_ring.init(4 * consumers);
      shared.item_ring.init(3 + 4 * consumers);
      for (Ring<1>& ring : shared.bias_ring) ring.init(4);
      for (uint64& loaded : shared.nearly_loaded) mbarrier_init(loaded, 1);
      mbarrier_init(shared.padded_values, 1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // Waits for what the scheduler tells in a buffer of the ring.
  DLATTN_DEVICE const Told& await_told(const Place<item_stages>& place) const {
    mbarrier_wait(shared.item_ring.full[place.stage], place.parity);
    return shared.told[place.stage];
  }

  // The key tile to visit after this one: a loader finds out.
  DLATTN_DEVICE int tile_after(const Work& work, int tile) const {
    if constexpr (!Tiles::skips) return tile + work.step();
    return Tiles::last_keys(p, work.item, tile - 1, work.first_tile);
  }

  // What the loader of k tells of a tile.
  DLATTN_DEVICE int visit_from(const Work& work, int tile, int next) const {
    bool partial = false;
    if constexpr (MasksElements<Problem>) {
      const WorkItem at = work.item;
      partial = !Tiles::is_whole(p, at.batch, at.head, at.tile, tile);
    }
    return uniform(2 * next + partial);
  }
  DLATTN_DEVICE Visit visit(int stage) const {
    if constexpr (Tiles::skips) {
      const int told = uniform(shared.visits[stage]);
      return {(told & 1) != 0, told >> 1};
    } else {
      return {};
    }
  }
};

}  // namespace dlattn
