// Online softmax over key tiles (FlashAttention-2, algorithm 1), for one warp's rows.
#pragma once

#include "base/math.cuh"
#include "ptx/math.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// The four lanes that share a row hold different columns of it.
template <class Combine>
DLATTN_DEVICE float reduce_row(float value, Combine combine) {
  value = combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return combine(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Row i of m tile m is index 2 m + i / 2, as accumulators have it.
template <int m_tiles>
struct OnlineSoftmax {
  float row_max[2 * m_tiles];  // of the scores seen, before the factor
  float row_sum[2 * m_tiles];  // of exponentials; partial, per lane, until finish()
  float log2_factor;           // score units -> log2 units

  DLATTN_DEVICE explicit OnlineSoftmax(float factor) : log2_factor(factor * log2_e) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // Replaces scores by exponentials relative to the new maxima, and rescales the output so far.
  template <int n_tiles, int v_tiles>
  DLATTN_DEVICE void update(Accumulator<m_tiles, n_tiles>& score,
                            Accumulator<m_tiles, v_tiles>& output) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      float largest = row_max[r];
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        largest = fmaxf(largest, fmaxf(score.at[m][n][i], score.at[m][n][i + 1]));
      }
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      // A row with no key yet keeps every exponent at -infinity instead of infinity - infinity.
      const float scaled_max = largest == -infinity() ? 0.f : largest * log2_factor;
      const float rescale = exp2_approx(row_max[r] * log2_factor - scaled_max);
      row_max[r] = largest;

      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          score.at[m][n][j] = exp2_approx(score.at[m][n][j] * log2_factor - scaled_max);
          sum += score.at[m][n][j];
        }
      }
      row_sum[r] = row_sum[r] * rescale + sum;
#pragma unroll
      for (int n = 0; n < v_tiles; ++n) {
        output.at[m][n][i] *= rescale;
        output.at[m][n][i + 1] *= rescale;
      }
    }
  }

  // Completes the sums and divides the output by them. Rows that saw no key become zero.
  template <int v_tiles>
  DLATTN_DEVICE void finish(Accumulator<m_tiles, v_tiles>& output) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      row_sum[r] = reduce_row(row_sum[r], [](float a, float b) { return a + b; });
      const float inverse = row_sum[r] == 0.f ? 0.f : 1.f / row_sum[r];
#pragma unroll
      for (int n = 0; n < v_tiles; ++n) {
        output.at[r / 2][n][r % 2 * 2] *= inverse;
        output.at[r / 2][n][r % 2 * 2 + 1] *= inverse;
      }
    }
  }

  // Natural log of the sum of exponentials of row r; -infinity when it saw no key.
  DLATTN_DEVICE float log_sum_exp(int r) const {
    return row_sum[r] == 0.f ? -infinity() : row_max[r] * log2_factor * ln_2 + logf(row_sum[r]);
  }
};

}  // namespace dlattn
