// Score edits: pointwise changes of a score before the softmax.
//
// A pack is used through these, the first of them on all raw products of a tile that a warp has:
//   prepare(tile)            replaces raw products, in place, by what the other functions take;
//                            with less code if that is done rarely
//   apply(raw)               the score, except for a factor
//   factor()                 that factor: score = factor * apply(raw), always > 0
//   backward(grad, raw)      the gradient for raw from that of the score, except for a factor
//   gradient_factor()        that factor, applied once to dQ and dK
//   constant_derivative      backward() gives grad, whatever the score
//   reads_positions          what apply() gives depends on where the element is
// A pack that only multiplies by a positive number has it all in the factors, so that a kernel
// takes row maxima of raw products and folds the factor into the exponent.
//
// If is_quick, the exponent of an element can be had at once of its raw product: such arithmetic
// hides behind the exponentials.
//   range(some)                              what decides how to compute some elements
//   in_form(range, values, take)             calls take(form), with how to compute them
//   inner(form, raw, values)                 what all but the first part of the pack takes
//   outer(inner, at, values, base)           the score in log2 units, plus base
//   derivative(inner, values)                of the score by the product, except for a factor
#pragma once

#include "attn/params.cuh"
#include "attn/softcap.cuh"
#include "base/math.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

// Run-time values of the edits, read once per block.
struct ScoreValues {
  const Params& p;
  float scale;

  DLATTN_DEVICE explicit ScoreValues(const Params& params) : p(params), scale(params.scale()) {}
};

// Where an element is: so far from the first element that its thread has.
struct Position {
  int batch, head;
  int length_q, length_kv;
  int query, key;   // of the first element
  int down, right;  // constants, once loops are unrolled

  // key - query - shift, of which each thread converts one for all its elements.
  DLATTN_DEVICE float distance(int shift) const {
    return float(key - query - shift) + float(right - down);
  }
  // Inside the actual lengths; beyond them lies whatever the user left there, or no memory at all.
  DLATTN_DEVICE bool exists() const {
    return (query + down < length_q) & (key + right < length_kv);
  }
};

// The same, and its bias, which the kernel has read.
struct BiasedPosition : Position {
  float bias;
};

// A part of positions in a walk over tiles: what edits make of it is not held between tiles, where
// it would take registers from accumulators.
template <class Score>
DLATTN_DEVICE int anew(int value) {
  return Score::reads_positions ? opaque(value) : value;
}

// score * attn_scale: of any sign, or known to be greater than zero, and then no tensor. Always the
// first edit, which is how a pack treats it.
struct Scale {
  static DLATTN_DEVICE float of(const ScoreValues& values) { return values.scale; }
};
struct PositiveScale {
  static DLATTN_DEVICE float of(const ScoreValues& values) { return values.p.attn_scale; }
};

// softcap * tanh(score / softcap). Always right after the scale: a pack prepares tiles of
// hyperbolic tangents, of which the derivative is made, too.
struct SoftCap {};

// What is added to a score, whatever it is.
struct Added {
  static constexpr bool constant_derivative = true, reads_positions = true, reads_memory = false,
                        stages_bias = false;
  using BiasElement = unsigned short;  // of none
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float, const At&, const ScoreValues&) {
    return grad;
  }
};

// A slope of the head for each step from the diagonal. cuDNN's form is score + slope * (key - query);
// the symmetric one, FlashAttention's, score - slope * |query + len_kv - len_q - key|.
template <bool symmetric>
struct Alibi : Added {
  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    const float slope = values.p.alibi_slopes.at(at.batch, at.head);
    if constexpr (!symmetric) return fmaf(slope, at.distance(0), score);
    return fmaf(-slope, fabsf(at.distance(at.length_kv - at.length_q)), score);
  }

  static constexpr bool is_quick = true;
  template <class At>
  static DLATTN_DEVICE float add(float base, const At& at, const ScoreValues& values) {
    const float slope = values.p.alibi_slopes.at(at.batch, at.head) * log2_e;
    if constexpr (symmetric) {
      return fmaf(-slope, fabsf(at.distance(at.length_kv - at.length_q)), base);
    }
    // What the elements of a row have in common, then a constant.
    const float first = fmaf(slope, float(at.key - at.query) - float(at.down), base);
    return fmaf(slope, float(at.right), first);
  }
};

// A number for each element is added; a bool drops the elements for which it is false. Keys are
// contiguous, or have any stride. Or the kernel has read it, by tiles.
template <class T, bool contiguous, bool staged>
struct Bias : Added {
  static constexpr bool reads_memory = true, stages_bias = staged;
  using BiasElement = T;

  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    if constexpr (staged) {
      return score + at.bias;
    } else if constexpr (same_type<T, bool>) {
      if (!at.exists()) return score;
      return element(at, values) ? score : -infinity();
    } else if constexpr (test_by_branch) {
      if (!at.exists()) return score;
      return score + to_float(element(at, values));
    } else {
      return score + (at.exists() ? to_float(element(at, values)) : 0.f);
    }
  }

  static constexpr bool is_quick = staged;
  template <class At>
  static DLATTN_DEVICE float add(float base, const At& at, const ScoreValues&) {
    return fmaf(at.bias, log2_e, base);
  }

 private:
  static DLATTN_DEVICE T element(const Position& at, const ScoreValues& values) {
    const BiasRef& bias = values.p.bias;
    const T* g_first = static_cast<const T*>(bias.data) + at.batch * bias.batch +
                       at.head * bias.head + at.query * bias.row;
    const T* g_row = g_first + at.down * bias.row;
    const int key = at.key + at.right;
    return load_constant(contiguous ? g_row + key : g_row + key * bias.column);
  }

  // A branch keeps ptxas from having more elements on their way than there are registers for. For
  // Blackwell, it is without one that it has fewer.
#if __CUDA_ARCH__ >= 1000
  static constexpr bool test_by_branch = false;
#else
  static constexpr bool test_by_branch = true;
#endif
};

template <class... Pack>
struct Edits;

template <>
struct Edits<> {
  static constexpr bool constant_derivative = true, reads_positions = false, reads_memory = false,
                        stages_bias = false;
  using BiasElement = unsigned short;
  template <bool rarely = false, class Tile>
  static DLATTN_DEVICE void prepare(Tile&, const ScoreValues&) {}
  template <class At>
  static DLATTN_DEVICE float apply(float score, const At&, const ScoreValues&) {
    return score;
  }
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float, const At&, const ScoreValues&) {
    return grad;
  }
  static DLATTN_DEVICE float factor(const ScoreValues&) { return 1.f; }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues&) { return 1.f; }

  static constexpr bool is_quick = false;
  struct Range {};
  template <class Some>
  static DLATTN_DEVICE Range range(Some) {
    return {};
  }
  struct AnyForm {
    DLATTN_DEVICE void follow(float) {}
  };
  template <class Take>
  static DLATTN_DEVICE void in_form(Range, const ScoreValues&, Take take) {
    take(AnyForm());
  }
  template <class At>
  static DLATTN_DEVICE float add(float base, const At&, const ScoreValues&) {
    return base;
  }
};

// A leading scale: its derivative is a factor, applied once. dS, which is rounded, stays large.
template <class Scale, class... Rest>
struct Scaled : Edits<> {
  static constexpr bool constant_derivative = Edits<Rest...>::constant_derivative;
  static constexpr bool reads_positions = Edits<Rest...>::reads_positions;
  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    return Edits<Rest...>::apply(score * Scale::of(values), at, values);
  }
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float score, const At& at,
                                      const ScoreValues& values) {
    return Edits<Rest...>::backward(grad, score * Scale::of(values), at, values);
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
    return Scale::of(values);
  }

  static constexpr bool reads_memory = Edits<Rest...>::reads_memory;
  static constexpr bool stages_bias = Edits<Rest...>::stages_bias;
  using BiasElement = typename Edits<Rest...>::BiasElement;
  static constexpr bool is_quick = (true && ... && Rest::is_quick);
  static DLATTN_DEVICE float inner(Edits<>::AnyForm, float raw, const ScoreValues&) { return raw; }
  template <class At>
  static DLATTN_DEVICE float outer(float raw, const At& at, const ScoreValues& values, float base) {
    return fmaf(raw, Scale::of(values) * log2_e, Edits<Rest...>::add(base, at, values));
  }
  static DLATTN_DEVICE float derivative(float, const ScoreValues&) { return 1.f; }
};

template <class Scale, class... Rest>
struct Scaled<Scale, SoftCap, Rest...> : Edits<> {
  static constexpr bool constant_derivative = false;
  static constexpr bool reads_positions = Edits<Rest...>::reads_positions;
  template <bool rarely = false, class Tile>
  static DLATTN_DEVICE void prepare(Tile& raw, const ScoreValues& values) {
    const float factor = Scale::of(values) * values.p.softcap_inverse;
    if constexpr (rarely) {
      raw.for_each([&](float& score, int, int, int) { score = any_tanh(score * factor); });
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

  // By a series, unless a product is too large for it.
  static constexpr bool reads_memory = Edits<Rest...>::reads_memory;
  static constexpr bool stages_bias = Edits<Rest...>::stages_bias;
  using BiasElement = typename Edits<Rest...>::BiasElement;
  static constexpr bool is_quick = (true && ... && Rest::is_quick);
  struct Series {
    float highest;
    uint32 zero;
    // What comes next is not computed before `result`: ptxas would begin all elements of a tile at
    // once, and spill.
    DLATTN_DEVICE void follow(float result) {
      highest = __uint_as_float(__float_as_uint(highest) | (__float_as_uint(result) & zero));
    }
  };
  struct Exact {
    DLATTN_DEVICE void follow(float) {}
  };
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
    if (__any_sync(0xffffffffu, largest > values.p.softcap_series.most)) {
      take(Exact());
    } else {
      take(Series{values.p.softcap_series.of[3], values.p.softcap_series.zero});
    }
  }
  static DLATTN_DEVICE float inner(Series form, float raw, const ScoreValues& values) {
    return raw * values.p.softcap_series.ratio(raw, form.highest);
  }
  static DLATTN_DEVICE float inner(Exact, float raw, const ScoreValues& values) {
    const float tanh = any_tanh(raw * (Scale::of(values) * values.p.softcap_inverse));
    return tanh * values.p.softcap_series.bound;
  }
  template <class At>
  static DLATTN_DEVICE float outer(float inner, const At& at, const ScoreValues& values,
                                   float base) {
    return inner + Edits<Rest...>::add(base, at, values);
  }
  static DLATTN_DEVICE float derivative(float inner, const ScoreValues& values) {
    const float tanh = inner * values.p.softcap_series.inverse_bound;
    return fmaf(-tanh, tanh, 1.f);
  }
};

template <class... Rest>
struct Edits<Scale, Rest...> : Scaled<Scale, Rest...> {};
template <class... Rest>
struct Edits<PositiveScale, Rest...> : Scaled<PositiveScale, Rest...> {};

template <>
struct Edits<PositiveScale> : Edits<> {
  static DLATTN_DEVICE float factor(const ScoreValues& values) { return values.scale; }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) { return values.scale; }
};

template <class First, class... Rest>
struct Edits<First, Rest...> : Edits<> {
  static constexpr bool constant_derivative =
      First::constant_derivative && Edits<Rest...>::constant_derivative;
  static constexpr bool reads_positions = First::reads_positions || Edits<Rest...>::reads_positions;
  static constexpr bool reads_memory = First::reads_memory || Edits<Rest...>::reads_memory;
  static constexpr bool stages_bias = First::stages_bias || Edits<Rest...>::stages_bias;
  using BiasElement = Either<First::reads_memory, typename First::BiasElement,
                             typename Edits<Rest...>::BiasElement>;
  template <class At>
  static DLATTN_DEVICE float add(float base, const At& at, const ScoreValues& values) {
    return Edits<Rest...>::add(First::add(base, at, values), at, values);
  }
  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    return Edits<Rest...>::apply(First::apply(score, at, values), at, values);
  }
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float score, const At& at,
                                      const ScoreValues& values) {
    const float inner = First::apply(score, at, values);
    return First::backward(Edits<Rest...>::backward(grad, inner, at, values), score, at, values);
  }
};

}  // namespace dlattn
