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
#include "attn/key_parts.cuh"
#include "attn/signs.cuh"
#include "attn/softmax.cuh"
#include "attn/staged_bias.cuh"
#include "kernels/fwd_sm90_loads.cuh"
#include "ptx/grid.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct FwdSm90 : FwdSm90Loads<Problem, Tiling> {
  using Base = FwdSm90Loads<Problem, Tiling>;
  using Base::await_told;
  using Base::Base;
  using Base::consumers;
  using Base::dim_qk;
  using Base::dim_v;
  using Base::first_query;
  using Base::first_row;
  using Base::item_stages;
  using Base::m;
  using Base::o_slabs;
  using Base::own_head;
  using Base::p;
  using Base::q_stages;
  using Base::shared;
  using Base::stages;
  using Base::stages_bias;
  using Base::tile_k;
  using Base::warpgroup;
  using T = typename Base::T;
  using Score = typename Base::Score;
  using typename Base::OSlab;
  using typename Base::OwnWork;
  using typename Base::Visit;
  using typename Base::VTile;
  using typename Base::Work;

  using Scores = Accumulator<1, tile_k / 8>;
  using Output = Accumulator<1, dim_v / 8>;
  using Probabilities = RegisterLeft<T, 1, tile_k / 16>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;
  using Sums = Softmax::Sums;
  using Kept = dlattn::Kept<Problem>;
  using Asked = typename AskedOf<Problem, tile_k / 4, false>::Type;
  // The next query tile is loaded while one is at work.
  static constexpr bool chains = q_stages > 1;
  // Exponents come from raw products at once, but in the first tile of a row and where it has gaps.
  static constexpr bool quick = Score::is_quick && !Softmax::exact;

  DLATTN_DEVICE void await_turn() {
    if constexpr (Tiling::ping_pong) named_barrier_sync(Base::turn + opaque(warpgroup), 256);
  }
  DLATTN_DEVICE void pass_turn() {
    if constexpr (Tiling::ping_pong) {
      const int next = opaque(warpgroup) + 1;
      named_barrier_arrive(Base::turn + (next == consumers ? 0 : next), 256);
    }
  }

  // Where the first element of this lane is.
  DLATTN_DEVICE Position position(const Work& work, int tile) {
    return {anew<Score>(work.item.batch),
            anew<Score>(own_head(work)),
            work.length.q,
            work.length.kv,
            anew<Score>(first_query(work)) + Scores::row(0, 0),
            anew<Score>(tile) * tile_k + Scores::column(0, 0)};
  }

  DLATTN_DEVICE void edit(Scores& scores, const Work& work, const ScoreValues& values, int tile) {
    Score::template prepare<quick>(scores, values);
    const Position first = position(work, tile);
#pragma unroll
    for (int begin = 0; begin < tile_k / 8; begin += 2) {
      for_each_element(scores, begin, first, [&](float& score, const auto& at, int) {
        score = Score::apply(score, at, values);
      });
    }
  }

  // Calls visit(score, position, i) in the 16 columns of accumulator tiles `pair` and the next.
  template <class Visit>
  DLATTN_DEVICE void for_each_element(Scores& scores, int pair, const Position& first,
                                      Visit visit) {
    const auto bias = staged_bias(pair);
#pragma unroll
    for (int n = pair; n < pair + 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Position at = first;
        at.down = Scores::row_step(0, i);
        at.right = Scores::column_step(n, i);
        if constexpr (stages_bias) {
          visit(scores.at[0][n][i], biased(at, bias.element(n - pair, i)), i);
        } else {
          visit(scores.at[0][n][i], at, i);
        }
      }
  }
  DLATTN_DEVICE auto staged_bias(int pair) {
    if constexpr (stages_bias) {
      return staged_rows(shared.bias[warpgroup], first_row(), 8 * pair);
    } else {
      return typename Base::Nothing();
    }
  }

  // Columns of a tile that some row of this warp attends to. Three consumers have no registers for
  // the branches that skip the others.
  using Columns = Either<consumers == 2, SeenColumns, AllColumns>;
  DLATTN_DEVICE Columns seen_columns(const Work& work, int tile) {
    if constexpr (consumers == 2) {
      const int first = first_query(work);
      const Interval keys = Problem::Mask::keys({first, first + 16}, work.length, p);
      return {{keys.first - tile * tile_k, keys.last - tile * tile_k}};
    } else {
      return {};
    }
  }

  DLATTN_DEVICE void mask(Scores& scores, const Work& work, int tile,
                          const Kept& kept_by_function) {
    const int first = first_query(work);
    const int first_key = tile * tile_k + Scores::column(0, 0);  // of this lane
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int query = first + Scores::row(0, i);
      const Interval keys = Problem::Mask::keys({query, query + 1}, work.length, p);
#pragma unroll
      for (int n = 0; n < tile_k / 8; n += 16) {
        const uint32 kept = kept_elements(keys, first_key + 8 * n) & kept_by_function.row(i);
#pragma unroll
        for (int e = 0; e < least(32, tile_k / 4 - 2 * n); ++e) {
          if ((kept >> e & 1) == 0) scores.at[0][n + e / 2][i + e % 2] = -infinity();
        }
      }
    }
  }

  static DLATTN_DEVICE bool may_guess(const ScoreValues& values) {
    if constexpr (Score::guesses) return Score::can_guess(values);
    return false;
  }

  // What a consumer carries from tile to tile.
  struct State {
    Scores scores;
    Probabilities probabilities;
    Output output;
    float factor[2];
    Place<item_stages> item;
    Place<q_stages> q;
    Place<stages> k, v;
    Place<1> bias;
    Visit visit;
    bool guess;  // at how scores are to be computed, until it was wrong
  };
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

  // Products become exponentials at once. A guess that was wrong leaves an infinite sum: that is how
  // exponentials that are too large are found, and the scores are computed once more.
  DLATTN_DEVICE Sums take_quickly(Scores& scores, const Work& work, int tile, bool guess,
                                  const ScoreValues& values, const Softmax& softmax) {
    constexpr int group = 2, tiles = tile_k / 8;
    const Position first = position(work, tile);
    Sums sums{};
    const auto take = [&](auto form) {
      float before = 0.f;
#pragma unroll
      for (int begin = 0; begin < tiles; begin += group) {
        for_each_element(scores, begin, first, [&](float& s, const auto& at, int i) {
          s = exp2_approx(Score::exponent(form, s, at, values, -softmax.reference[i / 2]));
          sums.of[i / 2] += s;
        });
        form.follow(before);
        before = scores.at[0][begin + group - 1][3];
      }
      if (form.failed(values)) sums.of[0] = infinity();
    };
    if constexpr (Score::guesses) {
      if (guess) {
        take(Score::guess(values));
        return sums;
      }
    }
    const auto range = Score::range(
        [&](auto visit) { scores.for_each([&](float raw, int, int, int i) { visit(raw, i); }); });
    Score::in_form(range, values, take);
    return sums;
  }

  // Scores that have arrived become exponentials, and enter the maxima if they are the first, have
  // gaps, or maxima must be exact. True if the output must be rescaled.
  DLATTN_DEVICE bool take_scores(State& state, Sums& sums, const Work& work, int tile, bool first,
                                 const Kept& kept, const ScoreValues& values, Softmax& softmax) {
    const bool all = !state.visit.partial && work.is_full(tile);
    tie(state.scores);
    if constexpr (stages_bias) {
      mbarrier_wait(shared.bias_ring[warpgroup].full[0], state.bias.parity);
    }
    if constexpr (quick) {
      if (!first && all) {
        sums = take_quickly(state.scores, work, tile, state.guess, values, softmax);
        return false;
      }
    }
    edit(state.scores, work, values, tile);
    if (all) {
      const bool grew = (first || Softmax::exact) && softmax.advance(state.scores, state.factor);
      sums = softmax.exponentiate(state.scores);
      return grew;
    }
    const Columns seen = seen_columns(work, tile);
    mask(state.scores, work, tile, kept);
    const bool grew = softmax.advance(state.scores, state.factor, seen);
    sums = softmax.exponentiate(state.scores, seen);
    return grew;
  }

  // The scores of this warp's rows once more; the other warps go on without it.
  DLATTN_DEVICE void repeat_scores(Scores& scores, int q_stage, int k_stage) {
    const int lane = opaque(threadIdx.x % 32), row = first_row() + lane % 16;
    scores.clear();
#pragma unroll 1
    for (int k = 0; k < dim_qk / 16; ++k) {
      uint32 a[4];
      ldmatrix_x4<false>(a, shared.q[q_stage][warpgroup].unit_address(row, 2 * k + lane / 16));
      const uint32 keys =
          shared.k[k_stage].unit_address(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2);
#pragma unroll
      for (int n = 0; n < tile_k / 8; n += 2) {
        uint32 b[4];
        ldmatrix_x4<false>(b,
                           keys + 8 * n * 128);  // rows of 128 bytes; the swizzle repeats every 8
        mma_m16n8k16<T>(scores.at[0][n], a, b[0], b[1]);
        mma_m16n8k16<T>(scores.at[0][n + 1], a, b[2], b[3]);
      }
    }
  }

  // Some score was far above the maxima of the tiles before, which is rare after the first tiles.
  DLATTN_DEVICE bool retake_scores(State& state, Sums& sums, const Work& work, int tile,
                                   const ScoreValues& values, Softmax& softmax) {
    if constexpr (Score::guesses) {
      state.guess &= __all_sync(0xffffffffu, sums.of[0] != infinity());
    }
    repeat_scores(state.scores, state.q.stage, state.k.stage);
    edit(state.scores, work, values, tile);
    const bool grew = softmax.advance(state.scores, state.factor);
    sums = softmax.exponentiate(state.scores);
    return grew;
  }

  // What the output is made of, from exponentials.
  DLATTN_DEVICE void make_probabilities(State& state, const Work& work, int tile) {
    state.probabilities = Probabilities(state.scores);
    if constexpr (Problem::Dropout::drops) {
      const typename Problem::Dropout dropout(p, work.item.batch, own_head(work), work.length,
                                              !Problem::Score::reads_positions);
      drop(state.probabilities, dropout, first_query(work), tile * tile_k);
    }
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
    const KeyParts<4 * consumers, dim_v / 8> parts{p.parts, opaque(threadIdx.x - 128)};
    if constexpr (Tiling::shares_more) {
      if (p.parts.tiles != nullptr) {
        parts.leave_behind(item.parts, softmax, output);
        return false;
      }
    }
    return parts.gather(item.parts, softmax, output);
  }

  // What the map of the output has not got, the copy engine does not store.
  DLATTN_DEVICE void store(const Work& work, Softmax& softmax, Output& output) {
    if (work.queries.empty() || !Base::has_head(work)) return;
    const WorkItem at = work.item;
    if (Base::shares_keys && at.parts != 0 && !gather_parts(at, softmax, output)) return;
    const int head = own_head(work), first = first_query(work), length_q = work.length.q;
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
  if constexpr (Problem::ragged || Kernel::Tiles::skips) await_kernel_before();
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
