// Floating-point constants that NVRTC has no header for.
#pragma once

#include "base/types.cuh"

namespace dlattn {

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;
inline constexpr float ln_2_low = -1.904654323148236e-09f;  // ln 2 - ln_2

DLATTN_DEVICE float infinity() { return __int_as_float(0x7f800000); }

}  // namespace dlattn
