// Edits that add something to a score (attn/score.cuh says what an edit is for).
//   add(base, at, values)  if is_quick: what is added, in log2 units, plus base
//   keep(exponent, at)     if is_quick: the sum, or minus infinity
#pragma once

#include "attn/params.cuh"
#include "attn/position.cuh"
#include "base/math.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// What is added to a score, whatever it is.
struct Added {
  static constexpr bool constant_derivative = true, reads_positions = true, reads_memory = false,
                        stages_bias = false;
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float, const At&, const ScoreValues&) {
    return grad;
  }
  template <class At>
  static DLATTN_DEVICE float keep(float exponent, const At&) {
    return exponent;
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
// contiguous, or have any stride. Or the kernel has read it, by tiles; of one row, if that is there for
// all queries.
template <class T, bool contiguous, bool staged, bool one_row_ = false>
struct Bias : Added {
  static constexpr bool drops = same_type<T, bool>;
  static constexpr bool reads_memory = true, stages_bias = staged;
  using Element = T;
  static constexpr bool one_row = one_row_;

  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    if constexpr (staged && drops) {
      return keep(score, at);
    } else if constexpr (staged) {
      return score + at.bias;
    } else if constexpr (drops) {
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
    if constexpr (drops) return base;
    return fmaf(at.bias, log2_e, base);
  }
  // Not by adding: a product of what is dropped may be no number.
  template <class At>
  static DLATTN_DEVICE float keep(float exponent, const At& at) {
    if constexpr (drops) return at.bias ? exponent : -infinity();
    return exponent;
  }

 protected:
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

}  // namespace dlattn
