// What a consumer of a Hopper forward makes of scores: edits, masks, exponentials, and their repetition where
// a reference was too small.
#pragma once

#include "attn/signs.cuh"
#include "attn/softmax.cuh"
#include "attn/staged_bias.cuh"
#include "kernels/fwd_sm90_loads.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct FwdSm90Scores : FwdSm90Loads<Problem, Tiling> {
  using Base = FwdSm90Loads<Problem, Tiling>;
  using Base::Base;
  using Base::consumers;
  using Base::dim_qk;
  using Base::dim_v;
  using Base::first_query;
  using Base::first_row;
  using Base::item_stages;
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
  using typename Base::Visit;
  using typename Base::Work;

  using Scores = Accumulator<1, tile_k / 8>;
  using Output = Accumulator<1, dim_v / 8>;
  using Probabilities = RegisterLeft<T, 1, tile_k / 16>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;
  using Sums = Softmax::Sums;
  using Kept = dlattn::Kept<Problem>;
  using Asked = typename AskedOf<Problem, tile_k / 4, false>::Type;
  // Exponents come from raw products at once, but in the first tile of a row and where it has gaps.
  static constexpr bool quick = Score::is_quick && !Softmax::exact;

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

  // Columns of a tile that some row of this warp attends to. Branches that skip the others gain nothing
  // in tiles of the 64 keys that three consumers have, for which four have no registers.
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
};

}  // namespace dlattn
