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
  static constexpr int rows = 2 * m_tiles;
  // Exponentials may reach 2^8 before the running maximum is replaced: bf16 and fp16 represent
  // them as well as numbers below one, and the output is rescaled only where it matters. (Without
  // slack the largest probability of a row would be exactly one, at 5 to 8 % of the speed.)
  static constexpr float slack = 8.f;

  float row_max[rows];  // the number that exponents are relative to, before the factor
  float row_sum[rows];  // of exponentials; partial, per lane, until finish()
  float log2_factor;    // score units -> log2 units

  DLATTN_DEVICE explicit OnlineSoftmax(float factor) : log2_factor(factor * log2_e) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.f;
    }
  }

  // A row with no key yet keeps every exponent at -infinity instead of infinity - infinity.
  DLATTN_DEVICE float scaled_max(int r) const {
    return row_max[r] == -infinity() ? 0.f : row_max[r] * log2_factor;
  }

  // Takes the scores of a tile into the maxima. True, for the whole warp, if a maximum grew by so
  // much that the output so far must be multiplied by factor (row by row).
  template <int n_tiles>
  DLATTN_DEVICE bool advance(const Accumulator<m_tiles, n_tiles>& score, float (&factor)[rows]) {
    float largest[rows];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      largest[r] = row_max[r];
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        largest[r] = fmaxf(largest[r], fmaxf(score.at[m][n][i], score.at[m][n][i + 1]));
      }
      largest[r] = reduce_row(largest[r], [](float a, float b) { return fmaxf(a, b); });
      grew |= (largest[r] - row_max[r]) * log2_factor > slack;
    }
    if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float before = row_max[r];
      row_max[r] = largest[r];
      factor[r] = exp2_approx(before * log2_factor - scaled_max(r));
      row_sum[r] *= factor[r];
    }
    return true;
  }

  template <int v_tiles>
  static DLATTN_DEVICE void rescale(Accumulator<m_tiles, v_tiles>& output,
                                    const float (&factor)[rows]) {
    output.for_each([&](float& value, int m, int, int i) { value *= factor[2 * m + i / 2]; });
  }

  // Replaces scores by exponentials, and adds these to the sums.
  template <int n_tiles>
  DLATTN_DEVICE void exponentiate(Accumulator<m_tiles, n_tiles>& score) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      const float offset = scaled_max(r);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          score.at[m][n][j] = exp2_approx(score.at[m][n][j] * log2_factor - offset);
          row_sum[r] += score.at[m][n][j];
        }
      }
    }
  }

  // Completes the sums and divides the output by them. Rows that saw no key become zero.
  template <int v_tiles>
  DLATTN_DEVICE void finish(Accumulator<m_tiles, v_tiles>& output) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      row_sum[r] = reduce_row(row_sum[r], [](float a, float b) { return a + b; });
      const float inverse = row_sum[r] == 0.f ? 0.f : 1.f / row_sum[r];
#pragma unroll
      for (int n = 0; n < v_tiles; ++n) {
        output.at[r / 2][n][r % 2 * 2] *= inverse;
        output.at[r / 2][n][r % 2 * 2 + 1] *= inverse;
      }
    }
  }

  // Natural log of the sum of exponentials of row r; -infinity when it saw no key. The maximum is
  // taken back in natural units; what rounding took from it in log2 units is in the sum.
  DLATTN_DEVICE float log_sum_exp(int r, float factor) const {
    if (row_sum[r] == 0.f) return -infinity();
    const float rounded_off = fmaf(row_max[r], log2_factor, -scaled_max(r));
    return fmaf(row_max[r], factor, logf(row_sum[r]) - ln_2 * rounded_off);
  }
};

}  // namespace dlattn
