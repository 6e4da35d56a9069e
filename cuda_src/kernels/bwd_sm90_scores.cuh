// What the key workers of a Hopper backward block make of scores: probabilities, and weights of dP.
#pragma once

#include "attn/score_mask.cuh"
#include "attn/signs.cuh"
#include "attn/staged_bias.cuh"
#include "base/math.cuh"
#include "kernels/bwd_sm90_outputs.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Scores : BwdSm90Outputs<Problem, Tiling> {
  using Base = BwdSm90Outputs<Problem, Tiling>;
  using Base::Base;
  using T = typename Base::T;
  using Score = typename Problem::Score;
  using Base::by_product;
  using Base::few_registers;
  using Base::keys;
  using Base::length;
  using Base::p;
  using Base::part_q;
  using Base::shared;
  using Base::tile_q;
  using Base::work;
  using typename Base::Nothing;
  using typename Base::Piece;
  using typename Base::Rounded;
  using typename Base::Scores;
  using typename Base::Step;

  // What brings probabilities back to their size.
  static constexpr float lowering = 1.f / (1 << Tiling::template raised<T>);

  // Of a lane's columns.
  struct RowStats {
    float at[part_q / 4];
    DLATTN_DEVICE explicit RowStats(const float* s_row_stats) {
#pragma unroll
      for (int e = 0; e < part_q / 4; ++e) at[e] = s_row_stats[Scores::column(e / 2, e)];
    }
    DLATTN_DEVICE float2 columns(int n) const { return {at[2 * n], at[2 * n + 1]}; }
  };

  // The same, read where they are needed: edits need the registers.
  struct RowStatsInPlace {
    uint32 first;
    DLATTN_DEVICE explicit RowStatsInPlace(const float* s_row_stats)
        : first(shared_address(s_row_stats + Scores::column(0, 0))) {}
    DLATTN_DEVICE float2 columns(int n) const { return load_in_place(first + n * 8 * 4); }
  };

  // What dP is multiplied by: probabilities times the derivative of the edits, or where that is a
  // constant, the probabilities themselves. Their signs say which are dropped.
  static constexpr bool constant_derivative = Score::constant_derivative;
  static constexpr bool drops = Problem::Dropout::drops;
  static constexpr bool stats_in_products = Tiling::stats_in_products;
  using Weights = Either<constant_derivative && !drops && !stats_in_products, Scores, Rounded>;

  using LogSumExp = Either<constant_derivative && (!Score::reads_positions ||
                                                   (Score::is_quick && part_q <= 64 && !drops)),
                           RowStats, RowStatsInPlace>;

  // Turns raw scores into probabilities and weights.
  DLATTN_DEVICE void exponentiate(Scores& probability, Weights& weights, const Scores& raw,
                                  int stage, Piece piece, const LogSumExp& log_sum_exp,
                                  const Kept<Problem>& kept, const ScoreValues& values) {
    const Step step = shared.steps[stage];
    if constexpr (Score::is_quick) {
      exponentiate_quickly(probability, weights, raw, step, stage, piece, log_sum_exp, values);
    } else {
      exponentiate_edited(probability, weights, raw, step, piece, log_sum_exp, values);
    }
    // A soft cap alone has no register for it above; with positions, ptxas spills if it is read here.
    constexpr bool reread = !constant_derivative && !Score::reads_positions;
    if (reread ? shared.steps[opaque(stage)].masked : step.masked) {
      mask(step, piece, kept, [&](int e, int i) {
        zero(probability, e, i);
        if constexpr (!constant_derivative) zero(weights, e, i);
      });
    }
    if constexpr (constant_derivative) weights = Weights(probability);
  }

  // The same of scores that are only scaled, from which log-sum-exps have been subtracted: rounded at once,
  // which is all that is needed of them.
  static_assert(!stats_in_products ||
                (!by_product && !drops && same_type<Score, Edits<PositiveScale>>));
  DLATTN_DEVICE void exponentiate_differences(Weights& weights, const Scores& raw, int stage,
                                              Piece piece) {
    const Step step = shared.steps[stage];
    const float log2_factor = p.attn_scale * log2_e;
    const auto probability = [&](int n, int i) {
      return exp2_approx(raw.at[0][n][i] * log2_factor);
    };
#pragma unroll
    for (int n = 0; n < part_q / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        weights.at[0][n / 2][n % 2 * 2 + i / 2] =
            Convert<T>::pack(probability(n, i), probability(n, i + 1));
      }
    if (step.masked) mask(step, piece, {}, [&](int e, int i) { zero(weights, e, i); });
  }

  DLATTN_DEVICE void exponentiate_quickly(Scores& probability, Weights& weights, const Scores& raw,
                                          const Step& step, int stage, Piece piece,
                                          const LogSumExp& log_sum_exp, const ScoreValues& values) {
    // Columns that take one form together.
    constexpr int group = by_product || signs_last ? 2 : part_q / 8;
#pragma unroll
    for (int begin = 0; begin < part_q / 8; begin += group) {
      const auto products = [&](auto visit) {
#pragma unroll
        for (int n = begin; n < begin + group; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) visit(raw.at[0][n][i], i);
      };
      Score::in_form(Score::range(products), values, [&](auto form) {
#pragma unroll
        for (int n = begin; n < begin + group; ++n) {
          exponentiate_columns(probability, weights, raw, form, n, step, stage, piece, log_sum_exp,
                               values);
        }
      });
    }
  }

  // Of column n of each lane.
  template <class Form>
  DLATTN_DEVICE void exponentiate_columns(Scores& probability, Weights& weights, const Scores& raw,
                                          Form form, int n, const Step& step, int stage,
                                          Piece piece, const LogSumExp& log_sum_exp,
                                          const ScoreValues& values) {
    const float2 subtrahends = log_sum_exp.columns(n);
    const auto bias = bias_of_column(stage, piece, n);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto at = bias.element(position(step, piece, n, i + j), i + j);
        const float inner = Score::inner(form, raw.at[0][n][i + j], values);
        const float base = -(j == 0 ? subtrahends.x : subtrahends.y);
        probability.at[0][n][i + j] = exp2_approx(Score::outer(inner, at, values, base));
        weight[j] = probability.at[0][n][i + j] * Score::derivative(inner, values);
      }
      if constexpr (!constant_derivative) {
        weights.at[0][n / 2][n % 2 * 2 + i / 2] = Convert<T>::pack(weight[0], weight[1]);
      }
    }
  }

  // Gives a position, or one with the bias that is staged for it.
  struct NoBias {
    static DLATTN_DEVICE const Position& element(const Position& at, int) { return at; }
  };
  template <class Staged>
  struct BiasOfColumn {
    Staged staged;
    DLATTN_DEVICE auto element(const Position& at, int i) const {
      return biased(at, staged.element(i));
    }
  };
  // Of a lane's four elements of column n.
  DLATTN_DEVICE auto bias_of_column(int stage, Piece piece, int n) {
    if constexpr (Score::stages_bias) {
      const auto staged = staged_columns(shared.bias[stage], piece.query + 8 * n,
                                         piece.key + Base::first_row_of_warp());
      return BiasOfColumn<decltype(staged)>{staged};
    } else {
      return NoBias();
    }
  }

  DLATTN_DEVICE void exponentiate_edited(Scores& probability, Weights& weights, const Scores& raw,
                                         const Step& step, Piece piece,
                                         const LogSumExp& log_sum_exp, const ScoreValues& values) {
    const float log2_factor = Score::factor(values) * log2_e;
#pragma unroll
    for (int n = 0; n < part_q / 8; ++n) {
      const float2 subtrahends = log_sum_exp.columns(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = Score::apply(raw.at[0][n][i], position(step, piece, n, i), values);
        probability.at[0][n][i] =
            exp2_approx(score * log2_factor - (i % 2 == 0 ? subtrahends.x : subtrahends.y));
      }
      if constexpr (!constant_derivative) {
        weigh(weights, probability, raw, n, step, piece, values);
      }
    }
  }

  // Column n, at once: no register holds a raw score longer than its exponential.
  DLATTN_DEVICE void weigh(Rounded& weights, const Scores& probability, const Scores& raw, int n,
                           const Step& step, Piece piece, const ScoreValues& values) {
    const auto weight = [&](int i) {
      return Score::backward(probability.at[0][n][i], raw.at[0][n][i], position(step, piece, n, i),
                             values);
    };
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      weights.at[0][n / 2][n % 2 * 2 + i / 2] = Convert<T>::pack(weight(i), weight(i + 1));
    }
  }

  // Column e of a lane, in the lane's row i / 2.
  static DLATTN_DEVICE void zero(Scores& x, int e, int i) { x.at[0][e / 2][i + e % 2] = 0.f; }
  static DLATTN_DEVICE void zero(Rounded& x, int e, int i) {
    x.at[0][e / 4][e / 2 % 2 * 2 + i / 2] &= e % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
  }

  template <class Zero>
  DLATTN_DEVICE void mask(const Step& step, Piece piece, const Kept<Problem>& kept_by_function,
                          Zero zero) {
    const Position first = position(step, piece, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int key = first.key + Scores::row_step(0, i);
      const uint32 kept =
          kept_elements(Problem::Mask::queries({key, key + 1}, length, p), first.query) &
          kept_by_function.row(i);
#pragma unroll
      for (int e = 0; e < part_q / 4; ++e) {
        if ((kept >> e & 1) == 0) zero(e, i);
      }
    }
  }

  // What is asked of a user's function before a piece's products, and answered beside them.
  using Asked = typename AskedOf<Problem, part_q / 4, true>::Type;
  DLATTN_DEVICE Asked ask(int stage, Piece piece, const ScoreValues& values) {
    if constexpr (MasksElements<Problem>) {
      const Step step = shared.steps[stage];
      if (step.masked) return Asked(position(step, piece, 0, 0), values);
    }
    return {};
  }
  DLATTN_DEVICE Kept<Problem> answer(int stage, const Asked& asked) {
    if constexpr (MasksElements<Problem>) {
      if (shared.steps[stage].masked) return asked.kept();
    }
    return {};
  }

  DLATTN_DEVICE Position position(const Step& step, Piece piece, int n, int i) const {
    const int key = keys.first + piece.key + Base::first_row_of_warp() + Scores::row(0, 0);
    return {work.batch,
            step.head,
            length.q,
            length.kv,
            step.tile * tile_q + piece.query + Scores::column(0, 0),
            few_registers ? anew<Score>(key) : key,
            Scores::column_step(n, i),
            Scores::row_step(0, i)};
  }

  // The left operand of dV.
  static DLATTN_DEVICE Rounded rounded(const Scores& probability, const Weights& weights) {
    if constexpr (stats_in_products) {
      return weights;
    } else if constexpr (!drops) {
      return Rounded(probability);
    } else {
      Rounded kept = weights;
      if constexpr (!constant_derivative) {
        kept = Rounded(probability);
        copy_signs(kept, weights);
      }
      clear_dropped(kept);
      return kept;
    }
  }

  // What dropout does with a piece: computed while its scores are, or where a soft cap has no register
  // for it there, when they have become exponentials.
  using Signs = Either<drops, TransposedSigns<part_q>, Nothing>;
  static constexpr bool signs_last = drops && Score::is_quick && !constant_derivative;
  using FirstSigns = Either<signs_last, Nothing, Signs>;
  template <class Made>
  DLATTN_DEVICE Made signs(int stage, Piece piece) const {
    if constexpr (!same_type<Made, Nothing>) {
      const Step step = shared.steps[stage];
      constexpr bool spare_registers =
          tile_q == 64 && constant_derivative && !Score::reads_positions;
      const typename Problem::Dropout dropout(p, work.batch, step.head, length, spare_registers);
      return Made(dropout, step.tile * tile_q + piece.query,
                  keys.first + piece.key + Base::first_row_of_warp());
    } else {
      return {};
    }
  }

  // The keys of a key worker, where it has registers for them.
  static constexpr bool holds_keys = Tiling::keys_in_registers;
  using HeldKeys = Either<holds_keys, RegisterLeft<T, 1, Base::steps_qk / 16>, Nothing>;
  DLATTN_DEVICE void hold_keys(HeldKeys& held, Piece piece) const {
    if constexpr (holds_keys) load_left(held, shared.k[0], piece.key + Base::first_row_of_warp());
  }

  DLATTN_DEVICE void start_scores(Scores& raw, const HeldKeys& held, int stage, Piece piece) {
    if constexpr (stats_in_products) {
      ProductStats::start<ProductStats::score>(raw, shared.row_stats[stage], piece.query);
    }
    if constexpr (holds_keys) {
      start_product<stats_in_products>(raw, held, shared.q[stage], piece.query);
    } else {
      start_product<stats_in_products>(raw, shared.k[0], piece.key, shared.q[stage], piece.query);
    }
  }

  // S, exponentiated. Waits for all products.
  DLATTN_DEVICE void compute_probabilities(Scores& probability, Weights& weights,
                                           const HeldKeys& held, int stage, Piece piece,
                                           const ScoreValues& values) {
    const Asked asked = ask(stage, piece, values);
    Kept<Problem> kept;
    // By product, there are no registers for both.
    if constexpr (by_product) kept = answer(stage, asked);
    Scores raw;
    start_scores(raw, held, stage, piece);
    if constexpr (!by_product) kept = answer(stage, asked);
    const FirstSigns dropped = signs<FirstSigns>(stage, piece);
    if constexpr (part_q > 64) wgmma_wait<0>();                // few registers for both
    if constexpr (!constant_derivative && !Score::is_quick) {  // and for what preparing takes
      wgmma_wait<0>();
      tie(raw);
      // With positions, too, the scale has no register.
      Score::prepare(raw, Score::reads_positions ? ScoreValues(p) : values);
    }
    if constexpr (stats_in_products) {
      wgmma_wait<0>();
      tie(raw);
      return exponentiate_differences(weights, raw, stage, piece);
    }
    const LogSumExp log_sum_exp(shared.row_stats[stage] + piece.query);
    wgmma_wait<0>();
    tie(raw);
    exponentiate(probability, weights, raw, stage, piece, log_sum_exp, kept, values);
    if constexpr (signs_last) {
      signs<Signs>(stage, piece).mark(weights);
    } else if constexpr (drops) {
      dropped.mark(weights);
    }
  }

  // dS: dP by its weights.
  DLATTN_DEVICE Rounded weighted(Scores& dP, const Scores& weights, int, Piece) const {
    dP.for_each([&](float& value, int, int n, int i) { value *= lowering * weights.at[0][n][i]; });
    return Rounded(dP);
  }
  DLATTN_DEVICE Rounded weighted(Scores& dP, const Rounded& weights, int stage, Piece piece) const {
    if constexpr (stats_in_products && same_type<T, bf16>) return product(dP, weights);
    const RowStatsInPlace minus_delta(shared.row_stats[stage] + tile_q + piece.query);
#pragma unroll
    for (int n = 0; n < part_q / 8; ++n) {
      float2 addends;
      if constexpr (drops) addends = minus_delta.columns(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32 pair = weights.at[0][n / 2][n % 2 * 2 + i / 2];
        const float weight =
            lowering * (i % 2 == 0 ? Convert<T>::low(pair) : Convert<T>::high(pair));
        float& value = dP.at[0][n][i];
        value = drops ? weigh_dropped(weight, value, i % 2 == 0 ? addends.x : addends.y)
                      : value * weight;
      }
    }
    return Rounded(dP);
  }

  // Rounded before, too: two at a time, and no weight is a number again. In fp16, gradients are too small.
  static DLATTN_DEVICE Rounded product(const Scores& dP, const Rounded& weights) {
    Rounded dS;
#pragma unroll
    for (int k = 0; k < part_q / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&value)[4] = dP.at[0][2 * k + i / 2];
        const uint32 pair = Convert<bf16>::pack(value[i % 2 * 2], value[i % 2 * 2 + 1]);
        dS.at[0][k][i] = Convert<bf16>::multiply(pair, weights.at[0][k][i]);
      }
    return dS;
  }
};

}  // namespace dlattn
