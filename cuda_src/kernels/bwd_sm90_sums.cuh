// The writer of a Hopper backward block: one warp that hands the query worker's pieces to the copy engine,
// which adds them to the sums: reductions from registers would hold up all other warps' shared memory until
// the queue to L2 has room. The counter tells other blocks what has been added: a release takes as long as
// a third of a step.
#pragma once

#include "kernels/bwd_sm90_loads.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Sums : BwdSm90Loads<Problem, Tiling> {
  using Base = BwdSm90Loads<Problem, Tiling>;
  using Base::Base;
  using Base::dq_slots;
  using Base::end_of_item;
  using Base::gives_orders;
  using Base::own_pieces;
  using Base::p;
  using Base::shared;
  using Base::sum;
  using Base::work;
  using typename Base::DQPiece;

  // Of this item, where additions have a fixed order.
  DLATTN_DEVICE int turn(int tile) const {
    const Interval all = this->visitors(tile, this->length);
    const int items = Base::last_keys_first ? all.last - 1 - work.tile : work.tile - all.first;
    return items * Base::cluster;
  }

  // Of this block's pieces in the whole.
  static DLATTN_DEVICE int place_in_sum(int piece) {
    if constexpr (Base::cluster == 1) return piece;
    if constexpr (own_pieces == 1) return Base::rank();
    return Base::column(piece * Base::piece_columns, Base::rank()) / Base::piece_columns;
  }

  // A step's additions are counted when so many pieces of the next step are on their way: a step late,
  // once they are surely done; in a fixed order sooner, because others wait for them.
  static constexpr int pieces_before_count = Problem::deterministic ? 1 : own_pieces;

  DLATTN_DEVICE void add_pieces(Place<dq_slots>& place) {
    uint32 told = 0;
    const auto tell = [&](int added) {
      const auto at = place_of<2>(told++);
      mbarrier_wait(shared.sums_ring.empty[at.stage], at.parity ^ 1);
      if (gives_orders()) shared.sums_added[at.stage] = added;
      __syncwarp();
      release(shared.sums_ring.full[at.stage]);
    };
    int pieces = 0, last = end_of_item;
    this->await_own_place(work);
    fence_proxy_async_global();
    this->for_each_tile([&](int i, int tile) {
      const int at = this->own_sum_tile(i, tile);
      if constexpr (Problem::deterministic) {
        const int own_turn = turn(tile);
        if (uniform(load_acquire(p.dq_arrivals + at)) < own_turn) {
          if (last != end_of_item) {
            await_additions<0>();
            tell(last);
            last = end_of_item;
          }
          while (load_acquire(p.dq_arrivals + at) < own_turn) __nanosleep(20);
          __syncwarp();
        }
      }
      if (!this->is_step(i, tile)) {
        if constexpr (Base::adds_steps_alone) return;
        if (last != end_of_item) {
          await_additions<0>();
          tell(last);
        }
        tell(at);
        last = end_of_item;
        return;
      }
#pragma unroll 1
      for (int piece = 0; piece < own_pieces; ++piece) {
        mbarrier_wait(shared.dq_ring.full[place.stage], place.parity);
        if (gives_orders()) {
          bulk_reduce_add(sum(at) + place_in_sum(piece), shared_address(&shared.dQ[place.stage]),
                          sizeof(DQPiece), L2::evict_last);
          tma_commit();
          tma_wait_read<dq_slots - 1>();
        }
        __syncwarp();
        // The slot of dq_slots - 1 pieces ago.
        if (++pieces >= dq_slots) release(shared.dq_ring.empty[(place.stage + 1) % dq_slots]);
        place.advance();
        if (piece == pieces_before_count - 1 && last != end_of_item) {
          await_additions<pieces_before_count>();
          tell(last);
        }
      }
      last = at;
    });
    // A tile that is no step may be the last.
    if (Base::Tiles::skips ? pieces > 0 : last != end_of_item) {
      await_additions<0>();
#pragma unroll
      for (int slot = 1; slot < dq_slots; ++slot) release(shared.dq_ring.empty[slot]);
      if (!Base::Tiles::skips || last != end_of_item) tell(last);
    }
    do {
      tell(end_of_item);
    } while (told % 4 != 0);
  }

  // All but the last `pending` pieces are in their sums.
  template <int pending>
  DLATTN_DEVICE void await_additions() {
    if (gives_orders()) tma_wait<pending>();
    __syncwarp();
  }
};

}  // namespace dlattn
