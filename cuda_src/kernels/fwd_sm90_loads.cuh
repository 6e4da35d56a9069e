// The producer warpgroup of a Hopper forward block: a scheduler, and loaders for q, k and v.
#pragma once

#include "attn/epilogue.cuh"
#include "kernels/fwd_sm90_block.cuh"
#include "kernels/fwd_sm90_division.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct FwdSm90Loads : FwdSm90Block<Problem, Tiling> {
  using Base = FwdSm90Block<Problem, Tiling>;
  using Base::await_told;
  using Base::Base;
  using Base::consumers;
  using Base::item_stages;
  using Base::m;
  using Base::p;
  using Base::q_stages;
  using Base::shared;
  using Base::shares_bands;
  using Base::shares_keys;
  using Base::stages;
  using Base::stages_bias;
  using Base::tile_after;
  using Base::tile_k;
  using typename Base::BiasTile;
  using typename Base::QTile;
  using typename Base::Tiles;
  using typename Base::Told;
  using typename Base::Work;

  // ---- Scheduler: one warp, which hands out query tiles ----

  DLATTN_DEVICE void schedule() {
    Place<item_stages> place;
    if constexpr (Problem::ragged) {
      offer_numbered(place);
    } else if (p.items_taken == nullptr) {
      offer_scheduled(place);
    } else {
      offer_attending(place);
    }
    await_room(place);
    hand_out(place, {p, {-1, 0, 0}, Lengths(p, 0), Interval{0, 0}});
    await_zeros();
  }

  DLATTN_DEVICE void await_room(const Place<item_stages>& place) {
    mbarrier_wait(shared.item_ring.empty[place.stage], place.parity ^ 1);
  }

  static DLATTN_DEVICE Place<item_stages> place_before(const Place<item_stages>& place) {
    if (place.stage == 0) return {item_stages - 1, place.parity ^ 1};
    return {place.stage - 1, place.parity};
  }

  // Every other place of the ring, whose buffers are three.
  static DLATTN_DEVICE uint32 is_odd(const Place<item_stages>& place) {
    static_assert(item_stages % 2 == 1);
    return (place.stage ^ place.parity) & 1;
  }

  DLATTN_DEVICE void hand_out(Place<item_stages>& place, Work work) {
    // Parts of the same rows are the same consumer's in every block.
    work.item.reversed = !shares_keys && is_odd(place);
    if constexpr (shares_bands) work.item.reversed = work.item.parts == 0 && is_odd(place);
    Told& told = shared.told[place.stage];
    const int lane = threadIdx.x % 32;
    if (lane < consumers) told.own[lane] = {p, work, Base::own_rows(p, work, lane)};
    if (lane == consumers) told.all = work;
    __syncwarp();
    release(shared.item_ring.full[place.stage]);
    place.advance();
  }

  // True if there is anything to do for others.
  DLATTN_DEVICE bool offer(Place<item_stages>& place, WorkItem item, Interval key_tiles = {}) {
    await_room(place);  // before there is more to hold than the item
    Work work(p, item);
    if (shares_keys && item.parts != 0) {
      work.first_tile = key_tiles.first;
      work.last_tile = key_tiles.last - 1;
    }
    if (work.empty()) {
      const int parts = Base::parts_of(p, work.queries.last);
      const int last = least(parts << Base::log2_head_rows(p), p.seq_q);
#pragma unroll 1
      for (int i = 0; i < work.heads; ++i, ++item.head) {
        store_nothing(item, {work.queries.first, last}, work.length.q);
      }
      return false;
    }
    hand_out(place, work);
    return true;
  }

  // dlattn/plans/schedule.py says where the rows of a block are.
  DLATTN_DEVICE void offer_scheduled(Place<item_stages>& place) {
    const int4* rows = reinterpret_cast<const int4*>(p.schedule);
    const int block = block_number();
    int4 row = rows[2 * block], keys = rows[2 * block + 1];
    const int end = uniform(rows[2 * block + 2].w);
    for (int next = uniform(row.w);; row = rows[2 * next], keys = rows[2 * next + 1], ++next) {
      WorkItem item{uniform(row.x), uniform(row.y), uniform(row.z)};
      if constexpr (shares_keys) item.parts = uniform(keys.z);
      if constexpr (Tiling::alternates) item.ascends = uniform(keys.w);
      offer(place, item, {uniform(keys.x), uniform(keys.y)});
      if (next == end) return;
    }
  }

  // The same of the item of this number; then, if it is one of the last, waits until few of its keys are
  // left to load. What a block has asked for is its own: at the end, blocks that ask early would have much
  // to do, and others nothing.
  DLATTN_DEVICE void offer_asked(Place<item_stages>& place, WorkItem item, int number) {
    item.late = number >= shared.item_count - items_left * block_count();
    const bool offered = offer(place, item);
    if constexpr (!Problem::ragged) await_counter();
    if (!offered) return;
    const auto given = place_before(place);
    if (!shared.told[given.stage].all.item.late) return;
    mbarrier_wait(shared.nearly_loaded[given.stage], given.parity);
  }
  static constexpr int items_left = 4;  // of each block, at the end

  DLATTN_DEVICE void begin_asking(int count) {
    if (threadIdx.x % 32 == 0) {
      shared.item_count = count;
      shared.counts = false;
    }
    __syncwarp();
  }
  // Nobody clears the counter before the kernel: the first who finds no mark beside it does.
  DLATTN_DEVICE void await_counter() {
    if (threadIdx.x % 32 == 0 && !shared.counts) {
      uint64* place = p.parts.marks;
      const uint64 mark = p.parts.mark, clearing = ~mark, found = load_acquire(place);
      if (found != mark) {
        if (found != clearing && compare_swap(place, found, clearing) == found) {
          *p.items_taken = 0;
          store_release(place, mark);
        }
        while (load_acquire(place) != mark) __nanosleep(20);
      }
      shared.counts = true;
    }
    __syncwarp();
  }
  // After each item, its block asks once. The last of all takes the mark away.
  DLATTN_DEVICE int ask() const {
    int taken = 0;
    if (threadIdx.x % 32 == 0) {
      taken = fetch_add(p.items_taken, 1);
      if (!Problem::ragged && taken == shared.item_count - 1) *p.parts.marks = 0;
    }
    return uniform(taken) + block_count();  // as many had no need to ask
  }

  DLATTN_DEVICE void tell_progress(const Place<item_stages>& place, const Work& work, int tile,
                                   bool& told) {
    if (told || work.left_after(tile) > 1) return;
    release(shared.nearly_loaded[place.stage]);
    told = true;
  }

  // Of few tiles: false if blocks do not share their keys.
  DLATTN_DEVICE bool offer_parts(Place<item_stages>& place, int tiles) {
    if constexpr (!Tiling::shares_more || Tiles::skips) return false;
    const KeyDivision<Base> division(p, tiles);
    division.for_each_part([&](WorkItem item, Interval keys) { offer(place, item, keys); });
    tell_parts(division);
    return division.dividing > 0;
  }
  // To the kernel that puts them together, of all query tiles that there might be.
  DLATTN_DEVICE void tell_parts(const KeyDivision<Base>& division) const {
    if (p.parts.tiles == nullptr) return;
    BatchWalk walk;
    const int groups = Base::tiles_of_heads(p),
              most = Base::tiles_of(p, p.seq_q) * groups * p.batch;
    const auto tiles = [&](int batch) { return tiles_with_queries(batch) * groups; };
#pragma unroll 1
    for (int number = block_number(); number < most; number += block_count()) {
      int4* const told = p.parts.tiles + 2 * number;
      if (threadIdx.x % 32 == 0) told[1] = {0, 0, 0, 0};
      if (division.dividing == 0 || !walk.find(number, p.batch, tiles)) continue;
      division.tell(told, walk.batch, walk.rest);
    }
  }

  // The kernel before has numbered the tiles with queries, the longest sequences' first.
  DLATTN_DEVICE void offer_numbered(Place<item_stages>& place) {
    const int4* const items = p.ragged.items + 1;
    int number = block_number();
    int4 item = items[number];  // there is memory for one of each block
    const int count = uniform(items[-1].x);
    begin_asking(count);
    if (offer_parts(place, count)) return;
    while (number < count) {
      const int head = Base::first_head(p, uniform(item.y));
      offer_asked(place, {uniform(item.x), head, uniform(item.z)}, number);
      number = ask();
      if (number < count) item = items[number];
    }
  }

  // Lengths are known on the device only: a tile with queries goes to the block that first asks for
  // it, those of long entries first, and the last tile of an entry, or in the order of kernels/tile_order.cuh.
  DLATTN_DEVICE void offer_attending(Place<item_stages>& place) {
    BatchWalk walk;
    const int groups = Base::tiles_of_heads(p);
    const auto items = [&](int batch) { return tiles_with_queries(batch) * groups; };
    const int count = BatchWalk::count(p.batch, items);
    begin_asking(count);
    if (offer_parts(place, count)) return;
    for (int number = block_number(); walk.find<true>(number, p.batch, items); number = ask()) {
      const int after = p.tile_heads.tiles.quotient(walk.rest);
      const int head = Base::first_head(p, walk.rest - after * groups);
      const int tile = handed_out(walk.batch, head, after);
      offer_asked(place, {tile, head, walk.batch}, number);
    }
  }

  // The tile that comes after so many of an entry.
  DLATTN_DEVICE int handed_out(int batch, int head, int after) const {
    if constexpr (Tiles::skips) {
      if (p.tile_order.data != nullptr) return uniform(p.tile_order.tiles(batch, head)[after]);
    }
    return tiles_with_queries(batch) - 1 - after;
  }

  DLATTN_DEVICE int tiles_with_queries(int batch) const {
    return Base::tiles_of(p, p.seq_len_q.at(batch, p.seq_q));
  }

  // Rows of a head beyond the length, which no consumer has.
  struct Padding {
    int head = 0, batch = 0, length = 0;
    Interval rows{0, 0};
  };

  // Of the tile of this number, among all of full sequences.
  DLATTN_DEVICE Padding padding_of(uint32 number, uint32 tiles_of_head) const {
    const int log2_rows = Base::log2_head_rows(p), tile_rows = Base::rows_per_tile(p);
    const uint32 pair = number / tiles_of_head, batch = pair / uint32(p.heads_q);
    const int tile = number % tiles_of_head, length = p.seq_len_q.at(batch, p.seq_q);
    return {int(pair % uint32(p.heads_q)),
            int(batch),
            length,
            {most(tile * tile_rows, Base::parts_of(p, length) << log2_rows),
             least((tile + 1) * tile_rows, p.seq_q)}};
  }

  // Looks at some of all tiles, of which each block has every n-th, and stores their padding. Lanes find out
  // at once how long sequences are: one after the other, that took longer than to store.
  DLATTN_DEVICE void store_padding(uint32& next, int tiles) {
    if (p.items_taken == nullptr || !stores_padding<Problem>(p)) return;
    const uint32 of_head = Base::tiles_of(p, p.seq_q), end = of_head * p.heads_q * p.batch;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    while (tiles > 0 && next < end) {
      const uint32 number = next + lane * block_count();
      Padding own;
      if (lane < tiles && number < end) own = padding_of(number, of_head);
      uint32 found = __ballot_sync(0xffffffffu, !own.rows.empty());
#pragma unroll 1
      for (; found != 0; found &= found - 1) {
        const int owner = __ffs(found) - 1;
        const WorkItem at{0, from_lane(own.head, owner), from_lane(own.batch, owner)};
        const Interval rows{from_lane(own.rows.first, owner), from_lane(own.rows.last, owner)};
        store_nothing(at, rows, from_lane(own.length, owner));
      }
      next += least(tiles, 32) * block_count();
      tiles -= 32;
    }
  }

  // Of all tiles, as many as there are for each item.
  DLATTN_DEVICE int padding_beside_item() const {
    const int tiles = Base::tiles_of(p, p.seq_q) * p.heads_q * p.batch;
    return least(32, ceil_div(tiles, most(1, shared.item_count)));
  }

  // The copy engine stores zeros, without anyone's waiting.
  DLATTN_DEVICE void store_nothing(WorkItem at, Interval rows, int length_q) {
    const MappedEntry entry = p.template mapped_entry<Problem::ragged>(Mapped::o, at.batch);
    const int last = p.o.template stored_rows<Problem::ragged>(length_q, p.seq_q);
    if (threadIdx.x % 32 == 0) {
#pragma unroll 1
      for (int row = rows.first; row < least(rows.last, last); row += Base::output_rows) {
#pragma unroll
        for (int column = 0; column < Problem::head_dim_v; column += 64) {
          tma_store_4d(m.o, shared.zeros.address(), column, entry.row + row, at.head, entry.batch);
        }
      }
      tma_commit();
    }
    __syncwarp();
    store_empty_stats<Problem>(p, at.batch, at.head, rows, length_q);
  }

  static DLATTN_DEVICE void await_zeros() {
    if (threadIdx.x % 32 == 0) tma_wait_read<0>();
  }

  // ---- Loaders: a warp each for q, k and v, of which one lane gives the orders ----

  template <class Visit>
  DLATTN_DEVICE void for_each_work(Visit visit) {
    for (Place<item_stages> place;; place.advance()) {
      const Work work = uniform(await_told(place).all);
      if (work.item.tile < 0) return;
      visit(work, place);
      release(shared.item_ring.empty[place.stage]);  // consumers do later
    }
  }

  // With each tile, a bias that is staged. Who loads queries has time for rows without any.
  DLATTN_DEVICE void load_queries() {
    Place<q_stages> place;
    Place<1> bias_place;
    uint32 padding = block_number();
    for_each_work([&](const Work& work, const auto& item_place) {
      const WorkItem at = work.item;
      const auto& told = shared.told[item_place.stage];
      const MappedEntry entry = p.template mapped_entry<Problem::ragged>(Mapped::q, at.batch);
#pragma unroll
      for (int consumer = 0; consumer < consumers; ++consumer) {
        Ring<q_stages>& ring = shared.q_ring[consumer];
        const auto& own = told.own[consumer];
        const int first = own.first_row;
        const bool exists = 0 <= first && first < work.length.q;
        const uint32 bytes = exists ? QTile::bytes : 0;
        order(ring, place, ring.full[place.stage], bytes, [&](int stage, uint64& full) {
          if (!exists) return;
          QTile& tile = shared.q[stage][consumer];
          const int of_head = 1 << Base::log2_head_rows(p);
#pragma unroll 1
          for (int row = 0, i = 0; row < 64; row += of_head, ++i) {
            const int head = own.item.head + Base::of_heads(own.heads, i);
            tile.load_rows(row, m.q, full, entry.row + first, head, entry.batch);
          }
        });
      }
      place.advance();
      if constexpr (stages_bias) load_bias(told, work, bias_place);
      store_padding(padding, padding_beside_item());
    });
    store_padding(padding, 0x7fffffff);
    await_zeros();
  }

  DLATTN_DEVICE void load_bias(const Told& told, const Work& work, Place<1>& place) {
    const WorkItem at = work.item;
    const int head = p.bias.head == 0 ? 0 : at.head, batch = p.bias.batch == 0 ? 0 : at.batch;
    for (int tile = work.start(); work.visits(tile); tile = tile_after(work, tile)) {
#pragma unroll
      for (int consumer = 0; consumer < consumers; ++consumer) {
        order(shared.bias_ring[consumer], place, shared.bias_ring[consumer].full[0],
              BiasTile::loaded_bytes, [&](int, uint64& full) {
                const int first = told.own[consumer].first_row;
                shared.bias[consumer].load(m.bias, full, first, head, batch, tile * tile_k);
              });
      }
      place.advance();
    }
  }

  // Tells consumers of a tile of k, before the arrival that publishes it, by the same lane. What is told
  // is found out before the wait for a buffer.
  DLATTN_DEVICE void tell(const Place<stages>& place, const Work& work, int tile, int after) {
    if constexpr (Tiles::skips) {
      const int told = this->visit_from(work, tile, after);
      mbarrier_wait(shared.k_ring.empty[place.stage], place.parity ^ 1);
      if (threadIdx.x % 32 == 0) shared.visits[place.stage] = told;
    }
  }

  // Whether a tile is of values, some of which lie beyond the actual length, but inside the tensor. What
  // lies beyond a sequence of a ragged tensor, or beyond the tensor, the copy engine does not load; of a
  // page, it does.
  DLATTN_DEVICE bool is_padded(Mapped tensor, const Work& work, int tile) const {
    if (tensor != Mapped::v || tile != work.last_tile) return false;
    const bool all = p.seq_len_kv.data == nullptr || p.v.template is_ragged<Problem::ragged>();
    return (!all || Problem::paged_v) && (tile + 1) * tile_k > work.length.kv;
  }

  // There lies whatever the user left: zero probabilities do not silence NaN, zero values do. The loader
  // clears them, because it is ahead of the consumers, and tells these of the tile only then.
  DLATTN_DEVICE void clear_padding(const Work& work, const Place<stages>& place, Place<1>& padded) {
    mbarrier_wait(shared.padded_values, padded.parity);
    padded.advance();
    shared.v[place.stage].clear_rows(work.length.kv - work.last_tile * tile_k, threadIdx.x % 32,
                                     32);
    fence_proxy_async();
    __syncwarp();
    release(shared.v_ring.full[place.stage]);
  }

  template <class Tile>
  DLATTN_DEVICE void load_keys(Tile (&tiles)[stages], Ring<stages>& ring, const TensorMap& map,
                               Mapped tensor, const Divisor& heads_per_key) {
    Place<stages> place;
    Place<1> padded;
    for_each_work([&](const Work& work, const auto& item_place) {
      const int head = heads_per_key.quotient(work.item.head);
      const MappedEntry entry = p.template mapped_entry<Problem::ragged>(tensor, work.item.batch);
      bool told = tensor != Mapped::k;
      for (int tile = work.start(), after; work.visits(tile); tile = after) {
        after = tile_after(work, tile);
        tell_progress(item_place, work, tile, told);
        if (Tiles::skips && tensor == Mapped::k) tell(place, work, tile, after);
        const bool clears = is_padded(tensor, work, tile);
        uint64& landed = clears ? shared.padded_values : ring.full[place.stage];
        order(ring, place, landed, Tile::bytes, [&](int stage, uint64& landed) {
          tiles[stage].load(map, landed, entry.row + tile * tile_k, head, entry.batch);
        });
        if (clears) clear_padding(work, place, padded);
        place.advance();
      }
    });
  }

  // The same through a page table, of which the entries for a tile are read a tile early.
  template <class Tile>
  DLATTN_DEVICE void gather_keys(Tile (&tiles)[stages], Ring<stages>& ring, const TensorMap& map,
                                 Mapped tensor, const PageTableRef& table,
                                 const Divisor& heads_per_key) {
    Place<stages> place;
    Place<1> padded;
    for_each_work([&](const Work& work, const auto& item_place) {
      const PagedBoxes<tile_k> boxes(table, work.item.batch);
      const int head = heads_per_key.quotient(work.item.head);
      bool told = tensor != Mapped::k;
      int next = boxes.number_of_lane(work.start() * tile_k, work.length.kv);
#pragma unroll 1
      for (int tile = work.start(), after; work.visits(tile); tile = after) {
        const int number = next;
        after = tile_after(work, tile);
        tell_progress(item_place, work, tile, told);
        if (work.visits(after)) {
          next = boxes.number_of_lane(after * tile_k, work.length.kv);
        }
        if (Tiles::skips && tensor == Mapped::k) tell(place, work, tile, after);
        const bool clears = is_padded(tensor, work, tile);
        uint64& landed = clears ? shared.padded_values : ring.full[place.stage];
        order(ring, place, landed, Tile::bytes, [](int, uint64&) {});
        boxes.load_by_warp(tiles[place.stage], map, landed, tile * tile_k, head, number);
        if (clears) clear_padding(work, place, padded);
        place.advance();
      }
    });
  }

  DLATTN_DEVICE void produce() {
    switch (warp_index()) {
      case 0:
        return load_queries();
      case 1:
        if constexpr (Problem::paged_k) {
          return gather_keys(shared.k, shared.k_ring, m.k, Mapped::k, p.k_pages, p.heads_per_k);
        }
        return load_keys(shared.k, shared.k_ring, m.k, Mapped::k, p.heads_per_k);
      case 2:
        if constexpr (Problem::paged_v) {
          return gather_keys(shared.v, shared.v_ring, m.v, Mapped::v, p.v_pages, p.heads_per_v);
        }
        return load_keys(shared.v, shared.v_ring, m.v, Mapped::v, p.heads_per_v);
      case 3:
        return schedule();
    }
  }
};

}  // namespace dlattn
