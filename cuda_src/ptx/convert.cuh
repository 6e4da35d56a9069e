// Conversions between float and the 16-bit types. PTX ISA 9.7.9.21 (cvt).
#pragma once

#include "base/types.cuh"

namespace dlattn {

template <class T>
struct Convert;

template <>
struct Convert<bf16> {
  // low lands in bits 0-15.
  static DLATTN_DEVICE uint32 pack(float low, float high) {
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  // Each if positive, else 0. PTX ISA 9.7.4.8 (max).
  static DLATTN_DEVICE uint32 positive_part(uint32 packed) {
    uint32 positive;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(positive) : "r"(packed), "r"(0));
    return positive;
  }
  // Each by each. PTX ISA 9.7.4.3 (mul).
  static DLATTN_DEVICE uint32 multiply(uint32 a, uint32 b) {
    uint32 products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
  }
  static DLATTN_DEVICE float low(uint32 packed) { return __uint_as_float(packed << 16); }
  static DLATTN_DEVICE float high(uint32 packed) { return __uint_as_float(packed & 0xffff0000u); }
};

template <>
struct Convert<half> {
  static DLATTN_DEVICE uint32 pack(float low, float high) {
    uint32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static DLATTN_DEVICE uint32 positive_part(uint32 packed) {
    uint32 positive;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(positive) : "r"(packed), "r"(0));
    return positive;
  }
  static DLATTN_DEVICE float to_float(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static DLATTN_DEVICE float low(uint32 packed) { return to_float(uint16(packed & 0xffffu)); }
  static DLATTN_DEVICE float high(uint32 packed) { return to_float(uint16(packed >> 16)); }
};

DLATTN_DEVICE float to_float(float value) { return value; }
template <class T>
DLATTN_DEVICE float to_float(T value) {
  return Convert<T>::low(value.bits);
}

template <class T>
DLATTN_DEVICE T from_float(float value) {
  if constexpr (same_type<T, float>) {
    return value;
  } else {
    return T{uint16(Convert<T>::pack(value, 0.f) & 0xffffu)};
  }
}

}  // namespace dlattn
