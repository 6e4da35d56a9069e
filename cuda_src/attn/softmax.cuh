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

// Which columns of a tile of scores some row of the warp attends to: asked for 32 at a time.
struct AllColumns {
  DLATTN_DEVICE bool any(int) const { return true; }
};
struct SeenColumns {
  Interval seen;
  DLATTN_DEVICE bool any(int first) const { return seen.first < first + 32 && first < seen.last; }
};

// Row i of m tile m is index 2 m + i / 2, as accumulators have it. If exact, references are the
// maxima of all scores that advance() has been given, and not only near them.
template <int m_tiles, bool exact_ = false>
struct OnlineSoftmax {
  static constexpr bool exact = exact_;
  static constexpr int rows = 2 * m_tiles;
  // Exponentials may reach 2^8 before the running maximum is replaced: bf16 and fp16 represent
  // them as well as numbers below one, and the output is rescaled only where it matters. (Without
  // slack the largest probability of a row would be exactly one, at 5 to 8 % of the speed.)
  static constexpr float slack = exact ? 0.f : 8.f;
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
  template <int n_tiles, class Columns = AllColumns>
  DLATTN_DEVICE bool advance(const Accumulator<m_tiles, n_tiles>& score, float (&factor)[rows],
                             Columns seen = {}) {
    float largest[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) largest[r] = -infinity();
#pragma unroll
    for (int n = 0; n < n_tiles; n += 4) {
      if (!seen.any(8 * n)) continue;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        float part = -infinity();  // or all columns would wait for each other
#pragma unroll
        for (int g = n; g < least(n + 4, n_tiles); ++g) {
          const float (&s)[4] = score.at[r / 2][g];
          part = fmaxf(part, fmaxf(s[r % 2 * 2], s[r % 2 * 2 + 1]));
        }
        largest[r] = fmaxf(largest[r], part);
      }
    }
    bool grew = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      largest[r] = reduce_row(largest[r], [](float a, float b) { return fmaxf(a, b); });
      // Upwards: exponents are exact products less the rounded one. Of scores of 1e9, as of keys that a bias
      // of -1e9 masks, they would be 18 for the largest, too large for fp16, and of 1e10 for any type.
      largest[r] = __fmul_ru(largest[r], log2_factor);
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

  // Replaces scores by exponentials, which are zero in columns not seen. Returns this lane's sums, for
  // add().
  template <int n_tiles, class Columns = AllColumns>
  DLATTN_DEVICE Sums exponentiate(Accumulator<m_tiles, n_tiles>& score, Columns seen = {}) const {
    Sums sums;
#pragma unroll
    for (int r = 0; r < rows; ++r) sums.of[r] = 0.f;
#pragma unroll
    for (int n = 0; n < n_tiles; n += 4) {
      const bool any = seen.any(8 * n);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int g = n; g < least(n + 4, n_tiles); ++g) {
#pragma unroll
          for (int j = r % 2 * 2; j < r % 2 * 2 + 2; ++j) {
            float& s = score.at[r / 2][g][j];
            s = any ? exp2_approx(s * log2_factor - reference[r]) : 0.f;
            if (any) sums.of[r] += s;
          }
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

  // Takes in the same rows' other keys. Outputs of both must be multiplied by their factors.
  DLATTN_DEVICE void add_part(const float (&references)[rows], const float (&sums)[rows],
                              float (&own_factor)[rows], float (&factor)[rows]) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float before = reference[r];
      reference[r] = fmaxf(before, references[r]);
      own_factor[r] = exp2_approx(before - reference[r]);
      factor[r] = exp2_approx(references[r] - reference[r]);
      row_sum[r] = row_sum[r] * own_factor[r] + sums[r] * factor[r];
    }
  }

  // Takes a score in natural units, without a value, into every row; the output must be multiplied by
  // factor.
  DLATTN_DEVICE void add_sink(float sink, float (&factor)[rows]) {
    const float score = sink * log2_e;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float before = reference[r];
      reference[r] = fmaxf(before, score);
      factor[r] = exp2_approx(before - reference[r]);
      const float weight = threadIdx.x % 4 == 0 ? exp2_approx(score - reference[r]) : 0.f;
      row_sum[r] = row_sum[r] * factor[r] + weight;
    }
  }

  // Completes the sums, divides the output by them and multiplies it. Rows that saw no key become
  // zero.
  template <int v_tiles>
  DLATTN_DEVICE void finish(Accumulator<m_tiles, v_tiles>& output, float factor) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      row_sum[r] = reduce_row(row_sum[r], [](float a, float b) { return a + b; });
      const float inverse = row_sum[r] == 0.f ? 0.f : reciprocal_approx(row_sum[r]) * factor;
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
    return sum_of(r) == 0.f ? -infinity() : natural(r, factor, logf(sum_of(r)));
  }

  // The largest score of row r, likewise; if exact.
  DLATTN_DEVICE float largest_score(int r, float factor) const {
    return sum_of(r) == 0.f ? -infinity() : natural(r, factor, 0.f);
  }

  DLATTN_DEVICE float sum_of(int r) const { return of_row(row_sum, r); }

 private:
  // The reference in natural units, and something added.
  DLATTN_DEVICE float natural(int r, float factor, float addend) const {
    const float rounded_off = fmaf(-log2_factor, ln_2, factor) - log2_factor * ln_2_low;
    const float correction = fmaf(rounded_off, reciprocal_approx(log2_factor), ln_2_low);
    return fmaf(of_row(reference, r), ln_2, fmaf(of_row(reference, r), correction, addend));
  }

  // Of a row that is known at run time only.
  static DLATTN_DEVICE float of_row(const float (&values)[rows], int r) {
    float value = values[0];
#pragma unroll
    for (int i = 1; i < rows; ++i) value = r == i ? values[i] : value;
    return value;
  }
};

}  // namespace dlattn
