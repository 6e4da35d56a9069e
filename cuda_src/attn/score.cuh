// Score edits: pointwise changes of a score before the softmax.
//
// A pack is used through four functions:
//   apply(raw)               the score, except for a factor
//   factor()                 that factor: score = factor * apply(raw), always > 0
//   backward(grad, raw)      the gradient for raw from that of the score, except for a factor
//   gradient_factor()        that factor, applied once to dQ and dK
// A pack that only multiplies by a positive number has it all in the factors, so that a kernel
// takes row maxima of raw products and folds the factor into the exponent.
#pragma once

#include "attn/params.cuh"

namespace dlattn {

// Run-time values of the edits, read once per block.
struct ScoreValues {
  float scale;

  DLATTN_DEVICE explicit ScoreValues(const Params& p) : scale(p.scale()) {}
};

struct Position {
  int batch, head, query, key;
};

// score * attn_scale: of any sign, or known to be greater than zero. Always the first edit, which
// is how a pack treats it.
struct Scale {};
struct PositiveScale {};

template <class... Pack>
struct Edits;

template <>
struct Edits<> {
  static DLATTN_DEVICE float apply(float score, Position, const ScoreValues&) { return score; }
  static DLATTN_DEVICE float backward(float grad, float, Position, const ScoreValues&) {
    return grad;
  }
  static DLATTN_DEVICE float factor(const ScoreValues&) { return 1.f; }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues&) { return 1.f; }
};

// A leading scale: its derivative is a factor, applied once. dS, which is rounded, stays large.
template <class... Rest>
struct Edits<Scale, Rest...> : Edits<> {
  static DLATTN_DEVICE float apply(float score, Position at, const ScoreValues& values) {
    return Edits<Rest...>::apply(score * values.scale, at, values);
  }
  static DLATTN_DEVICE float backward(float grad, float score, Position at,
                                      const ScoreValues& values) {
    return Edits<Rest...>::backward(grad, score * values.scale, at, values);
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) { return values.scale; }
};

template <class... Rest>
struct Edits<PositiveScale, Rest...> : Edits<Scale, Rest...> {};

template <>
struct Edits<PositiveScale> : Edits<> {
  static DLATTN_DEVICE float factor(const ScoreValues& values) { return values.scale; }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) { return values.scale; }
};

template <class First, class... Rest>
struct Edits<First, Rest...> : Edits<> {
  static DLATTN_DEVICE float apply(float score, Position at, const ScoreValues& values) {
    return Edits<Rest...>::apply(First::apply(score, at, values), at, values);
  }
  static DLATTN_DEVICE float backward(float grad, float score, Position at,
                                      const ScoreValues& values) {
    const float inner = First::apply(score, at, values);
    return First::backward(Edits<Rest...>::backward(grad, inner, at, values), score, at, values);
  }
};

}  // namespace dlattn
