// What the key workers of a Hopper backward block hand on: weights to each other, dS to the query worker,
// dK and dV to memory.
#pragma once

#include "kernels/bwd_key_sums.cuh"
#include "kernels/bwd_sm90_queries.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Outputs : BwdSm90Queries<Problem, Tiling> {
  using Base = BwdSm90Queries<Problem, Tiling>;
  using Base::Base;
  using Base::block_k;
  using Base::by_product;
  using Base::cluster;
  using Base::dim_qk;
  using Base::dim_v;
  using Base::ds_stages;
  using Base::p;
  using Base::shared;
  using Base::tile_q;
  using typename Base::T;

  // Where dK and dV leave few registers, scores are made of half the queries at a time.
  static constexpr bool few_registers = !by_product && dim_qk + dim_v > 256;
  static constexpr int parts = few_registers ? 2 : 1, part_q = tile_q / parts;
  using Scores = Accumulator<1, part_q / 8>;  // keys by queries
  using Rounded = RegisterLeft<T, 1, part_q / 16>;

  // Where a piece of the scores begins, in the tiles of queries and keys: 64 keys, part_q queries.
  struct Piece {
    int query, key;
  };

  static DLATTN_DEVICE int key_worker() { return Base::warpgroup_index() - 2; }

  // Of this key worker, where they divide the keys.
  DLATTN_DEVICE Piece own_piece(int part) const { return {part * part_q, 64 * key_worker()}; }
  // Of all warpgroups, where they divide the products.
  DLATTN_DEVICE Piece shared_piece(int block) const { return {0, 64 * block}; }

  // Transposed, queries by keys.
  DLATTN_DEVICE void store_ds(const Rounded& dS, int stage, Piece piece) {
    // Computed anew: a register costs more. Of unsigned numbers, whose quotients are shifts.
    const uint32 thread = opaque(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
    const uint32 row = uint32(piece.query) + lane / 16 * 8 + lane % 8;
    const uint32 key = uint32(piece.key) + Base::rank() * block_k;
    const uint32 unit = key / 8 + 2 * warp + lane / 8 % 2;
    const uint32 first = shared.dS[stage].unit_address(row, unit);
#pragma unroll
    for (int k = 0; k < part_q / 16; ++k) {
      const auto& r = dS.at[0][k];
      stmatrix_x4_transposed(first + k * 16 * 128, r[0], r[1], r[2], r[3]);
    }
  }

  DLATTN_DEVICE void offer_ds(int stage) {
    fence_proxy_async();
    __syncwarp();  // an arrival speaks for the writes of its own lane
    if constexpr (cluster == 1) {
      release(shared.ds_ring.full[stage]);
    } else {
      offer_ds_to_both(stage);
    }
  }

  // The query workers of both blocks need all of dS: the copy engine takes this block's to the other.
  DLATTN_DEVICE void offer_ds_to_both(int stage) {
    constexpr uint32 bytes = Base::DSTile::slab_bytes;
    uint64& full = shared.ds_ring.full[stage];
    if (Base::warp_of_group() != 0) {
      release(full);
      return named_barrier_arrive(Base::ds_staged, 128);
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(full, bytes);
    __syncwarp();
    named_barrier_sync(Base::ds_staged, 128);
    if (threadIdx.x % 32 == 0) {
      const int own = Base::rank(), other = 1 - own;
      const uint32 slab = shared.dS[stage].address() + own * bytes;
      bulk_copy_to_block(address_in_block(slab, other), slab, bytes,
                         address_in_block(shared_address(&full), other));
    }
    __syncwarp();
  }

  // Threads of the two workers that have the same place hold the same elements.
  DLATTN_DEVICE void send(const Rounded& weights, int block, const Place<ds_stages>& place) {
    auto& ring = shared.weights_ring[block];
    mbarrier_wait(ring.empty[place.stage], place.parity ^ 1);
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) {
      const auto& r = weights.at[0][k];
      shared.weights[place.stage].at[block][k][threadIdx.x % 128] = uint4{r[0], r[1], r[2], r[3]};
    }
    __syncwarp();
    release(ring.full[place.stage]);
  }
  DLATTN_DEVICE Rounded receive(int block, const Place<ds_stages>& place) {
    auto& ring = shared.weights_ring[block];
    mbarrier_wait(ring.full[place.stage], place.parity);
    Rounded weights;
#pragma unroll
    for (int k = 0; k < tile_q / 16; ++k) {
      const uint4 r = shared.weights[place.stage].at[block][k][threadIdx.x % 128];
      weights.at[0][k][0] = r.x;
      weights.at[0][k][1] = r.y;
      weights.at[0][k][2] = r.z;
      weights.at[0][k][3] = r.w;
    }
    __syncwarp();
    release(ring.empty[place.stage]);
    return weights;
  }

  // In a fixed order, items add to sums of their keys as their heads follow each other.
  static constexpr bool adds_in_turn = Tiling::adds_keys && Problem::deterministic;
  DLATTN_DEVICE void await_turn_on_keys() const {
    if constexpr (adds_in_turn) {
      const int turn = p.heads_per_block.quotient(p.heads_per_k.rest(this->first_head()));
      own_key_sums().await_turn(own_piece(0).key + Base::first_row_of_warp(), turn);
    }
  }
  DLATTN_DEVICE void end_turn_on_keys() const {
    if constexpr (adds_in_turn) {
      own_key_sums().end_turn(own_piece(0).key + Base::first_row_of_warp());
    }
  }
  DLATTN_DEVICE KeySums<Problem, Tiling> own_key_sums() const {
    using Sums = KeySums<Problem, Tiling>;
    if constexpr (Base::parts_of_groups) {
      return Sums(this->told().key_sums);
    } else {
      return Sums(p, opaque(this->work.batch), p.heads_per_k.quotient(this->first_head()),
                  this->work.tile);
    }
  }

  // Of the 64 keys from `first` on, from registers: the memory of keys and values is the next ones'.
  template <class Of, int n_tiles>
  DLATTN_DEVICE void store(Accumulator<1, n_tiles>& gradient, int first, int head) {
    const int row = first + Base::first_row_of_warp();
    if (Base::parts_of_groups || (Tiling::adds_keys && this->number() >= p.whole_items)) {
      own_key_sums().template add<Of>(gradient, row);
    } else {
      const int batch = opaque(this->work.batch);
      store_key_rows<Problem, Of>(gradient, this->first_stored_key() + row,
                                  this->template key_entry<Of>(batch), head, p);
    }
    gradient.clear();
  }
};

}  // namespace dlattn
