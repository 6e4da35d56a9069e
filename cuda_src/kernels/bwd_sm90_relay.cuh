// The relay of a Hopper backward: dQ where at most two key tiles meet a query tile, and several heads
// share them (narrow windows), or where one tile has all keys. Nobody adds to sums. The item of the first
// key tile leaves its part of a query tile's dQ in memory, in fp32; that of the second, the next one, adds
// its own in registers and stores dQ. A part is read soon after it was written, memory needs no zeros, and
// the order is fixed. Of one key tile, the item has all of dQ, and stores it; that of queries without keys,
// too. Sequences of a ragged problem that relays have one each.
#pragma once

#include "kernels/bwd_sm90_sums.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Relay : BwdSm90Sums<Problem, Tiling> {
  using Base = BwdSm90Sums<Problem, Tiling>;
  using Base::Base;
  using Base::dq_slots;
  using Base::first_head;
  using Base::gives_orders;
  using Base::handed_on;
  using Base::hands_on;
  using Base::length;
  using Base::own_pieces;
  using Base::p;
  using Base::share_slots;
  using Base::shared;
  using Base::sum;
  using Base::work;
  using typename Base::DQPiece;
  using typename Base::HeadOfDQ;

  // Where a part is, among those of all heads that have a place.
  DLATTN_DEVICE int part(int i, int tile) const { return Base::slot(p, this->pair(work), i, tile); }

  // One tile has all keys, or those of a sequence: nothing is handed on, and nobody waits.
  DLATTN_DEVICE bool has_all_keys() const {
    return !hands_on || rows_of_gradients<Problem>(p) <= Base::tile_k;
  }

  // The writer: tells the next item of each part once it is there.
  DLATTN_DEVICE void hand_on(Place<dq_slots>& place) {
    if (has_all_keys()) return;
    this->await_place(work);
    fence_proxy_async_global();
    this->for_each_in_relay([&](int i, int tile) {
      if (tile < handed_on) return;
      const int at = part(i, tile);
#pragma unroll 1
      for (int piece = 0; piece < own_pieces; ++piece) {
        mbarrier_wait(shared.dq_ring.full[place.stage], place.parity);
        if (gives_orders()) {
          bulk_store(sum(at) + piece, shared_address(&shared.dQ[place.stage]), sizeof(DQPiece));
          tma_commit();
          tma_wait_read<0>();
        }
        __syncwarp();
        release(shared.dq_ring.empty[place.stage]);
        place.advance();
      }
      if (gives_orders()) {
        tma_wait<0>();
        add_release(p.dq_arrivals + at, 1);
      }
      __syncwarp();
    });
  }

  // Query tiles before this one attend to the keys of the item before, too.
  DLATTN_DEVICE int end_of_taken_over() const {
    if (work.tile == 0) return 0;
    return this->query_tiles({work.tile - 1, work.head, work.batch}, length, p).last;
  }

  // In the place of the counter: brings the other items' parts, and counts what this one stores.
  DLATTN_DEVICE void fetch_parts(uint32& fetched) {
    if (has_all_keys()) return;
    this->await_place(work);
    const int taken_over = uniform(end_of_taken_over());
    int stored = 0;
    this->for_each_in_relay([&](int i, int tile) {
      if (tile >= handed_on) return;
      ++stored;
      if (tile >= taken_over) return;
      const int at = part(i, tile);
      while (load_acquire(p.dq_arrivals + at) == 0) __nanosleep(20);
      fence_proxy_async_global();
      auto& ring = shared.parts_ring;
#pragma unroll 1
      for (int piece = 0; piece < own_pieces; ++piece) {
        const auto place = place_of<share_slots>(fetched++);
        order(ring, place, ring.full[place.stage], sizeof(DQPiece), [&](int slot, uint64& full) {
          bulk_load(shared_address(&shared.share_pieces[slot]), sum(at) + piece, sizeof(DQPiece),
                    full);
        });
      }
      // Pieces whose slots have been filled again have landed, and their barriers tell no more of them.
#pragma unroll
      for (int slot = 0; slot < least(share_slots, own_pieces); ++slot) {
        const auto place = place_of<share_slots>(fetched - 1 - slot);
        mbarrier_wait(ring.full[place.stage], place.parity);
      }
      if (gives_orders()) p.dq_arrivals[at] = 0;
      __syncwarp();
    });
    if (gives_orders()) add_release(p.dq_stored + p.shares.places.rest(this->pair(work)), stored);
    __syncwarp();
  }

  DLATTN_DEVICE auto own_head_of_dq(int i) const {
    if constexpr (Problem::ragged) {  // no register during the walk
      const auto& told = this->told();
      return HeadOfDQ{told.length_q, told.dQ + i * p.dQ.head};
    } else {
      return this->head_of_dq(work.batch, first_head() + i);
    }
  }

  // The query worker: a piece of a query tile's dQ, of which it has computed its own part.
  template <int n_tiles>
  DLATTN_DEVICE void store_whole(const Accumulator<1, n_tiles>& dQ, int first_column, int i,
                                 int tile, int piece, bool taken_over, uint32& taken) {
    const auto place = place_of<share_slots>(taken);
    if (taken_over) mbarrier_wait(shared.parts_ring.full[place.stage], place.parity);
    const auto& part = shared.share_pieces[place.stage].warp[Base::warp_of_group()];
    const auto whole = [&](int n) {
      const auto& d = dQ.at[0][first_column / 8 + n];
      float4 sum{d[0], d[1], d[2], d[3]};
      if (taken_over) {
        const float4 other = part.at[n][threadIdx.x % 32];
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
      }
      return sum;
    };
    this->store_piece(own_head_of_dq(i), tile, piece, whole, [](int) {});
    // Or the next product begins before that, and there are no registers for both.
    if constexpr (Problem::ragged) __syncwarp();
    if (!taken_over) return;
    __syncwarp();
    release(shared.parts_ring.empty[place.stage]);
    ++taken;
  }

  // Where one tile has all keys, the dQ of query tiles that attend to none, which are no step; of items in
  // parts, by the first.
  DLATTN_DEVICE void store_zeros() {
    if (!has_all_keys()) return;
    const Interval steps = this->query_tiles(this->own_item(), this->own_lengths(), p);
    if (this->own_tiles().first > steps.first) return;
    int all = ceil_div(p.seq_q, Base::tile_q);
    if constexpr (Problem::ragged) all = this->told().entry.query_tiles;
#pragma unroll 1
    for (int tile = 0; tile < all; ++tile) {
      if (tile == steps.first) tile = steps.last;
      if (tile >= all) return;
#pragma unroll 1
      for (int i = 0; i < p.heads_per_block.number; ++i) {
#pragma unroll 1
        for (int piece = 0; piece < own_pieces; ++piece) {
          this->store_piece(
              own_head_of_dq(i), tile, piece, [](int) { return float4{}; }, [](int) {});
        }
      }
    }
  }
};

}  // namespace dlattn
