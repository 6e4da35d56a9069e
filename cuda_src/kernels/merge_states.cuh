// Attention over a union of disjoint sets of keys, from the attention over each: the sum of the outputs
// weighted by exp(log-sum-exp), the update of ring attention (arXiv 2310.01889) and the reduction of
// flash decoding. A state without keys (log-sum-exp of -infinity, or FlashAttention's +infinity) weighs
// nothing, whatever its output holds. One pass: a row is a few lanes of a warp, each with a unit at a time.
#pragma once

#include "base/math.cuh"
#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "tile/unit.cuh"

namespace dlattn {

// Rows of an output, or their log-sum-exps: (batch, outer, inner) in the order of memory.
struct StateRef {
  void* data;
  int64 batch, outer, inner;  // strides in elements

  template <class T>
  DLATTN_DEVICE T* at(int b, int o, int i) const {
    return static_cast<T*>(data) + b * batch + o * outer + i * inner;
  }
};

// dlattn/plans/merge.py mirrors this.
struct MergeParams {
  StateRef o_first, lse_first;  // of the first state
  StateRef o_other, lse_other;  // of the second;
  int64 o_step, lse_step;       // of the others, so many elements on
  StateRef o, lse;              // of the union; may be the first state's
  int states, batch, outer, inner, head_dim;
  int unused;
};

struct MergeTiling {
  static constexpr int threads = 256;
};

DLATTN_DEVICE bool is_empty_state(float lse) { return fabsf(lse) == infinity(); }

// `First`, `Other`: types of the outputs, the union's is First. `lanes`: of a row. `wide`: 16-byte accesses.
// `states`: 2, or 0 for any number.
template <class First, class Other, int lanes, bool wide, int states>
DLATTN_DEVICE void merge_states(const MergeParams& p) {
  constexpr int unit = unit_size<wide, First, Other>;
  constexpr int rows_per_block = MergeTiling::threads / lanes;
  const int64 row = int64(blockIdx.x) * rows_per_block + threadIdx.x / lanes;
  const bool exists = row < int64(p.outer) * p.inner;
  // Threads without a row repeat the first, and store nothing.
  const int outer = exists ? int(uint32(row) / uint32(p.inner)) : 0;
  const int inner = exists ? int(uint32(row) - uint32(outer) * uint32(p.inner)) : 0;
  const int count = states != 0 ? states : p.states;

#pragma unroll 1
  for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const float first = *p.lse_first.at<float>(b, outer, inner);
    const float* g_lse = p.lse_other.at<float>(b, outer, inner);
    float largest = is_empty_state(first) ? -infinity() : first;
#pragma unroll 2
    for (int s = 1; s < count; ++s) {
      const float lse = g_lse[(s - 1) * p.lse_step];
      // Unlike fmaxf, this lets a NaN through.
      if (!is_empty_state(lse) && !(lse <= largest)) largest = lse;
    }
    const float base = largest == -infinity() ? 0.f : largest;
    const auto weight = [&](float lse) {
      return is_empty_state(lse) ? 0.f : exp2f((lse - base) * log2_e);
    };
    const float first_weight = weight(first);
    float sum = first_weight;
#pragma unroll 2
    for (int s = 1; s < count; ++s) sum += weight(g_lse[(s - 1) * p.lse_step]);
    const float inverse = largest == -infinity() ? 0.f : 1.f / sum;

    const First* g_first = p.o_first.at<First>(b, outer, inner);
    const Other* g_other = p.o_other.at<Other>(b, outer, inner);
#pragma unroll 1
    for (int column = threadIdx.x % lanes * unit; column < p.head_dim; column += lanes * unit) {
      float total[unit], part[unit];
      load_unit(total, g_first + column);
#pragma unroll
      for (int i = 0; i < unit; ++i) total[i] = first_weight == 0.f ? 0.f : total[i] * first_weight;
#pragma unroll 2
      for (int s = 1; s < count; ++s) {
        load_unit(part, g_other + (s - 1) * p.o_step + column);
        const float factor = weight(g_lse[(s - 1) * p.lse_step]);
#pragma unroll
        for (int i = 0; i < unit; ++i) total[i] += factor == 0.f ? 0.f : part[i] * factor;
      }
#pragma unroll
      for (int i = 0; i < unit; ++i) total[i] *= inverse;
      if (exists) store_unit(p.o.at<First>(b, outer, inner) + column, total);
    }
    __syncwarp();  // the union's may be the first's, which other lanes have read
    if (exists && threadIdx.x % lanes == 0) {
      // Of nothing but empty states, what the first says of itself.
      *p.lse.at<float>(b, outer, inner) = largest == -infinity() ? first : largest + logf(sum);
    }
  }
}

}  // namespace dlattn
