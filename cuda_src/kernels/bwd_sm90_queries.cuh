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
  using Base::dq_columns;
  using Base::dq_slots;
  using Base::ds_stages;
  using Base::p;
  using Base::shared;
  using Base::tile_q;
  using Base::tiles;
  using typename Base::DQ;
  using typename Base::ShareWalk;
  using typename Base::T;

  // Starts 64 rows of dQ = dS K, and dq_columns columns.
  DLATTN_DEVICE void start_dq(DQ& dQ, int first_row, int first_column, int stage) {
    auto& d = reinterpret_cast<float (&)[dq_columns / 2]>(dQ.at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Base::tile_k / 16; ++k) {
      WgmmaShape<dq_columns>::template shared_shared<T, 1>(
          d, shared.dS[stage].along_columns(first_row, k),
          shared.k[0].along_rows(k, first_column / 64), k > 0);
    }
    wgmma_commit();
  }

  // Gives a piece to the writer.
  DLATTN_DEVICE void send(const DQ& dQ, Place<dq_slots>& place) {
    mbarrier_wait(shared.dq_ring.empty[place.stage], place.parity ^ 1);
    auto& staged = shared.dQ[place.stage].warp[Base::warp_of_group()];
#pragma unroll
    for (int n = 0; n < dq_columns / 8; ++n) {
      const auto& d = dQ.at[0][n];
      staged.at[n][threadIdx.x % 32] = float4{d[0], d[1], d[2], d[3]};
    }
    fence_proxy_async();
    __syncwarp();
    release(shared.dq_ring.full[place.stage]);
    place.advance();
  }

  // The dQ of a step, piece by piece.
  DLATTN_DEVICE void step_of_dq(int stage, Place<dq_slots>& slot) {
#pragma unroll
    for (int row = 0; row < tile_q; row += 64) {
#pragma unroll
      for (int column = 0; column < dim_qk; column += dq_columns) {
        DQ dQ;
        start_dq(dQ, row, column, stage);
        wgmma_wait<0>();
        tie(dQ);
        const bool last = row + 64 == tile_q && column + dq_columns == dim_qk;
        if (last) release(shared.ds_ring.empty[stage]);
        send(dQ, slot);
      }
    }
  }

  DLATTN_DEVICE void finish_share(ShareWalk& share, WorkItem item) {
#pragma unroll 1
    while (share.next < share.last) this->continue_share(share, item);
  }

  // How far the query worker has come.
  struct Queries {
    Place<ds_stages> place;
    Place<dq_slots> slot;
    ShareWalk share;
  };

  DLATTN_DEVICE void work_on_queries(Queries& at) {
    auto& place = at.place;
    auto& share = at.share;
    const WorkItem earlier = this->item_of_share();
    this->begin_share(share, earlier);
    if constexpr (Base::share_in_slot) {
      mbarrier_wait(shared.dq_ring.empty[0], at.slot.parity ^ 1);
      finish_share(share, earlier);
    }
#pragma unroll 1
    for (int i = 0; i < p.heads_per_block; ++i) {
      // Even without tiles: or it would arrive at keys_read for these keys before the last ones' turn.
      mbarrier_wait(shared.k_ring.full[0], this->keys_parity(i));
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        mbarrier_wait(shared.ds_ring.full[place.stage], place.parity);
        step_of_dq(place.stage, at.slot);
        if constexpr (!Base::share_in_slot) this->continue_share(share, earlier);
        place.advance();
      }
      if ((i + 1) % p.heads_per_k == 0) named_barrier_arrive(Base::keys_read, 128 * 3);
    }
    finish_share(share, earlier);
  }
};

}  // namespace dlattn
