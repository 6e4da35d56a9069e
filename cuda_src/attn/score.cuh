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
//   StagedBias               the edit whose elements the kernel has read, if it stages_bias
// A pack that only multiplies by a positive number has it all in the factors, so that a kernel
// takes row maxima of raw products and folds the factor into the exponent.
//
// If is_quick, the exponent of an element can be had at once of its raw product: such arithmetic
// hides behind the exponentials.
//   range(some)                              what decides how to compute some elements
//   in_form(range, values, take)             calls take(form), with how to compute them
//   guesses                                  there may be a form that is right for most elements
//   guess(values)                            it; its failed(values) says afterwards if it was wrong
//   can_guess(values)                        whether it may be right at all
//   exponent(form, raw, at, values, base)    the score in log2 units, plus base; or in two parts:
//   inner(form, raw, values)                 what all but the first part of the pack takes
//   outer(inner, at, values, base)           the same of that
//   derivative(inner, values)                of the score by the product, except for a factor
#pragma once

#include "attn/added.cuh"
#include "attn/params.cuh"
#include "attn/position.cuh"
#include "attn/program.cuh"
#include "attn/softcap.cuh"
#include "attn/stored.cuh"
#include "base/math.cuh"

namespace dlattn {

// score * attn_scale: of any sign, or known to be greater than zero, and then no tensor. Always the
// first edit, which is how a pack treats it.
struct Scale {
  static DLATTN_DEVICE float of(const ScoreValues& values) { return values.scale; }
};
struct PositiveScale {
  static DLATTN_DEVICE float of(const ScoreValues& values) { return values.p.attn_scale; }
};

template <class... Pack>
struct Edits;

template <>
struct Edits<> {
  static constexpr bool constant_derivative = true, reads_positions = false, reads_memory = false,
                        stages_bias = false;
  using StagedBias = void;
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
    DLATTN_DEVICE bool failed(const ScoreValues&) const { return false; }
  };
  static constexpr bool guesses = false;
  template <class Take>
  static DLATTN_DEVICE void in_form(Range, const ScoreValues&, Take take) {
    take(AnyForm());
  }
  template <class At>
  static DLATTN_DEVICE float add(float base, const At&, const ScoreValues&) {
    return base;
  }
  template <class At>
  static DLATTN_DEVICE float keep(float exponent, const At&) {
    return exponent;
  }
};

// What a pack takes from its edits after the scale, and a soft cap.
template <class... Rest>
struct Before : Edits<> {
  static constexpr bool constant_derivative = Edits<Rest...>::constant_derivative;
  static constexpr bool reads_positions = Edits<Rest...>::reads_positions;
  static constexpr bool reads_memory = Edits<Rest...>::reads_memory;
  static constexpr bool stages_bias = Edits<Rest...>::stages_bias;
  using StagedBias = typename Edits<Rest...>::StagedBias;
  static constexpr bool is_quick = (true && ... && Rest::is_quick);
};

// A leading scale: its derivative is a factor, applied once. dS, which is rounded, stays large.
template <class Scale, class... Rest>
struct Scaled : Before<Rest...> {
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

  static DLATTN_DEVICE float inner(Edits<>::AnyForm, float raw, const ScoreValues&) { return raw; }
  template <class At>
  static DLATTN_DEVICE float outer(float raw, const At& at, const ScoreValues& values, float base) {
    const float added = Edits<Rest...>::add(base, at, values);
    return Edits<Rest...>::keep(fmaf(raw, Scale::of(values) * log2_e, added), at);
  }
  template <class At>
  static DLATTN_DEVICE float exponent(Edits<>::AnyForm, float raw, const At& at,
                                      const ScoreValues& values, float base) {
    return outer(raw, at, values, base);
  }
  static DLATTN_DEVICE float derivative(float, const ScoreValues&) { return 1.f; }
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
  using StagedBias = Either<First::stages_bias, First, typename Edits<Rest...>::StagedBias>;
  template <class At>
  static DLATTN_DEVICE float add(float base, const At& at, const ScoreValues& values) {
    return Edits<Rest...>::add(First::add(base, at, values), at, values);
  }
  template <class At>
  static DLATTN_DEVICE float keep(float exponent, const At& at) {
    return Edits<Rest...>::keep(First::keep(exponent, at), at);
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
