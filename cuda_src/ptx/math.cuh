// Approximate functions of the special function unit.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// 2^x; subnormal results flush to zero; 2^-inf = 0. PTX ISA 9.7.3.20 (ex2).
DLATTN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), of 0 -infinity. PTX ISA 9.7.3.19 (lg2).
DLATTN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x with an error of 1 ulp; of a subnormal x, infinity. PTX ISA 9.7.3.13 (rcp).
DLATTN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dlattn
