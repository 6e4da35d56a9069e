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
  // 32 exponentials of a lane stay below it after an advance(), and it is below fp16's largest.
  static constexpr float most_sum = 16384.f;

  struct Sums {
    float of[rows];
  };

  // A row without a key: so low that any score overflows, and that no score (-infinity) is still 0.
  static constexpr float no_key = -1e30f;

  float reference[rows];  // log2 units: a maximum that exponents are relative to
  float row_sum[rows];    // of exponentials; partial, per lane, until finish()
  float log2_factor;      // score units -> log2 units

  DLATTN_DEVICE explicit OnlineSoftmax(float factor) : log2_factor(factor * log2_e) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      reference[r] = no_key;
      row_sum[r] = 0.f;
    }
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
      float parts[2] = {-infinity(), -infinity()};
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        float& part = parts[n % 2];
        part = fmaxf(part, fmaxf(score.at[m][n][i], score.at[m][n][i + 1]));
      }
      largest[r] = reduce_row(fmaxf(parts[0], parts[1]), [](float a, float b) { return fmaxf(a, b); });
      largest[r] *= log2_factor;
      grew |= largest[r] - reference[r] > slack;
    }
    if (!__any_sync(0xffffffffu, grew)) return false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float before = reference[r];
      reference[r] = fmaxf(before, largest[r]);
      factor[r] = exp2_approx(before - reference[r]);
      row_sum[r] *= factor[r];
    }
    return true;
  }

  template <int v_tiles>
  static DLATTN_DEVICE void rescale(Accumulator<m_tiles, v_tiles>& output,
                                    const float (&factor)[rows]) {
    output.for_each([&](float& value, int m, int, int i) { value *= factor[2 * m + i / 2]; });
  }

  // Replaces scores by exponentials. So many sixteenths of them are computed on the FMA pipe, which
  // is free when the special function unit is not. Returns this lane's sums, for add().
  template <int polynomial = 0, int n_tiles>
  DLATTN_DEVICE Sums exponentiate(Accumulator<m_tiles, n_tiles>& score) const {
    Sums sums;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      sums.of[r] = 0.f;
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          const int element = 2 * n + j - i;
          const bool fma = (element + 1) * polynomial / 16 > element * polynomial / 16;
          const float exponent = score.at[m][n][j] * log2_factor - reference[r];
          score.at[m][n][j] = fma ? exp2_polynomial(exponent) : exp2_approx(exponent);
          sums.of[r] += score.at[m][n][j];
        }
      }
    }
    return sums;
  }

  // True, for the whole warp, if exponentials may be too large: then the scores are needed once
  // more, for advance(). Never after an advance() with the same scores.
  DLATTN_DEVICE static bool overflown(const Sums& sums) {
    float largest = sums.of[0];
#pragma unroll
    for (int r = 1; r < rows; ++r) largest = fmaxf(largest, sums.of[r]);
    return __any_sync(0xffffffffu, largest > most_sum);
  }

  DLATTN_DEVICE void add(const Sums& sums) {
#pragma unroll
    for (int r = 0; r < rows; ++r) row_sum[r] += sums.of[r];
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

  // Natural log of the sum of exponentials of row r; -infinity when it saw no key. The unit of the
  // reference is not quite factor / log2_factor of a natural one, which large scores would show.
  DLATTN_DEVICE float log_sum_exp(int r, float factor) const {
    if (row_sum[r] == 0.f) return -infinity();
    const float rounded_off = fmaf(-log2_factor, ln_2, factor) - log2_factor * ln_2_low;
    return fmaf(reference[r], ln_2, fmaf(reference[r], rounded_off / log2_factor + ln_2_low,
                                         logf(row_sum[r])));
  }
};

}  // namespace dlattn
