// Score edits: pointwise changes of a score before the softmax.
//
// A pack is used through these, the first of them on all raw products of a tile that a warp has:
//   prepare(tile)            replaces raw products, in place, by what the other functions take
//   apply(raw)               the score, except for a factor
//   factor()                 that factor: score = factor * apply(raw), always > 0
//   backward(grad, raw)      the gradient for raw from that of the score, except for a factor
//   gradient_factor()        that factor, applied once to dQ and dK
//   constant_derivative      backward() gives grad, whatever the score
//   reads_positions          what apply() gives depends on where the element is
// A pack that only multiplies by a positive number has it all in the factors, so that a kernel
// takes row maxima of raw products and folds the factor into the exponent.
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
  static constexpr bool constant_derivative = true, reads_positions = true;
  static DLATTN_DEVICE float backward(float grad, float, const Position&, const ScoreValues&) {
    return grad;
  }
};

// A slope of the head for each step from the diagonal. cuDNN's form is score + slope * (key - query);
// the symmetric one, FlashAttention's, score - slope * |query + len_kv - len_q - key|.
template <bool symmetric>
struct Alibi : Added {
  static DLATTN_DEVICE float apply(float score, const Position& at, const ScoreValues& values) {
    const float slope = values.p.alibi_slopes.at(at.batch, at.head);
    if constexpr (!symmetric) return fmaf(slope, at.distance(0), score);
    return fmaf(-slope, fabsf(at.distance(at.length_kv - at.length_q)), score);
  }
};

// A number for each element is added; a bool drops the elements for which it is false. Keys are
// contiguous, or have any stride.
template <class T, bool contiguous>
struct Bias : Added {
  static DLATTN_DEVICE float apply(float score, const Position& at, const ScoreValues& values) {
    const BiasRef& bias = values.p.bias;
    const T* g_first = static_cast<const T*>(bias.data) + at.batch * bias.batch +
                       at.head * bias.head + at.query * bias.row;
    const T* g_row = g_first + at.down * bias.row;
    const auto element = [&] {
      const int key = at.key + at.right;
      return load_constant(contiguous ? g_row + key : g_row + key * bias.column);
    };
    if constexpr (same_type<T, bool>) {
      if (!at.exists()) return score;
      return element() ? score : -infinity();
    } else if constexpr (test_by_branch) {
      if (!at.exists()) return score;
      return score + to_float(element());
    } else {
      return score + (at.exists() ? to_float(element()) : 0.f);
    }
  }

 private:
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
  static constexpr bool constant_derivative = true, reads_positions = false;
  template <class Tile>
  static DLATTN_DEVICE void prepare(Tile&, const ScoreValues&) {}
  static DLATTN_DEVICE float apply(float score, const Position&, const ScoreValues&) {
    return score;
  }
  static DLATTN_DEVICE float backward(float grad, float, const Position&, const ScoreValues&) {
    return grad;
  }
  static DLATTN_DEVICE float factor(const ScoreValues&) { return 1.f; }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues&) { return 1.f; }
};

// A leading scale: its derivative is a factor, applied once. dS, which is rounded, stays large.
template <class Scale, class... Rest>
struct Scaled : Edits<> {
  static constexpr bool constant_derivative = Edits<Rest...>::constant_derivative;
  static constexpr bool reads_positions = Edits<Rest...>::reads_positions;
  static DLATTN_DEVICE float apply(float score, const Position& at, const ScoreValues& values) {
    return Edits<Rest...>::apply(score * Scale::of(values), at, values);
  }
  static DLATTN_DEVICE float backward(float grad, float score, const Position& at,
                                      const ScoreValues& values) {
    return Edits<Rest...>::backward(grad, score * Scale::of(values), at, values);
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
    return Scale::of(values);
  }
};

template <class Scale, class... Rest>
struct Scaled<Scale, SoftCap, Rest...> : Edits<> {
  static constexpr bool constant_derivative = false;
  static constexpr bool reads_positions = Edits<Rest...>::reads_positions;
  template <class Tile>
  static DLATTN_DEVICE void prepare(Tile& raw, const ScoreValues& values) {
    const float factor = Scale::of(values) * values.p.softcap_inverse;
    raw.for_each([&](float& score, int, int, int) { score *= factor; });
    replace_by_tanh(raw);
  }
  static DLATTN_DEVICE float apply(float tanh, const Position& at, const ScoreValues& values) {
    if constexpr (sizeof...(Rest) == 0) return tanh;
    return Edits<Rest...>::apply(values.p.softcap * tanh, at, values);
  }
  static DLATTN_DEVICE float factor(const ScoreValues& values) {
    return sizeof...(Rest) == 0 ? values.p.softcap : 1.f;
  }
  static DLATTN_DEVICE float backward(float grad, float tanh, const Position& at,
                                      const ScoreValues& values) {
    return Edits<Rest...>::backward(grad, values.p.softcap * tanh, at, values) *
           fmaf(-tanh, tanh, 1.f);
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
    return Scale::of(values);
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
  static DLATTN_DEVICE float apply(float score, const Position& at, const ScoreValues& values) {
    return Edits<Rest...>::apply(First::apply(score, at, values), at, values);
  }
  static DLATTN_DEVICE float backward(float grad, float score, const Position& at,
                                      const ScoreValues& values) {
    const float inner = First::apply(score, at, values);
    return First::backward(Edits<Rest...>::backward(grad, inner, at, values), score, at, values);
  }
};

}  // namespace dlattn
