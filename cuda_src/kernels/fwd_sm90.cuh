// Attention forward for Hopper: wgmma, TMA, warp specialisation (FlashAttention-3, section 3).
//
// A block has one producer warpgroup: a scheduler warp hands out query tiles, and a warp each drives
// the copy engine for q, k and v. Two to four consumer warpgroups have 64 rows of a tile each. Key
// tiles are walked from the last to the first, or upwards where the schedule says so. In the steady loop a
// consumer starts the scores of one tile, then the output of the tile before it, and turns the first into
// exponentials while the tensor cores work on the second. Exponentials are relative to a maximum of the
// tiles before: the scores of a tile are searched for a new one only where they are masked, or where a sum
// shows that it is due; everywhere if maxima are results.
#pragma once

#include "attn/epilogue.cuh"
#include "kernels/fwd_sm90_scores.cuh"
#include "ptx/grid.cuh"
#include "ptx/warpgroup.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct FwdSm90 : FwdSm90Scores<Problem, Tiling> {
  using Base = FwdSm90Scores<Problem, Tiling>;
  using Base::await_told;
  using Base::Base;
  using Base::consumers;
  using Base::dim_v;
  using Base::first_row;
  using Base::m;
  using Base::make_probabilities;
  using Base::may_guess;
  using Base::o_slabs;
  using Base::p;
  using Base::position;
  using Base::q_stages;
  using Base::retake_scores;
  using Base::shared;
  using Base::stages;
  using Base::stages_bias;
  using Base::take_scores;
  using Base::warpgroup;
  using typename Base::Asked;
  using typename Base::Kept;
  using typename Base::OSlab;
  using typename Base::Output;
  using typename Base::OwnWork;
  using typename Base::Softmax;
  using typename Base::State;
  using typename Base::Sums;
  using typename Base::T;
  using typename Base::VTile;
  using typename Base::Work;

  // The next query tile is loaded while one is at work.
  static constexpr bool chains = q_stages > 1;

  DLATTN_DEVICE void await_turn() {
    if constexpr (Tiling::ping_pong) named_barrier_sync(Base::turn + opaque(warpgroup), 256);
  }
  DLATTN_DEVICE void pass_turn() {
    if constexpr (Tiling::ping_pong) {
      const int next = opaque(warpgroup) + 1;
      named_barrier_arrive(Base::turn + (next == consumers ? 0 : next), 256);
    }
  }

  // The key tile to visit after the one at work.
  DLATTN_DEVICE int tile_after(const State& state, const Work& work, int tile) const {
    return Base::Tiles::skips ? state.visit.next : tile + work.step();
  }

  // Starts them, and asks what a user's function masks, if it masks some: the answer is made while products
  // are under way.
  DLATTN_DEVICE Asked begin_scores(State& state, const Work& work, int tile,
                                   const ScoreValues& values) {
    mbarrier_wait(shared.k_ring.full[state.k.stage], state.k.parity);
    state.visit = this->visit(state.k.stage);
    await_turn();
    start_product(state.scores, shared.q[state.q.stage][warpgroup], 0, shared.k[state.k.stage]);
    Asked asked;
    if (state.visit.partial) asked = Asked(position(work, tile), values);
    return asked;
  }
  DLATTN_DEVICE Kept answer(const State& state, const Asked& asked) {
    if (state.visit.partial) return asked.kept();
    return {};
  }

  DLATTN_DEVICE void begin_output(State& state) {
    mbarrier_wait(shared.v_ring.full[state.v.stage], state.v.parity);
    start_accumulation(state.output, state.probabilities, shared.v[state.v.stage]);
  }

  DLATTN_DEVICE void end_scores(State& state, const Work& work, int tile) {
    release(shared.k_ring.empty[state.k.stage]);
    if (tile == work.stop()) release(shared.q_ring[warpgroup].empty[state.q.stage]);
    if constexpr (stages_bias) {
      release(shared.bias_ring[warpgroup].empty[0]);
      state.bias.advance();
    }
  }

  DLATTN_DEVICE void end_output(State& state) {
    wgmma_wait<0>();
    tie(state.output);
    release(shared.v_ring.empty[state.v.stage]);
    state.v.advance();
  }

  // The scores of one tile, and meanwhile the output of the tile before it. True if the output must
  // be rescaled.
  template <bool first>
  DLATTN_DEVICE bool step(State& state, const Work& work, int tile, const ScoreValues& values,
                          Softmax& softmax) {
    Sums sums;
    const Asked asked = begin_scores(state, work, tile, values);
    begin_output(state);
    pass_turn();
    const Kept kept = answer(state, asked);
    wgmma_wait<1>();
    bool grew = take_scores(state, sums, work, tile, first, kept, values, softmax);
    const bool retake = !first && !Softmax::exact && softmax.overflown(sums);
    // ptxas moves arithmetic below waits for wgmma, but keeps memory accesses in order with them. This
    // one depends on all exponentials: they stand before the wait if it does.
    if (Tiling::exponentials_first && !retake) end_scores(state, work, tile);
    end_output(state);
    if (!Tiling::exponentials_first && !retake) end_scores(state, work, tile);
    if (retake) {
      grew = retake_scores(state, sums, work, tile, values, softmax);
      end_scores(state, work, tile);
    }
    state.k.advance();
    softmax.add(sums);
    make_probabilities(state, work, tile);
    return grew;
  }

  // Tiles of keys that others of the block attend to, and this consumer's rows do not.
  DLATTN_DEVICE void pass_keys(State& state) {
    mbarrier_wait(shared.k_ring.full[state.k.stage], state.k.parity);
    await_turn();
    pass_turn();
    release(shared.k_ring.empty[state.k.stage]);
    state.k.advance();
  }
  DLATTN_DEVICE void pass_values(State& state) {
    mbarrier_wait(shared.v_ring.full[state.v.stage], state.v.parity);
    release(shared.v_ring.empty[state.v.stage]);
    state.v.advance();
  }
  DLATTN_DEVICE void pass_tiles(State& state, int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      pass_keys(state);
      pass_values(state);
    }
  }

  DLATTN_DEVICE OwnWork await_own(const State& state) const {
    return uniform(await_told(state.item).own[warpgroup]);
  }

  // The first scores of a query tile, with no output of another to compute meanwhile.
  DLATTN_DEVICE void begin_chain(State& state, const Work& work, const ScoreValues& values,
                                 Softmax& softmax) {
    const Asked asked = begin_scores(state, work, work.start(), values);
    pass_turn();
    const Kept kept = answer(state, asked);
    wgmma_wait<0>();
    Sums sums;
    take_scores(state, sums, work, work.start(), true, kept, values, softmax);
    softmax.add(sums);
    end_scores(state, work, work.start());
    state.k.advance();
    make_probabilities(state, work, work.start());
  }

  // The query tiles of a block are chains of key tiles: the first scores of a query tile stand over
  // the last output of the one before, if they were loaded meanwhile.
  DLATTN_DEVICE void attend() {
    const ScoreValues values(p);
    const float factor = Problem::Score::factor(values);
    if (Tiling::ping_pong && warpgroup == consumers - 1) named_barrier_arrive(Base::turn, 256);

    State state;
    OwnWork work = await_own(state);
    while (work.item.tile >= 0) {
      Softmax softmax(factor);
      state.guess = may_guess(values);
      mbarrier_wait(shared.q_ring[warpgroup].full[state.q.stage], state.q.parity);
      pass_tiles(state, work.unseen_before);
      if (work.empty()) {
        release(shared.q_ring[warpgroup].empty[state.q.stage]);
      } else {
        begin_chain(state, work, values, softmax);
      }
      for (bool more = true; more;) {
        state.output.clear();
#pragma unroll 1
        for (int tile = tile_after(state, work, work.start()); work.visits(tile);
             tile = tile_after(state, work, tile)) {
          if (step<false>(state, work, tile, values, softmax)) {
            softmax.rescale(state.output, state.factor);
          }
        }
        Softmax next_softmax(factor);
        const int finished = state.item.stage;
        state.item.advance();
        state.q.advance();
        state.guess = may_guess(values);
        const OwnWork next = await_own(state);
        const int unseen = work.unseen_after + next.unseen_before;
        // Others cannot go on for ever without the values that are still to be read.
        more = chains && next.item.tile >= 0 && !next.empty() && !work.empty() && unseen < stages;
        if (more) {
          mbarrier_wait(shared.q_ring[warpgroup].full[state.q.stage], state.q.parity);
#pragma unroll 1
          for (int i = 0; i < unseen; ++i) pass_keys(state);
          step<true>(state, next, next.start(), values, next_softmax);
#pragma unroll 1
          for (int i = 0; i < unseen; ++i) pass_values(state);
        } else {
          if (!work.empty()) {
            begin_output(state);
            end_output(state);
          }
          pass_tiles(state, work.unseen_after);
        }
        work = next;
        store(uniform(shared.told[finished].own[warpgroup]), softmax, state.output);
        release(shared.item_ring.empty[finished]);
        softmax = next_softmax;
        __syncwarp();  // ptxas then knows that stages are the same in all lanes: uniform registers
      }
    }
    if (threadIdx.x % 32 == 0) tma_wait_read<0>();
  }

  // Where blocks share keys: true if this one has all of the rows.
  DLATTN_DEVICE bool gather_parts(const WorkItem& item, Softmax& softmax, Output& output) {
    const typename Base::Parts parts{p.parts, opaque(threadIdx.x - 128)};
    if constexpr (Tiling::shares_more) {
      if (p.parts.tiles != nullptr) {
        parts.leave_behind(item.parts, softmax, output);
        return false;
      }
    }
    const bool in_groups = Tiling::shares_more && p.items_taken != nullptr;  // as KeyDivision says
    return parts.gather(item.parts, in_groups, softmax, output);
  }

  // What the map of the output has not got, the copy engine does not store.
  DLATTN_DEVICE void store(const Work& work, Softmax& softmax, Output& output) {
    const auto rows = Base::rows_from(p, first_row());
    // Or they are those of another consumer or warp once more.
    const bool exist = !work.queries.empty() && rows.head < work.heads;
    if (!exist) return;
    const WorkItem at = work.item;
    if (Base::shares_keys && at.parts != 0 && !gather_parts(at, softmax, output)) return;
    const int head = at.head + rows.head, first = work.queries.first + rows.first;
    const int length_q = work.length.q;
    finish_rows<Problem>(p, at.batch, head, first, length_q, softmax, output);
    if (first >= p.o.template stored_rows<Problem::ragged>(length_q, p.seq_q)) return;
    const MappedEntry entry = p.template mapped_entry<Problem::ragged>(Mapped::o, at.batch);
#pragma unroll
    for (int slab = 0; slab < VTile::slabs; slab += o_slabs) {
      store_slabs(output, slab, entry.row + first, head, entry.batch);
    }
  }

  // As many as there is room for, through this warp's rows of it.
  DLATTN_DEVICE void store_slabs(Output& output, int first, int row, int head, int batch) {
    const int lane = opaque(threadIdx.x % 32);  // or addresses are held, or spilled, between tiles
    const OSlab& staged = shared.o[warpgroup][0];
    const uint32 unit = opaque(staged.unit_address(first_row() + lane % 16, lane / 16));
    const uint32 rows = staged.address() + first_row() * OSlab::pitch;
    const int slabs = least(o_slabs, VTile::slabs - first);
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab) {
#pragma unroll
      for (int n = 0; n < least(8, dim_v / 8 - 8 * (first + slab)); n += 2) {
        store_columns<T>(OSlab::other_unit(unit, n) + slab * OSlab::bytes, output,
                         8 * (first + slab) + n);
      }
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        tma_store_4d(m.o, rows + slab * OSlab::bytes, 64 * (first + slab), row, head, batch);
      }
      tma_commit();
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void fwd_sm90(const MappedFwdParams& params) {
  using Kernel = FwdSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(params, shared);
  kernel.init();
  if constexpr (Problem::ragged || Kernel::Tiles::skips || Tiling::shares_more) {
    await_kernel_before();
  }
  if constexpr (Tiling::shares_more) launch_dependents();
  if (warp_index() / 4 == 0) {
    give_registers<Kernel::producer_registers>();
    kernel.produce();
  } else {
    take_registers<Kernel::consumer_registers>();
    kernel.attend();
  }
}

}  // namespace dlattn
