// Floating-point constants that NVRTC has no header for.
#pragma once

#include "base/types.cuh"

namespace dlattn {

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;
inline constexpr float ln_2_low = -1.904654323148236e-09f;  // ln 2 - ln_2

// 2^x without the special function unit, with a relative error of 1e-4: the nearest
// integer by adding 1.5 * 2^23, a minimax cubic for the rest, the integer added to the exponent.
// Zero up to -127; 2^127 at the most. (FlashAttention-4 does the same on Blackwell.)
DLATTN_DEVICE float exp2_polynomial(float x) {
  x = fminf(fmaxf(x, -127.f), 127.f);
  const float shifted = x + 12582912.f;
  const float rest = x - (shifted - 12582912.f);
  const float power = fmaf(fmaf(fmaf(0.05500893f, rest, 0.24221097f), rest, 0.6932829f), rest, 1.f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(shifted) << 23));
}

DLATTN_DEVICE float infinity() { return __int_as_float(0x7f800000); }

}  // namespace dlattn
