// The query worker of a Hopper backward block: the warpgroup that computes dQ.
#pragma once

#include "kernels/bwd_sm90_sums.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Queries : BwdSm90Sums<Problem, Tiling> {
  using Base = BwdSm90Sums<Problem, Tiling>;
  using Base::Base;
  using Base::dq_slots;
  using Base::ds_stages;
  using Base::own_columns;
  using Base::p;
  using Base::piece_columns;
  using Base::shared;
  using Base::slab_columns;
  using Base::tile_q;
  using Base::tiles;
  using typename Base::ShareWalk;
  using typename Base::T;

  // Starts 64 rows of dQ = dS K, and some columns of a slab.
  template <int n_tiles>
  DLATTN_DEVICE void start_dq(Accumulator<1, n_tiles>& dQ, int first_row, int first_column,
                              int stage) {
    wgmma_fence();
    add_product(dQ, first_row, Base::rank(), shared.k[0], first_column, stage, false);
    if constexpr (Base::cluster > 1) {
      add_product(dQ, first_row, 1 - Base::rank(), shared.other_k[0],
                  first_column - Base::first_other_column(), stage, true);
    }
    wgmma_commit();
  }
  // Of the keys of a block.
  template <int n_tiles, class Tile>
  DLATTN_DEVICE void add_product(Accumulator<1, n_tiles>& dQ, int first_row, int block,
                                 const Tile& tile, int first_column, int stage, bool accumulate) {
    auto& d = reinterpret_cast<float (&)[4 * n_tiles]>(dQ.at);
    constexpr int k_steps = Base::block_k / 16;
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      WgmmaShape<8 * n_tiles>::template shared_shared<T, 1>(
          d, shared.dS[stage].along_columns(first_row, block * k_steps + k),
          tile.along_rows_from(k, first_column), accumulate || k > 0);
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

  // Some of this block's columns of the dQ of a step and 64 queries, piece by piece.
  template <int columns>
  DLATTN_DEVICE void part_of_dq(uint32 step, int first_row, int first) {
    const int stage = step % ds_stages;
    Accumulator<1, columns / 8> dQ;
    start_dq(dQ, first_row, Base::column(first), stage);
    wgmma_wait<0>();
    tie(dQ);
    const bool is_last = first_row + 64 == tile_q && first + columns == own_columns;
    if (is_last) Base::release_in_all(shared.ds_ring.empty[stage]);
    const int before = first_row / 64 * own_columns + first;
#pragma unroll
    for (int column = 0; column < columns; column += piece_columns) {
      send(dQ, column, place_of<dq_slots>(step * Base::own_pieces + (before + column) / piece_columns));
    }
  }

  // The dQ of a step.
  DLATTN_DEVICE void step_of_dq(uint32 step) {
#pragma unroll
    for (int row = 0; row < tile_q; row += 64) {
#pragma unroll
      for (int first = 0; first < slab_columns; first += Base::product_columns) {
        part_of_dq<Base::product_columns>(step, row, first);
      }
      if constexpr (own_columns > slab_columns) {
        part_of_dq<own_columns - slab_columns>(step, row, slab_columns);
      }
    }
  }

  // How far the query worker has come.
  struct Queries {
    uint32 steps = 0;
    ShareWalk share;
  };

  DLATTN_DEVICE void work_on_queries(Queries& at) {
    this->begin_share(at.share);
#pragma unroll 1
    for (int i = 0; i < p.heads_per_block; i += p.heads_per_k) {
      // Even without tiles: or it would arrive at keys_read for these keys before the last ones' turn.
      mbarrier_wait(shared.k_ring.full[0], this->keys_parity(i));
      if constexpr (Base::cluster > 1) {
        mbarrier_wait(shared.other_k_ring.full[0], this->keys_parity(i));
      }
      int steps = uniform(p.heads_per_k * (tiles.last - tiles.first));
      const auto step = [&] {
        const auto await_ds = [&] {
          const auto place = place_of<ds_stages>(at.steps);
          mbarrier_wait(shared.ds_ring.full[place.stage], place.parity);
        };
        if constexpr (Base::share_slots > 0) {
          await_ds();
        } else {
          this->store_piece_beside(at.share, await_ds);
        }
        step_of_dq(at.steps++);
        if constexpr (Base::share_slots > 0) this->continue_share(at.share);
        return --steps > 0;
      };
      this->take_steps(i, i + p.heads_per_k, steps > 0, step);
      named_barrier_arrive(Base::keys_read, 128 * 3);
      if constexpr (Base::cluster > 1) release(shared.other_k_ring.empty[0]);
    }
    this->finish_share(at.share);
  }
};

}  // namespace dlattn
