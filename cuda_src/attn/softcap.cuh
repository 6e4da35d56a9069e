// Hyperbolic tangents of a tile of scores, for the soft cap.
//
// As exact as float32 allows: multiplied by a cap of 50, the 2^-11 of tanh.approx would move
// probabilities by more than their rounding does. With two more special functions an element, the
// exponentials of a forward would take longer than its products. But most scores are far below the
// cap, where a polynomial needs none; only groups of columns that hold a larger one take them.
#pragma once

#include "attn/position.cuh"
#include "base/math.cuh"
#include "ptx/math.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// Up to here the polynomial has an error of 2^-23.
inline constexpr float most_small_tanh = 0.5f;

DLATTN_DEVICE float small_tanh(float x) {
  const float square = x * x;
  float sum = fmaf(0.01799921877682209f, square, -0.05339105427265167f);
  sum = fmaf(sum, square, 0.1333051323890686f);
  sum = fmaf(sum, square, -0.3333331048488617f);
  return fmaf(sum, x * square, x);
}

// Of a magnitude above most_small_tanh: 1 - 2 / (1 + exp(2x)).
DLATTN_DEVICE float large_tanh(float x) {
  return fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(2.f * log2_e * x)), 1.f);
}

DLATTN_DEVICE float any_tanh(float x) {
  return fabsf(x) > most_small_tanh ? large_tanh(x) : small_tanh(x);
}

// By a whole warp.
template <int m_tiles, int n_tiles>
DLATTN_DEVICE void replace_by_tanh(Accumulator<m_tiles, n_tiles>& x) {
  constexpr int group = 4;  // of 8 columns, between two looks at the largest
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int first = 0; first < n_tiles; first += group) {
      const auto for_each = [&](auto visit) {
#pragma unroll
        for (int n = first; n < least(first + group, n_tiles); ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) visit(x.at[m][n][i]);
      };
      float largest = 0.f;
      for_each([&](float value) { largest = fmaxf(largest, fabsf(value)); });
      if (__any_sync(0xffffffffu, largest > most_small_tanh)) {
        for_each([](float& value) { value = any_tanh(value); });
      } else {
        for_each([](float& value) { value = small_tanh(value); });
      }
    }
}

// How a soft cap makes scores of raw products at once (attn/score.cuh says what a form is).
struct SoftCapForms {
  // By a series, unless a product is too large for it.
  struct Series {
    float highest;
    uint32 zero;
    // What comes next is not computed before `result`: ptxas would begin all elements of a tile at
    // once, and spill.
    DLATTN_DEVICE void follow(float result) {
      highest = __uint_as_float(__float_as_uint(highest) | (__float_as_uint(result) & zero));
    }
    DLATTN_DEVICE bool failed(const ScoreValues&) const { return false; }
    DLATTN_DEVICE float ratio(float raw, const ScoreValues& values) {
      return values.p.softcap_series.ratio(raw, highest);
    }
  };
  // By a shorter one. Its variables have one exponent where it holds: their bits tell of all of them.
  struct ShortSeries : Series {
    uint32 bits = 0;
    DLATTN_DEVICE bool failed(const ScoreValues& values) const {
      const uint32 expected = __float_as_uint(values.p.softcap_series.few_below);
      return ((bits ^ expected) & 0x7f800000u) != 0;
    }
    DLATTN_DEVICE float ratio(float raw, const ScoreValues& values) {
      const float variable = values.p.softcap_series.few_variable(raw);
      bits |= __float_as_uint(variable);
      return values.p.softcap_series.few_ratio(variable, this->highest);
    }
  };
  struct Exact {
    DLATTN_DEVICE void follow(float) {}
    DLATTN_DEVICE bool failed(const ScoreValues&) const { return false; }
  };
  static DLATTN_DEVICE bool can_guess(const ScoreValues& values) {
    return values.p.softcap_series.few_below > 0.f;
  }
  static DLATTN_DEVICE ShortSeries guess(const ScoreValues& values) {
    return {{values.p.softcap_series.few[2], values.p.softcap_series.zero}};
  }
  struct Range {
    float largest[4];  // at once: one would wait for itself
  };
  template <class Some>
  static DLATTN_DEVICE Range range(Some some) {
    Range r{};
    some([&](float raw, int i) { r.largest[i] = fmaxf(r.largest[i], fabsf(raw)); });
    return r;
  }
  template <class Take>
  static DLATTN_DEVICE void in_form(const Range& r, const ScoreValues& values, Take take) {
    const float largest =
        fmaxf(fmaxf(r.largest[0], r.largest[1]), fmaxf(r.largest[2], r.largest[3]));
    if (__all_sync(0xffffffffu, largest * largest < values.p.softcap_series.few_below)) {
      take(guess(values));
    } else if (__any_sync(0xffffffffu, largest > values.p.softcap_series.most)) {
      take(Exact());
    } else {
      take(Series{values.p.softcap_series.of[3], values.p.softcap_series.zero});
    }
  }
};

template <class... Pack>
struct Edits;
template <class Scale, class... Rest>
struct Scaled;
template <class... Rest>
struct Before;

// softcap * tanh(score / softcap). Always right after the scale: a pack prepares tiles of
// hyperbolic tangents, of which the derivative is made, too.
struct SoftCap {};

template <class Scale, class... Rest>
struct Scaled<Scale, SoftCap, Rest...> : Before<Rest...>, SoftCapForms {
  static constexpr bool constant_derivative = false;
  template <bool rarely = false, class Tile>
  static DLATTN_DEVICE void prepare(Tile& raw, const ScoreValues& values) {
    const float factor = Scale::of(values) * values.p.softcap_inverse;
    if constexpr (rarely) {
      const auto products = [&](auto visit) {
        raw.for_each([&](float x, int, int, int i) { visit(x, i); });
      };
      const float to_tanh = values.p.softcap_series.inverse_bound;
      in_form(range(products), values, [&](auto form) {
        float before = 0.f;
        raw.for_each([&](float& score, int, int n, int i) {
          score = inner(form, score, values) * to_tanh;
          if (n % 2 == 0 || i < 3) return;
          form.follow(before);
          before = score;
        });
      });
    } else {
      raw.for_each([&](float& score, int, int, int) { score *= factor; });
      replace_by_tanh(raw);
    }
  }
  template <class At>
  static DLATTN_DEVICE float apply(float tanh, const At& at, const ScoreValues& values) {
    if constexpr (sizeof...(Rest) == 0) return tanh;
    return Edits<Rest...>::apply(values.p.softcap * tanh, at, values);
  }
  static DLATTN_DEVICE float factor(const ScoreValues& values) {
    return sizeof...(Rest) == 0 ? values.p.softcap : 1.f;
  }
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float tanh, const At& at,
                                      const ScoreValues& values) {
    return Edits<Rest...>::backward(grad, values.p.softcap * tanh, at, values) *
           fmaf(-tanh, tanh, 1.f);
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
    return Scale::of(values);
  }

  using Forms = SoftCapForms;
  using Forms::can_guess;
  using Forms::guess;
  using Forms::in_form;
  using Forms::range;
  using typename Forms::Exact;
  using typename Forms::Range;
  static constexpr bool guesses = true;
  template <class Form>
  static DLATTN_DEVICE float inner(Form& form, float raw, const ScoreValues& values) {
    return raw * form.ratio(raw, values);
  }
  static DLATTN_DEVICE float inner(Exact&, float raw, const ScoreValues& values) {
    const float tanh = any_tanh(raw * (Scale::of(values) * values.p.softcap_inverse));
    return tanh * values.p.softcap_series.bound;
  }
  template <class At>
  static DLATTN_DEVICE float outer(float inner, const At& at, const ScoreValues& values,
                                   float base) {
    return Edits<Rest...>::keep(inner + Edits<Rest...>::add(base, at, values), at);
  }
  template <class Form, class At>
  static DLATTN_DEVICE float exponent(Form& form, float raw, const At& at,
                                      const ScoreValues& values, float base) {
    const float added = Edits<Rest...>::add(base, at, values);
    return Edits<Rest...>::keep(fmaf(raw, form.ratio(raw, values), added), at);
  }
  template <class At>
  static DLATTN_DEVICE float exponent(Exact& form, float raw, const At& at,
                                      const ScoreValues& values, float base) {
    return outer(inner(form, raw, values), at, values, base);
  }
  static DLATTN_DEVICE float derivative(float inner, const ScoreValues& values) {
    const float tanh = inner * values.p.softcap_series.inverse_bound;
    return fmaf(-tanh, tanh, 1.f);
  }
};

}  // namespace dlattn
