// Attention backward for Hopper: wgmma, TMA, warp specialisation.
//
// A block owns some keys and walks the query tiles of every query head that shares them, so that dK and
// dV stay in registers across a whole group. Scores are transposed, keys by queries: probabilities and
// dS are then left operands in registers of
//   dV += P^T dO, dK += dS^T Q
// of which two warpgroups, the key workers, each take half: 64 of 128 keys, or, where the head
// dimensions leave no registers for both, one product, of 64 keys. Only dS passes through shared memory
// to a third warpgroup, the query worker (bwd_sm90_queries.cuh), which computes
//   dQ = dS K
// summed over key tiles in global memory (bwd_sm90_shares.cuh), or handed from item to item in narrow
// windows (bwd_sm90_relay.cuh).
#pragma once

#include "kernels/bwd_sm90_scores.cuh"
#include "ptx/grid.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90 : BwdSm90Scores<Problem, Tiling> {
  using Base = BwdSm90Scores<Problem, Tiling>;
  using Base::Base;
  using T = typename Base::T;
  using Score = typename Problem::Score;
  using Base::by_product;
  using Base::compute_probabilities;
  using Base::do_stages;
  using Base::drops;
  using Base::ds_stages;
  using Base::few_registers;
  using Base::key_worker;
  using Base::offer_ds;
  using Base::own_piece;
  using Base::p;
  using Base::parts;
  using Base::receive;
  using Base::relays;
  using Base::rounded;
  using Base::send;
  using Base::shared;
  using Base::shared_piece;
  using Base::stages;
  using Base::store;
  using Base::store_ds;
  using Base::tile_q;
  using Base::tiles;
  using Base::weighted;
  using typename Base::HeldKeys;
  using typename Base::Nothing;
  using typename Base::Piece;
  using typename Base::Rounded;
  using typename Base::RowStats;
  using typename Base::Scores;
  using typename Base::Weights;

  static constexpr int blocks = Base::block_k / 64;  // of keys
  using DK = Accumulator<1, Base::width_qk / 8>;     // of one block
  using DV = Accumulator<1, Base::width_v / 8>;

  static constexpr int most_columns = 192;  // of a product

  // How far a key worker has come.
  struct Steps {
    Place<stages> place;  // of q, and of what comes with it
    // Of dS, unless it follows from that of q.
    static constexpr bool ds_follows = ds_stages == stages || (ds_stages == 1 && stages == 2);
    Either<ds_follows, Nothing, Place<ds_stages>> ds;

    // In a ring of so many buffers.
    template <int n>
    DLATTN_DEVICE Place<n> in() const {
      if constexpr (n == stages) {
        return place;
      } else if constexpr (n == 1 && stages == 2) {
        return {0, uint32(place.stage)};
      } else {
        static_assert(n == ds_stages);
        return ds;
      }
    }
    DLATTN_DEVICE bool advance(bool more) {
      place.advance();
      if constexpr (!ds_follows) ds.advance();
      return more;
    }
  };

  // Starts dP - delta, once dO is there; or dP, of which some is dropped.
  DLATTN_DEVICE void start_dp(Scores& dP, const Steps& at, Piece piece) {
    const auto place = at.template in<do_stages>();
    const auto& dO = shared.dO[place.stage];
    if constexpr (drops) {
      mbarrier_wait(shared.do_ring.full[place.stage], place.parity);
      return start_product(dP, shared.v[0], piece.key, dO, piece.query);
    }
    const float* s_row_stats = shared.row_stats[at.place.stage];
    if constexpr (Tiling::stats_in_products) {
      ProductStats::start<ProductStats::minus_delta>(dP, s_row_stats, piece.query);
    } else {
      const RowStats minus_delta(s_row_stats + tile_q + piece.query);
      dP.for_each([&](float& value, int, int n, int i) { value = minus_delta.at[2 * n + i % 2]; });
    }
    mbarrier_wait(shared.do_ring.full[place.stage], place.parity);
    start_product<true>(dP, shared.v[0], piece.key, dO, piece.query);
  }

  DLATTN_DEVICE bool is_last(int stage) const {
    const bool last = shared.steps[stage].last;
    __syncwarp();
    return last;
  }

  // ---- Each key worker has 64 keys ----

  // One query tile of one head. False after the last of a walk. One of raw scores and dP is in flight
  // at a time: both take more registers than the query worker leaves.
  DLATTN_DEVICE bool step(DK& dK, DV& dV, const HeldKeys& held, const Steps& at,
                          const ScoreValues& values) {
    const int stage = at.place.stage;
    const auto do_place = at.template in<do_stages>();
    const auto ds_place = at.template in<ds_stages>();
    const Piece piece = own_piece(0);
    mbarrier_wait(shared.q_ring.full[stage], at.place.parity);
    Scores probability, dP;
    Weights weights;
    compute_probabilities(probability, weights, held, stage, piece, values);
    const Rounded rounded_p = rounded(probability, weights);
    const Rounded factors(weights);
    start_dp(dP, at, piece);
    start_accumulation<most_columns>(dV, rounded_p, shared.dO[do_place.stage]);
    wgmma_wait<1>();
    tie(dP);
    const Rounded dS = weighted(dP, factors, stage, piece);
    mbarrier_wait(shared.ds_ring.empty[ds_place.stage], ds_place.parity ^ 1);
    store_ds(dS, ds_place.stage, piece);
    start_accumulation<most_columns>(dK, dS, shared.q[stage]);
    offer_ds(ds_place.stage);
    return finish_step(dK, dV, stage, do_place.stage);
  }

  // The same in parts of the queries. While dP is there, no other product has registers.
  DLATTN_DEVICE bool step_in_parts(DK& dK, DV& dV, const HeldKeys& held, const Steps& at,
                                   const ScoreValues& values) {
    const int stage = at.place.stage;
    const auto do_place = at.template in<do_stages>();
    const auto ds_place = at.template in<ds_stages>();
    mbarrier_wait(shared.q_ring.full[stage], at.place.parity);
    mbarrier_wait(shared.ds_ring.empty[ds_place.stage], ds_place.parity ^ 1);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const Piece piece = own_piece(part);
      Scores probability, dP;
      Weights weights;
      compute_probabilities(probability, weights, held, stage, piece, values);
      start_dp(dP, at, piece);
      wgmma_wait<0>();
      tie(dP);
      const Rounded dS = weighted(dP, weights, stage, piece);
      const Rounded rounded_p = rounded(probability, weights);
      store_ds(dS, ds_place.stage, piece);
      start_accumulation<most_columns>(dV, rounded_p, shared.dO[do_place.stage], piece.query / 16);
      start_accumulation<most_columns>(dK, dS, shared.q[stage], piece.query / 16);
      if (part < parts - 1) {
        wgmma_wait<0>();
        tie(dV);
        tie(dK);
      }
    }
    offer_ds(ds_place.stage);
    return finish_step(dK, dV, stage, do_place.stage);
  }

  // Once dV and dK are there, in this order. False after the last step of a walk.
  DLATTN_DEVICE bool finish_step(DK& dK, DV& dV, int stage, int do_stage) {
    wgmma_wait<1>();
    tie(dV);
    Base::release_in_all(shared.do_ring.empty[do_stage]);
    const bool more = !is_last(stage);
    wgmma_wait<0>();
    tie(dK);
    Base::release_in_all(shared.q_ring.empty[stage]);
    return more;
  }

  // ---- One key worker has dV, the other dK, of one or two blocks of 64 keys ----

  DLATTN_DEVICE bool step_on_values(DV (&dV)[blocks], const Steps& at, const ScoreValues& values) {
    const int stage = at.place.stage;
    const auto do_place = at.template in<do_stages>();
    const auto ds_place = at.template in<ds_stages>();
    mbarrier_wait(shared.q_ring.full[stage], at.place.parity);
    bool more = true;
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      const Piece piece = shared_piece(block);
      Scores probability;
      Weights weights;
      compute_probabilities(probability, weights, HeldKeys(), stage, piece, values);
      send(Rounded(weights), block, ds_place);
      if (block == 0) mbarrier_wait(shared.do_ring.full[do_place.stage], do_place.parity);
      if (block == blocks - 1) {
        more = !is_last(stage);
        Base::release_in_all(shared.q_ring.empty[stage]);
      }
      start_accumulation<most_columns>(dV[block], rounded(probability, weights),
                                       shared.dO[do_place.stage]);
    }
    wgmma_wait<0>();
#pragma unroll
    for (DV& gradient : dV) tie(gradient);
    Base::release_in_all(shared.do_ring.empty[do_place.stage]);
    return more;
  }

  DLATTN_DEVICE bool step_on_keys(DK (&dK)[blocks], const Steps& at) {
    const int stage = at.place.stage;
    const auto do_place = at.template in<do_stages>();
    const auto ds_place = at.template in<ds_stages>();
    mbarrier_wait(shared.q_ring.full[stage], at.place.parity);
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      const Piece piece = shared_piece(block);
      Scores dP;
      start_dp(dP, at, piece);
      wgmma_wait<0>();
      tie(dP);
      if (block == blocks - 1) Base::release_in_all(shared.do_ring.empty[do_place.stage]);
      const Rounded dS = weighted(dP, receive(block, ds_place), stage, piece);
      if (block == 0) mbarrier_wait(shared.ds_ring.empty[ds_place.stage], ds_place.parity ^ 1);
      store_ds(dS, ds_place.stage, piece);
      start_accumulation<most_columns>(dK[block], dS, shared.q[stage]);
    }
    offer_ds(ds_place.stage);
    wgmma_wait<0>();
#pragma unroll
    for (DK& gradient : dK) tie(gradient);
    const bool more = !is_last(stage);
    Base::release_in_all(shared.q_ring.empty[stage]);
    return more;
  }

  // ---- All query heads of the item ----

  // Calls walk(i, last, some), once keys and values of heads i to last are there; some: for queries.
  template <class Walk>
  DLATTN_DEVICE void for_each_walk(Walk walk) {
    for (int i = 0; i < p.heads_per_block.number; i += this->heads_per_walk()) {
      mbarrier_wait(shared.k_ring.full[0], this->keys_parity(i));
      mbarrier_wait(shared.v_ring.full[0], this->values_parity(i));
      walk(i, i + this->heads_per_walk(), this->has_tiles());
    }
  }

  // The last head that shares keys, or values, is done: the next ones may be loaded.
  DLATTN_DEVICE void free_keys_and_values(int last) {
    if (this->ends_group(last, p.heads_per_v)) Base::release_after_walk(shared.v_ring.empty[0]);
    if (this->ends_group(last, p.heads_per_k)) Base::release_after_walk(shared.k_ring.empty[0]);
  }
  // Their gradients are stored then; of some blocks of keys.
  template <int n>
  DLATTN_DEVICE void store_dk(DK (&dK)[n], int first, int i, int last) {
    if (!this->ends_group(last, p.heads_per_k)) return;
    const int head = p.heads_per_k.quotient(this->first_head() + i);
#pragma unroll
    for (int block = 0; block < n; ++block) {
      this->template store<KeyGradients<Problem>>(dK[block], first + 64 * block, head);
    }
  }
  template <int n>
  DLATTN_DEVICE void store_dv(DV (&dV)[n], int first, int i, int last) {
    if (!this->ends_group(last, p.heads_per_v)) return;
    const int head = p.heads_per_v.quotient(this->first_head() + i);
#pragma unroll
    for (int block = 0; block < n; ++block) {
      this->template store<ValueGradients<Problem, Tiling>>(dV[block], first + 64 * block, head);
    }
  }

  // What follows the last head of a walk, whose keys and values are done: store() stores gradients.
  template <class Store>
  DLATTN_DEVICE void end_walk(int last, Store store) {
    free_keys_and_values(last);
    if constexpr (Tiling::shares_last) {
      typename Base::RowsAhead ahead;
      const bool ends_item = last == p.heads_per_block.number;
      if (ends_item) this->ask_for_share(ahead);
      store();
      if (ends_item) this->store_share(ahead);
    } else {
      store();
    }
  }

  DLATTN_DEVICE void work_on_keys_and_values(Steps& at) {
    const ScoreValues values(p);
    DK dK[1];
    DV dV[1];
    dK[0].clear();
    dV[0].clear();
    for_each_walk([&](int i, int last, bool some) {
      HeldKeys held;
      this->hold_keys(held, own_piece(0));
      this->take_steps(i, last, some, [&] {
        if constexpr (few_registers)
          return at.advance(step_in_parts(dK[0], dV[0], held, at, values));
        return at.advance(step(dK[0], dV[0], held, at, values));
      });
      end_walk(last, [&] {
        this->await_turn_on_keys();
        store_dv(dV, own_piece(0).key, i, last);
        store_dk(dK, own_piece(0).key, i, last);
        this->end_turn_on_keys();
      });
    });
  }

  DLATTN_DEVICE void work_on_values(Steps& at) {
    const ScoreValues values(p);
    DV dV[blocks];
#pragma unroll
    for (DV& gradient : dV) gradient.clear();
    for_each_walk([&](int i, int last, bool some) {
      this->take_steps(i, last, some, [&] { return at.advance(step_on_values(dV, at, values)); });
      end_walk(last, [&] { store_dv(dV, 0, i, last); });
    });
  }

  DLATTN_DEVICE void work_on_keys(Steps& at) {
    DK dK[blocks];
#pragma unroll
    for (DK& gradient : dK) gradient.clear();
    for_each_walk([&](int i, int last, bool some) {
      this->take_steps(i, last, some, [&] { return at.advance(step_on_keys(dK, at)); });
      end_walk(last, [&] { store_dk(dK, 0, i, last); });
    });
  }

  // ---- Who does what ----

  using Shares = BwdSm90Shares<Problem, Tiling>;
  using Stores = BwdSm90Stores<Problem, Tiling>;

  template <class... Arguments>
  static DLATTN_DEVICE void copy_and_add(int first_item, Arguments&... block) {
    switch (warp_index()) {
      case 0: {
        typename Base::template Loads<stages> loads;
        return Base::template take_items<BwdSm90>(
            first_item, block..., [&](auto& kernel) { kernel.load_keys_and_queries(loads); });
      }
      case 1: {
        typename Base::template Loads<do_stages> loads;
        return Base::template for_each_item<BwdSm90>(
            block..., [&](auto& kernel) { kernel.load_values_and_gradients(loads); });
      }
      case 2: {
        Place<Base::dq_slots> place;
        return Base::template for_each_item<BwdSm90>(block..., [&](auto& kernel) {
          if constexpr (relays) {
            kernel.hand_on(place);
          } else {
            kernel.add_pieces(place);
          }
        });
      }
      case 3:
        if constexpr (relays) {
          uint32 fetched = 0;
          return Base::template for_each_item<BwdSm90>(
              block..., [&](auto& kernel) { kernel.fetch_parts(fetched); });
        } else {
          return Base::template for_each_item<Shares>(
              block..., [&](auto& kernel) { kernel.count_additions(); });
        }
    }
  }

  template <class... Arguments>
  static DLATTN_DEVICE void work_on_queries_of_items(Arguments&... block) {
    typename Base::Queries queries;
    Base::template for_each_item<BwdSm90>(block...,
                                          [&](auto& kernel) { kernel.work_on_queries(queries); });
    if (!relays && Base::warp_of_group() == 0) Shares(block..., 0).prepare_rests();
  }

  template <class... Arguments>
  static DLATTN_DEVICE void work_on_keys_of_items(Arguments&... block) {
    Steps steps;
    Base::template for_each_item<BwdSm90>(block..., [&](auto& kernel) {
      if constexpr (!by_product) {
        kernel.work_on_keys_and_values(steps);
      } else if (key_worker() == 0) {
        kernel.work_on_values(steps);
      } else {
        kernel.work_on_keys(steps);
      }
    });
    if constexpr (!relays) Stores(block..., 0).store_rest();
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_sm90(const MappedBwdParams& params) {
  using Kernel = BwdSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel::init(shared);
  await_kernel_before();
  const int first_item = Kernel::ask_for_item(params.p);
  if (Kernel::warpgroup_index() == 0) {
    give_registers<24>();
    Kernel::copy_and_add(first_item, params, shared);
  } else if (Kernel::warpgroup_index() == 1) {
    give_registers<Tiling::query_registers>();
    Kernel::work_on_queries_of_items(params, shared);
  } else {
    take_registers<(512 - 24 - Tiling::query_registers) / 2>();
    Kernel::work_on_keys_of_items(params, shared);
  }
  if constexpr (Kernel::cluster >
                1) {  // its shared memory is there as long as the other block needs it
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace dlattn
