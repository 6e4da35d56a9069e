// An item of a Hopper backward block: a tile of keys, and the queries of some heads that attend to them.
#pragma once

#include "kernels/bwd_sm90_shares.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Item : BwdSm90Shares<Problem, Tiling> {
  using Base = BwdSm90Shares<Problem, Tiling>;
  using Base::block_k;
  using Base::p;
  using Base::rank;
  using Base::round;
  using Base::tile_k;
  using Base::tile_q;
  using typename Base::SharedMemory;
  using typename Base::Tiles;

  const WorkItem work;
  const Lengths length;
  const Interval keys;   // of this block that exist
  const Interval tiles;  // of queries that attend to them
  const int handed_on;   // in a relay, those from here on attend to the next item's keys, too

  DLATTN_DEVICE BwdSm90Item(const MappedBwdParams& params, SharedMemory& shared_memory, int round)
      : Base(params, shared_memory, round),
        work(Base::work_item(this->number(), p)),
        length(p, work.batch),
        keys(uniform(keys_of_block(rank()))),
        tiles(uniform(query_tiles(work.tile))),
        handed_on(Base::relays ? uniform(first_of_next()) : tiles.last) {}

  DLATTN_DEVICE Interval keys_of_block(int block) const {
    const int first = work.tile * tile_k + block * block_k;
    return {first, least(first + block_k, length.kv)};
  }

  // Those that attend to a key tile.
  DLATTN_DEVICE Interval query_tiles(int key_tile) const {
    const Interval keys{key_tile * tile_k, least((key_tile + 1) * tile_k, length.kv)};
    const Interval queries = Problem::Mask::queries(keys, length, p);
    if (keys.empty() || queries.empty()) return {0, 0};
    const Interval all{queries.first / tile_q, ceil_div(queries.last, tile_q)};
    if constexpr (!Base::adds_steps_alone) return all;
    const WorkItem of_heads{key_tile, first_head(), work.batch};
    return Tiles::span_of_queries(p, of_heads, p.heads_per_block, all);
  }

  DLATTN_DEVICE int first_of_next() const {
    const Interval next = query_tiles(work.tile + 1);
    return next.empty() ? tiles.last : next.first;
  }

  // The order of steps in a relay: what the next item waits for comes some heads sooner than what waits
  // for the item before. Calls visit(i, tile).
  static constexpr int heads_sooner = 3;
  template <class Visit>
  DLATTN_DEVICE void for_each_in_relay(Visit visit) const {
#pragma unroll 1
    for (int round = 0; round < p.heads_per_block + heads_sooner; ++round) {
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int i = tile < handed_on ? round - heads_sooner : round;
        if (i >= 0 && i < p.heads_per_block) visit(i, tile);
      }
    }
  }
  DLATTN_DEVICE int first_in_relay() const {
    return handed_on < tiles.last ? handed_on : tiles.first;
  }
  // Of a walk.
  DLATTN_DEVICE int last_tile() const {
    return (Base::relays && handed_on > tiles.first ? handed_on : tiles.last) - 1;
  }

  DLATTN_DEVICE MappedEntry entry(Mapped tensor) const {
    return p.template mapped_entry<Problem::ragged>(tensor, work.batch);
  }

  // Where dK and dV are stored. Read again: the first key would hold a register during the walk.
  DLATTN_DEVICE int first_stored_key() const {
    if constexpr (Problem::ragged)
      return p.ragged.items[1 + this->number()].x * tile_k + rank() * block_k;
    return keys.first;
  }

  DLATTN_DEVICE int first_head() const { return work.head * p.heads_per_block; }

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
  DLATTN_DEVICE uint32 fill_parity(int i, int heads_per_fill) const {
    return uint32(round * (p.heads_per_block / heads_per_fill) + i / heads_per_fill) % 2;
  }

  // Heads that share their keys and their values.
  DLATTN_DEVICE int heads_per_walk() const {
    return p.heads_per_k == p.heads_per_v ? p.heads_per_k : 1;
  }
};

}  // namespace dlattn
