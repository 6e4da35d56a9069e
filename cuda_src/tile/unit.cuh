// Units: consecutive elements of a row in global memory, which one thread computes with in fp32.
#pragma once

#include "base/types.cuh"
#include "ptx/convert.cuh"

namespace dlattn {

// Whole 16-byte accesses of either type, where rows are aligned for that; else neighbouring threads
// have neighbouring elements.
template <bool wide, class A, class B = A>
inline constexpr int unit_size = !wide                              ? 1
                                 : least(sizeof(A), sizeof(B)) == 2 ? 8
                                                                    : 4;

template <class T, int size>
DLATTN_DEVICE void load_unit(float (&values)[size], const T* g_unit) {
  if constexpr (size == 1) {
    values[0] = to_float(*g_unit);
  } else if constexpr (same_type<T, float>) {
#pragma unroll
    for (int i = 0; i < size; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(g_unit + i);
      values[i] = part.x, values[i + 1] = part.y, values[i + 2] = part.z, values[i + 3] = part.w;
    }
  } else {
    static_assert(size == 8);
    const uint4 packed = *reinterpret_cast<const uint4*>(g_unit);
    const uint32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = Convert<T>::low(words[i]);
      values[2 * i + 1] = Convert<T>::high(words[i]);
    }
  }
}

template <class T, int size>
DLATTN_DEVICE void store_unit(T* g_unit, const float (&values)[size]) {
  if constexpr (size == 1) {
    *g_unit = from_float<T>(values[0]);
  } else if constexpr (same_type<T, float>) {
#pragma unroll
    for (int i = 0; i < size; i += 4) {
      *reinterpret_cast<float4*>(g_unit + i) =
          float4{values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
  } else {
    static_assert(size == 8 || size == 4);
    uint32 words[size / 2];
#pragma unroll
    for (int i = 0; i < size / 2; ++i) {
      words[i] = Convert<T>::pack(values[2 * i], values[2 * i + 1]);
    }
    if constexpr (size == 8) {
      *reinterpret_cast<uint4*>(g_unit) = uint4{words[0], words[1], words[2], words[3]};
    } else {
      *reinterpret_cast<uint2*>(g_unit) = uint2{words[0], words[1]};
    }
  }
}

}  // namespace dlattn
