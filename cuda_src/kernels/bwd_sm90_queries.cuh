// The query worker of a Hopper backward block: the warpgroup that computes dQ.
#pragma once

#include "kernels/bwd_sm90_relay.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Queries : BwdSm90Relay<Problem, Tiling> {
  using Base = BwdSm90Relay<Problem, Tiling>;
  using Base::Base;
  using Base::dq_slots;
  using Base::ds_stages;
  using Base::own_columns;
  using Base::p;
  using Base::piece_columns;
  using Base::shared;
  using Base::tile_q;
  using Base::tiles;
  using typename Base::ShareWalk;
  using typename Base::T;

  // Starts 64 rows of dQ = dS K, in some of this block's columns: whole slabs, and what is left.
  template <int n_tiles>
  DLATTN_DEVICE void start_dq(Accumulator<1, n_tiles>& dQ, int first_row, int first, int stage) {
    constexpr int columns = 8 * n_tiles, rest = columns > 64 ? columns % 64 : 0;
    wgmma_fence();
    add_columns<0, columns - rest>(dQ, first_row, first, stage);
    if constexpr (rest > 0) add_columns<columns - rest, rest>(dQ, first_row, first, stage);
    wgmma_commit();
  }
  template <int offset, int columns, int n_tiles>
  DLATTN_DEVICE void add_columns(Accumulator<1, n_tiles>& dQ, int first_row, int first, int stage) {
    const int own = Base::rank(), column = Base::column(first + offset, own);
    auto& d = reinterpret_cast<float (&)[columns / 2]>(dQ.at[0][offset / 8]);
    add_product(d, first_row, own, shared.k[0], column, stage, false);
    if constexpr (Base::cluster > 1) {
      add_product(d, first_row, 1 - own, shared.other_k[0], column - Base::first_other_column(),
                  stage, true);
    }
  }
  // Of the keys of a block.
  template <int registers, class Tile>
  DLATTN_DEVICE void add_product(float (&dQ)[registers], int first_row, int block, const Tile& tile,
                                 int column, int stage, bool accumulate) {
    constexpr int k_steps = Base::block_k / 16;
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      WgmmaShape<2 * registers>::template shared_shared<T, 1>(
          dQ, shared.dS[stage].along_columns(first_row, block * k_steps + k),
          tile.along_rows_from(k, column), accumulate || k > 0);
    }
  }

  // Gives a piece to the writer, that begins with this column of the product.
  template <int n_tiles>
  DLATTN_DEVICE void send(const Accumulator<1, n_tiles>& dQ, int first_column,
                          const Place<dq_slots>& place) {
    mbarrier_wait(shared.dq_ring.empty[place.stage], place.parity ^ 1);
    auto& staged = shared.dQ[place.stage].warp[Base::warp_of_group()];
#pragma unroll
    for (int n = 0; n < piece_columns / 8; ++n) {
      const auto& d = dQ.at[0][first_column / 8 + n];
      staged.at[n][threadIdx.x % 32] = float4{d[0], d[1], d[2], d[3]};
    }
    fence_proxy_async();
    __syncwarp();
    release(shared.dq_ring.full[place.stage]);
  }

  // Some of this block's columns of the dQ of a step and 64 queries, piece by piece: give(dQ, column,
  // piece). end(): the step's products have been computed.
  template <int columns, class Give, class End>
  DLATTN_DEVICE void part_of_dq(uint32 step, int first_row, int first, Give give, End end) {
    const int stage = step % ds_stages;
    Accumulator<1, columns / 8> dQ;
    start_dq(dQ, first_row, first, stage);
    wgmma_wait<0>();
    tie(dQ);
    const bool is_last = first_row + 64 == tile_q && first + columns == own_columns;
    if (is_last) {
      Base::release_in_all(shared.ds_ring.empty[stage]);
      end();
    }
    const int before = first_row / 64 * own_columns + first;
#pragma unroll
    for (int column = 0; column < columns; column += piece_columns) {
      give(dQ, column, (before + column) / piece_columns);
    }
  }

  // The dQ of a step.
  template <class Give, class End>
  DLATTN_DEVICE void step_of_dq(uint32 step, Give give, End end) {
    constexpr int columns = Base::product_columns, rest = own_columns % columns;
#pragma unroll
    for (int row = 0; row < tile_q; row += 64) {
#pragma unroll
      for (int first = 0; first + columns <= own_columns; first += columns) {
        part_of_dq<columns>(step, row, first, give, end);
      }
      if constexpr (rest > 0) part_of_dq<rest>(step, row, own_columns - rest, give, end);
    }
  }

  // How far the query worker has come.
  struct Queries {
    uint32 steps = 0;
    ShareWalk share;
    uint32 handed_on = 0, taken_over = 0;  // pieces of a relay
  };

  DLATTN_DEVICE void await_ds(const Queries& at) {
    const auto place = place_of<ds_stages>(at.steps);
    mbarrier_wait(shared.ds_ring.full[place.stage], place.parity);
  }

  // Then keys are free before the last step's dQ is on its way.
  static constexpr bool knows_last_step = !Base::Tiles::skips;

  DLATTN_DEVICE void work_in_relay(Queries& at) {
    const auto free_keys = [&] { Base::release_after_walk(shared.k_ring.empty[0]); };
    mbarrier_wait(shared.k_ring.full[0], this->keys_parity(0));
    const int end_of_taken_over = Base::hands_on ? uniform(Base::end_of_taken_over()) : 0;
    int steps = uniform(p.heads_per_block.number * (tiles.last - tiles.first));
    if (steps == 0) free_keys();
    this->for_each_tile([&](int i, int tile) {
      await_ds(at);
      step_of_dq(
          at.steps++,
          [&](const auto& dQ, int column, int piece) {
            if (Base::hands_on && tile >= Base::handed_on) {
              send(dQ, column, place_of<dq_slots>(at.handed_on++));
            } else {
              const bool taken_over = Base::hands_on && tile < end_of_taken_over;
              this->store_whole(dQ, column, i, tile, piece, taken_over, at.taken_over);
            }
          },
          [&] {
            if (--steps == 0) free_keys();
          });
    });
    this->store_zeros();
  }

  DLATTN_DEVICE void work_on_queries(Queries& at) {
    if constexpr (Base::relays) return work_in_relay(at);
    this->begin_share(at.share);
#pragma unroll 1
    for (int i = 0; i < p.heads_per_block.number; i += this->heads_of_keys()) {
      // Even without tiles: or these keys would be free before they are there.
      mbarrier_wait(shared.k_ring.full[0], this->keys_parity(i));
      if constexpr (Base::cluster > 1) {
        mbarrier_wait(shared.other_k_ring.full[0], this->keys_parity(i));
      }
      const auto free_keys = [&] {
        Base::release_after_walk(shared.k_ring.empty[0]);
        if constexpr (Base::cluster > 1) release(shared.other_k_ring.empty[0]);
      };
      int steps = uniform(this->heads_of_keys() * (tiles.last - tiles.first));
      const auto step = [&] {
        if constexpr (Base::share_slots > 0 || Tiling::shares_last) {
          await_ds(at);
        } else {
          this->store_piece_beside(at.share, [&] { await_ds(at); });
        }
        const uint32 before = at.steps++;
        step_of_dq(
            before,
            [&](const auto& dQ, int column, int piece) {
              send(dQ, column, place_of<dq_slots>(before * Base::own_pieces + piece));
            },
            [&] {
              if (knows_last_step && steps == 1) free_keys();
            });
        if constexpr (Base::share_slots > 0) this->continue_share(at.share);
        return --steps > 0;
      };
      if (knows_last_step && steps == 0) free_keys();
      this->take_steps(i, i + this->heads_of_keys(), steps > 0, step);
      if constexpr (!knows_last_step) free_keys();
    }
    if constexpr (!Tiling::shares_last) this->finish_share(at.share);
  }
};

}  // namespace dlattn
