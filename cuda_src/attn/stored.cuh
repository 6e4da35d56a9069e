// Scores of probabilities that a forward stored (attn/score.cuh says what an edit is for).
#pragma once

#include "attn/added.cuh"
#include "attn/params.cuh"
#include "base/math.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace dlattn {

template <class Scale, class... Rest>
struct Scaled;
template <class... Rest>
struct Before;

// In the place of a score, whatever it is, the logarithm of base 2 of the probability that a forward
// stored: S of primitive operations, whose signs are a keep mask. Always right after the scale, which
// is that of gradients alone.
template <class T, bool contiguous, bool staged>
struct Stored : Bias<T, contiguous, staged> {
  template <class At>
  static DLATTN_DEVICE float log2(const At& at, const ScoreValues& values) {
    if constexpr (staged) {
      return log2_approx(fabsf(at.bias));
    } else {
      if (!at.exists()) return -infinity();
      return log2_approx(fabsf(to_float(Bias<T, contiguous, staged>::element(at, values))));
    }
  }
};

template <class Scale, class T, bool contiguous, bool staged>
struct Scaled<Scale, Stored<T, contiguous, staged>> : Before<Stored<T, contiguous, staged>> {
  using Probability = Stored<T, contiguous, staged>;
  template <class At>
  static DLATTN_DEVICE float apply(float, const At& at, const ScoreValues& values) {
    return Probability::log2(at, values);
  }
  static DLATTN_DEVICE float factor(const ScoreValues&) { return ln_2; }
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float, const At&, const ScoreValues&) {
    return grad;
  }
  static DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
    return Scale::of(values);
  }

  template <class Form>
  static DLATTN_DEVICE float inner(Form, float raw, const ScoreValues&) {
    return raw;
  }
  template <class At>
  static DLATTN_DEVICE float outer(float, const At& at, const ScoreValues& values, float base) {
    return Probability::log2(at, values) + base;
  }
  static DLATTN_DEVICE float derivative(float, const ScoreValues&) { return 1.f; }
};

}  // namespace dlattn
