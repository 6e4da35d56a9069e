// The sums of dQ over key tiles, in global memory: they exist for a few pairs of batch entry and group of
// heads at a time, so that they stay in L2. Blocks add to them, and count. Complete sums are shared out among
// items some time later, which store them as dQ (bwd_sm90_stores.cuh).
#pragma once

#include "attn/walk.cuh"
#include "kernels/bwd_sm90_block.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Shares : BwdSm90Block<Problem, Tiling> {
  using Base = BwdSm90Block<Problem, Tiling>;
  using Base::Base;
  using Base::dq_pieces;
  using Base::none_left;
  using Base::p;
  using Base::shared;
  using Base::tile_k;
  using Base::tile_q;
  using typename Base::DQPiece;
  using typename Base::Share;
  using typename Base::T;

  // ---- Who adds to a sum ----

  // The key tiles that add to a query tile.
  DLATTN_DEVICE Interval visitors(int tile, const Lengths& lengths) const {
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, lengths.q)};
    if (queries.empty()) return {0, 0};
    const Interval attended = Problem::Mask::keys(queries, lengths, p);
    if (attended.empty()) return {0, 0};
    return {attended.first / tile_k, ceil_div(attended.last, tile_k)};
  }

  // How often their blocks add, to a query tile of those of a pair, its heads one after the other.
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
  static constexpr bool adds_steps_alone = counts_additions<Problem>;
  DLATTN_DEVICE int additions(int batch, int group, int tile_of_pair, Interval all) const {
    if constexpr (!adds_steps_alone) return (all.last - all.first) * Base::cluster;
    const int first_head = group * p.heads_per_block.number;
    return p.dq_additions[Base::row_tile(p, batch, first_head, tile_of_pair)] * Base::cluster;
  }

  // ---- Where the sums are ----

  DLATTN_DEVICE int pair(WorkItem item) const { return Base::pair(p, item.batch, item.head); }
  DLATTN_DEVICE int query_tiles_per_pair() const {
    return p.heads_per_block.number * p.shares.query_tiles.number;
  }
  DLATTN_DEVICE DQPiece* sum(int sum_tile) const {
    return reinterpret_cast<DQPiece*>(Base::dq_accum(p, sum_tile));
  }

  // The same lane of a warp each time: it waits for what it has ordered.
  static DLATTN_DEVICE bool gives_orders() {
    return Base::elects ? elected() : threadIdx.x % 32 == 0;
  }

  static constexpr int end_of_item = -1;  // in the place of a sum

  // In a small ragged problem, every query tile has a sum of its own, and all shares go with no item: one of
  // few keys would have those of a long sequence.
  DLATTN_DEVICE bool has_places() const { return !Problem::ragged || p.dq_places > 0; }

  // The place of a pair's sums, or a bundle's, is its own: what had it before has stored its dQ, and
  // left zeros.
  DLATTN_DEVICE void await_place(WorkItem item) const { await_place(pair(item)); }
  DLATTN_DEVICE void await_own_place(WorkItem item) const {
    if constexpr (Problem::ragged) {
      await_place(this->told().bundle);
    } else {
      await_place(item);
    }
  }
  DLATTN_DEVICE void await_place(int pair) const {
    if (!has_places()) return;
    const Divisor& places = p.shares.places;
    const int before = places.quotient(pair), stored = before * query_tiles_per_pair();
    if (stored == 0) return;
    const int* g_stored = p.dq_stored + pair - before * places.number;
    while (load_acquire(g_stored) < stored) __nanosleep(100);
  }

  // ---- The counter ----

  // Which item's share goes with a part, if not a negative number.
  DLATTN_DEVICE int share_beside(int number) const {
    const int share = number - p.dq_lag;
    return Tiling::adds_keys && share >= p.lone_shares ? -1 : share;
  }

  DLATTN_DEVICE void count_additions() {
    // With an item goes the share of one so long ago that its sums are complete, or nearly so.
    if constexpr (Problem::ragged) {
      const auto& told = this->told();
      const int bundle = told.bundle - ragged_lag();
      const Turn turn = turn_in_bundle(told.item, told.entry, told.bundle, told.length_kv);
      describe_ragged_share(shared.share, bundle, turn.number, turn.of);
    } else {
      describe_share(shared.share, [&] { return share_beside(this->number()); },
                     {Base::rank(), 0, p.shares.tiles});
    }
    await_sums(shared.share);
    release(shared.share_complete);
    uint32 told = 0;  // a multiple of four in an item: its first message always has the same place
    bool more = true;
    while (more) {
      // One release for as many as wait.
      const int first = listen(told);
      const int second = first != end_of_item && is_told(told) ? listen(told) : first;
      more = second != end_of_item;
      const bool two = more && second != first;
      if (gives_orders() && first != end_of_item) {
        if (two) {
          fence_gpu();
          add_relaxed(p.dq_arrivals + second, 1);
          add_relaxed(p.dq_arrivals + first, 1);
        } else {
          add_release(p.dq_arrivals + first, 1);
        }
      }
      __syncwarp();
    }
    while (told % 4 != 0) listen(told);
    mbarrier_wait(shared.share_stored, this->round % 2);
    if (is_counted(shared.share)) free_sums(shared.share);
  }

  // What the writer tells: a sum that has been added to, or end_of_item.
  DLATTN_DEVICE int listen(uint32& told) const {
    const auto place = place_of<2>(told++);
    mbarrier_wait(shared.sums_ring.full[place.stage], place.parity);
    const int added = uniform(shared.sums_added[place.stage]);
    release(shared.sums_ring.empty[place.stage]);
    return added;
  }
  DLATTN_DEVICE bool is_told(uint32 told) const {
    const auto place = place_of<2>(told);
    return has_ended(shared.sums_ring.full[place.stage], place.parity);
  }

  static DLATTN_DEVICE bool has_ended(uint64& barrier, uint32 parity) {
    return __all_sync(0xffffffffu, mbarrier_test(barrier, parity));
  }

  // ---- Shares: the query tiles of a pair, divided among its items, and their blocks, in the order of
  // their heads ----

  // Which of an item's shares, one for each block, and which part of it, of so many query tiles each.
  struct SharePart {
    int block, part, tiles;
  };
  DLATTN_DEVICE Interval share(WorkItem item, SharePart of) const {
    const Interval all{0, query_tiles_per_pair()};
    const Interval whole = part_of(all, item.tile * Base::cluster + of.block, p.shares.tiles);
    return part_of(whole, of.part, of.tiles);
  }
  static DLATTN_DEVICE Interval part_of(Interval whole, int part, int each) {
    const int first = least(whole.first + part * each, whole.last);
    return {first, least(first + each, whole.last)};
  }

  static DLATTN_DEVICE bool is_counted(const Share& share) {
    return share.pieces > 0 || (Problem::ragged && share.tile == 0);
  }
  // What a share adds to the stored tiles of its place. Every place is counted as full: the first
  // share has those tiles that do not exist.
  DLATTN_DEVICE int counted_tiles(const Share& share, int tiles) const {
    if constexpr (Problem::ragged) {
      if (share.tile == 0) return tiles + query_tiles_per_pair() - share.bundled_tiles;
    }
    return tiles;
  }
  // A query tile of a share's pair, as a head of the pair's and a tile of that.
  struct TileOfHead {
    int head, tile;
  };
  DLATTN_DEVICE TileOfHead tile_of_head(const Share& share, int tile_of_pair) const {
    if constexpr (Problem::ragged) {
      const int head = small_quotient(tile_of_pair, share.query_tiles);
      return {head, tile_of_pair - head * share.query_tiles};
    } else {
      const int head = p.shares.query_tiles.quotient(tile_of_pair);
      return {head, tile_of_pair - head * p.shares.query_tiles.number};
    }
  }
  DLATTN_DEVICE int pair_of(const Share& share) const {
    if constexpr (Problem::ragged) {
      return share.bundle;
    } else {
      return Base::pair(p, share.batch, share.group);
    }
  }
  // A warp waits until a share can be stored. Before the place is its own, the counts there are another
  // pair's.
  DLATTN_DEVICE void await_sums(const Share& share) const {
    if (uniform(share.pieces) == 0) return;
    await_place(pair_of(share));
    const Lengths lengths = lengths_of(share);
    const int* arrivals = p.dq_arrivals + (share.sums - sum(0)) / dq_pieces;
#pragma unroll 1
    for (int i = opaque(threadIdx.x) % 32; i < share.pieces / dq_pieces; i += 32) {
      const Interval all = visitors(tile_of_head(share, share.tile + i).tile, lengths);
      const int count = additions(share.batch, share.group, share.tile + i, all);
      while (load_acquire(arrivals + i) != count) __nanosleep(100);
    }
    __syncwarp();
  }
  DLATTN_DEVICE Lengths lengths_of(const Share& share) const {
    if constexpr (Problem::ragged) {
      return Lengths::of(p, share.length_q, share.length_kv);
    } else {
      return {p, share.batch};
    }
  }
  // A warp tells that a share has been stored.
  DLATTN_DEVICE void free_sums(const Share& share) const {
    if (!has_places()) return;
    const int tiles = share.pieces / dq_pieces;
    const int pair = pair_of(share);
    int* arrivals = p.dq_arrivals + Base::slot(p, pair, 0, share.tile);
    if (gives_orders()) {
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) arrivals[tile] = 0;
      add_release(p.dq_stored + p.shares.places.rest(pair), counted_tiles(share, tiles));
    }
    __syncwarp();
  }

  // A warp describes an item's share; there is none of items before the first.
  template <class NumberOfItem>
  DLATTN_DEVICE void describe_share(Share& described, NumberOfItem number, SharePart of) const {
    if (number() < 0) {
      if (gives_orders()) described.pieces = 0;
      return __syncwarp();
    }
    const WorkItem item = Base::work_item(number(), p);
    const Interval tiles = share(item, of);
    if (gives_orders()) {
      described = {sum(Base::slot(p, pair(item), 0, tiles.first)), item.batch, item.head,
                   tiles.first, most(tiles.last - tiles.first, 0) * dq_pieces};
    }
    __syncwarp();
  }

  // Where blocks have few items, and nobody waits for a place, all shares go with no item.
  DLATTN_DEVICE int ragged_lag() const {
    if constexpr (Problem::Mask::by_blocks) return p.dq_lag;  // ptxas has no register to ask
    if (Base::item_count(p, shared) > 2 * int(gridDim.x)) return p.dq_lag;
    const int bundles = p.ragged.items[0].y;
    return bundles <= p.dq_places ? bundles : p.dq_lag;
  }

  // Which one of its bundle's items an item is, and of how many.
  struct Turn {
    int number, of;
  };
  DLATTN_DEVICE Turn turn_in_bundle(const WorkItem& item, const RaggedEntry& entry, int bundle,
                                    int length_kv) const {
    const int tiles = most(1, ceil_div(length_kv, tile_k));
    const Interval groups = entry.groups_of(bundle, p.items.heads.number);
    return {(item.head - groups.first) * tiles + item.tile, (groups.last - groups.first) * tiles};
  }

  // One of so many parts of a bundle's dQ.
  struct BundlePart {
    int bundle, batch, part, parts;
  };

  // The same in ragged problems, whose bundles differ in items and in tiles: those of a bundle are
  // divided among the items of the bundle dq_lag later. What another share is not counted with has no
  // first tile.
  DLATTN_DEVICE void describe_ragged_share(Share& described, int bundle, int part,
                                           int parts) const {
    if (bundle >= 0) {
      return describe_ragged_share(described, {bundle, p.ragged.bundles[bundle], part, parts});
    }
    if (gives_orders()) {
      described.tile = -1;
      described.pieces = 0;
    }
    __syncwarp();
  }
  DLATTN_DEVICE void describe_ragged_share(Share& described, const BundlePart& of) const {
    if (gives_orders()) {
      described.tile = -1;
      described.pieces = 0;
      const RaggedEntry entry = p.ragged.entries[of.batch];
      const Interval groups = entry.groups_of(of.bundle, p.items.heads.number);
      described.dQ = p.dQ.template rows<T, true>(of.batch, 0, 0);
      described.bundle = of.bundle;
      described.query_tiles = entry.query_tiles;
      described.length_q = p.seq_len_q.at(of.batch, p.seq_q);
      described.length_kv = p.seq_len_kv.at(of.batch, p.seq_kv);
      const int heads = (groups.last - groups.first) * p.heads_per_block.number;
      const int tiles = heads * entry.query_tiles;
      const int each = small_quotient(tiles + of.parts - 1, of.parts), first = of.part * each;
      described.bundled_tiles = tiles;
      described.batch = of.batch;
      described.group = groups.first;
      const int first_head = groups.first * p.heads_per_block.number;
      described.sums = sum(Base::first_sum(p, entry, of.bundle, first_head) + first);
      if (of.part == 0 || first < tiles) {
        described.tile = first;
        described.pieces = (least(first + each, tiles) - first) * dq_pieces;
      }
    }
    __syncwarp();
  }

  // What of a ragged problem goes with no item: parts of the last bundles, as many as most items; or, where
  // all have sums of their own, of each item's, as many as items, or blocks. There is none of a bundle below 0.
  DLATTN_DEVICE BundlePart ragged_rest(int taken) const {
    if (has_places()) {
      const int parts = ceil_div(p.seq_kv, tile_k) * Base::cluster;
      const int bundles = p.ragged.items[0].y;
      const int number = small_quotient(taken, parts);
      const int bundle = bundles - least(bundles, ragged_lag()) + number;
      if (bundle >= bundles) return {-1, 0, 0, 0};
      return {bundle, p.ragged.bundles[bundle], taken - number * parts, parts};
    }
    const int items = Base::item_count(p, shared);
    const int parts = most(1, small_quotient(gridDim.x, items));
    const int item = small_quotient(taken, parts), part = taken - item * parts;
    if (item >= items) return {-1, 0, 0, 0};
    const int4 row = p.ragged.items[1 + item];
    const int length_kv = p.seq_len_kv.at(row.z, p.seq_kv);
    const Turn turn =
        turn_in_bundle({row.x, row.y, row.z}, p.ragged.entries[row.z], row.w, length_kv);
    return {row.w, row.z, turn.number * parts + part, turn.of * parts};
  }

  // A share that goes with no item; where those are fewer than blocks, a part of one. False if there are
  // not so many.
  DLATTN_DEVICE bool describe_rest(Share& described, int taken) const {
    bool exists;
    if constexpr (Problem::ragged) {
      const BundlePart of = ragged_rest(taken);
      exists = of.bundle >= 0;
      if (exists) describe_ragged_share(described, of);
    } else {
      const Divisor& parts = p.shares.lone_parts;
      const int share = parts.quotient(taken);  // of all blocks
      const int item = p.lone_shares + share / Base::cluster;
      exists = item < Base::item_count(p, shared);
      if (exists) {
        describe_share(described, [=] { return opaque(item); },
                       {share % Base::cluster, parts.rest(taken), parts.ceil(p.shares.tiles)});
      }
    }
    if (!exists && gives_orders()) described.pieces = none_left;
    __syncwarp();
    return exists;
  }

  // When no item is left, a warp prepares these, one ahead of who stores them: what a share follows from is
  // looked up step by step, which takes as long as to store it.
  DLATTN_DEVICE void prepare_rests() {
    bool more = true;
#pragma unroll 1
    for (uint32 told = 0; more; ++told) {
      const int taken = gives_orders() ? fetch_add(p.shares_taken, 1) : 0;
      const auto place = place_of<2>(told);
      mbarrier_wait(shared.rest_ring.empty[place.stage], place.parity ^ 1);
      more = describe_rest(shared.rest[place.stage], uniform(taken));
      if (more) await_sums(shared.rest[place.stage]);
      release(shared.rest_ring.full[place.stage]);
    }
  }
};

}  // namespace dlattn
