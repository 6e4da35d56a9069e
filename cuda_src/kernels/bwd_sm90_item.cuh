// An item of a Hopper backward block: a tile of keys, and the queries of some heads that attend to them.
#pragma once

#include "kernels/bwd_sm90_stores.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Item : BwdSm90Stores<Problem, Tiling> {
  using Base = BwdSm90Stores<Problem, Tiling>;
  using Base::block_k;
  using Base::p;
  using Base::rank;
  using Base::round;
  using Base::tile_k;
  using Base::tile_q;
  using typename Base::SharedMemory;
  using typename Base::T;
  using typename Base::Tiles;
  using typename Base::Told;

  const WorkItem work;
  const Lengths length;
  const Interval keys;   // of this block that exist
  const Interval tiles;  // of queries that attend to them
  const int handed_on;   // in a relay, those from here on attend to the next item's keys, too

  DLATTN_DEVICE BwdSm90Item(const MappedBwdParams& params, SharedMemory& shared_memory, int round)
      : Base(params, shared_memory, round),
        work(own_item()),
        length(own_lengths()),
        keys(uniform(keys_of_block(rank()))),
        tiles(own_tiles()),
        handed_on(Base::hands_on ? uniform(first_of_next()) : tiles.last) {}

  // For all roles, by the warp that takes items.
  static DLATTN_DEVICE void describe(Told& told, int number, const Params& p) {
    if constexpr (Problem::ragged) {
      Base::describe_ragged(told, number, p);
    } else {
      const WorkItem item = Base::work_item(Base::item_of_part(number, p), p);
      const Lengths length(p, item.batch);
      const Interval tiles = Base::queries_of_part(query_tiles(item, length, p), number, p);
      if (threadIdx.x % 32 == 0) {
        told.item = item;
        told.length_q = length.q;
        told.length_kv = length.kv;
        if constexpr (corner_as_given) told.shift = length.shift;
        told.tiles = tiles;
      }
    }
  }

  DLATTN_DEVICE WorkItem own_item() const {
    if constexpr (Base::tells_items) {
      const WorkItem& item = this->told().item;
      return {uniform(item.tile), uniform(item.head), uniform(item.batch)};
    } else {
      return Base::work_item(this->number(), p);
    }
  }
  DLATTN_DEVICE Lengths own_lengths() const {
    if constexpr (Base::tells_items) {
      const auto& told = this->told();
      const int length_q = uniform(told.length_q), length_kv = uniform(told.length_kv);
      if constexpr (corner_as_given) {
        return Lengths::of(length_q, length_kv, uniform(told.shift));
      } else {
        return Lengths::of(p, length_q, length_kv);
      }
    } else {
      return {p, work.batch};
    }
  }
  DLATTN_DEVICE Interval own_tiles() const {
    if constexpr (Base::tells_tiles) {
      return uniform(this->told().tiles);
    } else {
      return uniform(query_tiles(work, length, p));
    }
  }

  // Asked again for each walk, during which the interval would hold two registers; or where it is not told,
  // one.
  DLATTN_DEVICE bool has_tiles() const {
    if constexpr (Base::tells_tiles) return !own_tiles().empty();
    return anew<typename Problem::Score>(!tiles.empty());
  }

  DLATTN_DEVICE Interval keys_of_block(int block) const {
    const int first = work.tile * tile_k + block * block_k;
    return {first, least(first + block_k, length.kv)};
  }

  // Those that attend to a key tile.
  static DLATTN_DEVICE Interval query_tiles(const WorkItem& item, const Lengths& length,
                                            const Params& p) {
    const Interval keys{item.tile * tile_k, least((item.tile + 1) * tile_k, length.kv)};
    const Interval queries = Problem::Mask::queries(keys, length, p);
    if (keys.empty() || queries.empty()) return {0, 0};
    const Interval all{queries.first / tile_q, ceil_div(queries.last, tile_q)};
    if constexpr (!Base::adds_steps_alone) return all;
    const WorkItem of_heads{item.tile, item.head * p.heads_per_block.number, item.batch};
    return Tiles::span_of_queries(p, of_heads, p.heads_per_block.number, all);
  }

  DLATTN_DEVICE int first_of_next() const {
    const Interval next = query_tiles({work.tile + 1, work.head, work.batch}, length, p);
    return next.empty() ? tiles.last : next.first;
  }

  // The order of steps in a relay: what the next item waits for comes some heads sooner than what waits
  // for the item before. Calls visit(i, tile).
  static constexpr int heads_sooner = 3;
  template <class Visit>
  DLATTN_DEVICE void for_each_in_relay(Visit visit) const {
#pragma unroll 1
    for (int round = 0; round < p.heads_per_block.number + heads_sooner; ++round) {
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int i = tile < handed_on ? round - heads_sooner : round;
        if (i >= 0 && i < p.heads_per_block.number) visit(i, tile);
      }
    }
  }
  DLATTN_DEVICE int first_in_relay() const {
    return handed_on < tiles.last ? handed_on : tiles.first;
  }
  // Of a walk.
  DLATTN_DEVICE int last_tile() const {
    return (Base::hands_on && handed_on > tiles.first ? handed_on : tiles.last) - 1;
  }

  DLATTN_DEVICE MappedEntry entry(Mapped tensor) const {
    if constexpr (Problem::ragged) {
      return this->told().mapped[int(tensor)];
    } else {
      return {0, work.batch};
    }
  }

  // Base::row_tile and Base::slot.
  DLATTN_DEVICE int own_row_tile(int head, int tile) const {
    if constexpr (Problem::ragged) {
      return this->told().entry.tile_of_head(head, p.heads_q) + tile;
    } else {
      return Base::row_tile(p, work.batch, head, tile);
    }
  }
  DLATTN_DEVICE int own_sum_tile(int head_of_pair, int tile) const {
    if constexpr (Problem::ragged) {
      const auto& told = this->told();
      return told.first_sum + head_of_pair * told.entry.query_tiles + tile;
    } else {
      return Base::slot(p, this->pair(work), head_of_pair, tile);
    }
  }

  // Where dK and dV are stored. Read again: the first key would hold a register during the walk.
  DLATTN_DEVICE int first_stored_key() const {
    if constexpr (Base::tells_items) {
      return this->told().item.tile * tile_k;
    } else {
      return keys.first;
    }
  }

  // Told, where memory would have to answer before anything could be stored.
  template <class Of>
  DLATTN_DEVICE KeyEntry<T> key_entry(int batch) const {
    if constexpr (Problem::ragged) {
      const auto& told = this->told();
      return {batch, told.length_kv, Of::of_keys ? told.dK : told.dV};
    } else if constexpr (Base::tells_items) {
      return {batch, this->told().length_kv};
    } else {
      return {batch, p.seq_len_kv.at(batch, p.seq_kv)};
    }
  }

  DLATTN_DEVICE int first_head() const {
    if constexpr (Base::parts_of_groups) return this->told().item.head * p.heads_per_block.number;
    return work.head * p.heads_per_block.number;
  }

  // Whether head i and a query tile are a step. If not, every role passes it over; in a fixed order, the
  // writer counts it.
  DLATTN_DEVICE bool is_step(int i, int tile) const {
    // In a fixed order, the writer has no registers for what follows from the batch alone.
    const int batch = Problem::deterministic ? opaque(work.batch) : work.batch;
    return Tiles::visits(p, batch, first_head() + i, tile, work.tile);
  }
  // Takes the steps of heads i to last. take() says whether more of them follow, which without a block
  // mask is all that one needs to know; `more`, whether there are any.
  template <class Take>
  DLATTN_DEVICE void take_steps(int i, int last, bool more, Take take) const {
    if constexpr (!Tiles::skips) {
#pragma unroll 1
      while (more) more = take();
      return;
    }
#pragma unroll 1
    for (; i < last; ++i) {
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        if (is_step(i, tile)) take();
      }
    }
  }

  // The parity of the keys of head i in k_ring, and of its values in v_ring.
  DLATTN_DEVICE uint32 keys_parity(int i) const { return fill_parity(i, p.heads_per_k); }
  DLATTN_DEVICE uint32 values_parity(int i) const { return fill_parity(i, p.heads_per_v); }
  DLATTN_DEVICE uint32 fill_parity(int i, const Divisor& heads_per_fill) const {
    if constexpr (Base::parts_of_groups) return opaque(round) % 2;  // no register during the walk
    if constexpr (Tiling::adds_keys) return round % 2;
    const int fills = heads_per_fill.quotient(p.heads_per_block.number);
    return uint32(round * fills + heads_per_fill.quotient(i)) % 2;
  }

  // Heads of the item that share a head of keys: where items have parts of groups, all.
  DLATTN_DEVICE int heads_of_keys() const {
    return (Tiling::adds_keys ? p.heads_per_block : p.heads_per_k).number;
  }
  // Whether this many heads of the item are the end of a group.
  static DLATTN_DEVICE bool ends_group(int heads, const Divisor& heads_per_group) {
    return Tiling::adds_keys || heads_per_group.rest(heads) == 0;
  }
  // Heads that share their keys and their values.
  DLATTN_DEVICE int heads_per_walk() const {
    if constexpr (Tiling::adds_keys) return p.heads_per_block.number;
    return p.heads_per_k.number == p.heads_per_v.number ? p.heads_per_k.number : 1;
  }
  // Whether this many heads of the item are the end of some.
  DLATTN_DEVICE bool ends_walk(int heads) const {
    if constexpr (Tiling::adds_keys) return heads == p.heads_per_block.number;
    return heads_per_walk() == 1 || p.heads_per_k.rest(heads) == 0;
  }
};

}  // namespace dlattn
