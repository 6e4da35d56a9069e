// Bit fields.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// `width` ones from bit `first` on; both are clamped to 32. PTX ISA 9.7.1.21 (bmsk).
DLATTN_DEVICE uint32 bit_mask(uint32 first, uint32 width) {
  uint32 mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(width));
  return mask;
}

}  // namespace dlattn
