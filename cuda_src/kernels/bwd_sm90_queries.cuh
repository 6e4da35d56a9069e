// The query worker of a Hopper backward block: the warpgroup that computes dQ.
#pragma once

#include "kernels/bwd_sm90_sums.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Queries : BwdSm90Sums<Problem, Tiling> {
  using Base = BwdSm90Sums<Problem, Tiling>;
  using Base::Base;
  using Base::dim_qk;
  using Base::dq_pieces;
  using Base::dq_slots;
  using Base::ds_stages;
  using Base::p;
  using Base::piece_columns;
  using Base::shared;
  using Base::tile_q;
  using Base::tiles;
  using typename Base::DQ;
  using typename Base::ShareWalk;
  using typename Base::T;

  // Starts 64 rows of dQ = dS K, and 64 columns.
  DLATTN_DEVICE void start_dq(DQ& dQ, int first_row, int first_column, int stage) {
    auto& d = reinterpret_cast<float (&)[32]>(dQ.at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Base::tile_k / 16; ++k) {
      WgmmaShape<64>::template shared_shared<T, 1>(d, shared.dS[stage].along_columns(first_row, k),
                                                   shared.k[0].along_rows(k, first_column / 64),
                                                   k > 0);
    }
    wgmma_commit();
  }

  // Gives a piece to the writer, that begins with this column of the product.
  DLATTN_DEVICE void send(const DQ& dQ, int first_column, const Place<dq_slots>& place) {
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

  // The dQ of a step, piece by piece.
  DLATTN_DEVICE void step_of_dq(uint32 step) {
    const int stage = step % ds_stages;
#pragma unroll
    for (int i = 0; i < tile_q * dim_qk; i += 64 * 64) {
      DQ dQ;
      start_dq(dQ, i / 64 / dim_qk * 64, i / 64 % dim_qk, stage);
      wgmma_wait<0>();
      tie(dQ);
      if (i + 64 * 64 == tile_q * dim_qk) release(shared.ds_ring.empty[stage]);
#pragma unroll
      for (int column = 0; column < 64; column += piece_columns) {
        send(dQ, column, place_of<dq_slots>(step * dq_pieces + (i / 64 + column) / piece_columns));
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
    }
    this->finish_share(at.share);
  }
};

}  // namespace dlattn
