// Hyperbolic tangents of a tile of scores, for the soft cap.
//
// As exact as float32 allows: multiplied by a cap of 50, the 2^-11 of tanh.approx would move
// probabilities by more than their rounding does. With two more special functions an element, the
// exponentials of a forward would take longer than its products. But most scores are far below the
// cap, where a polynomial needs none; only groups of columns that hold a larger one take them.
#pragma once

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

}  // namespace dlattn
