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

// Two bytes of a word, from byte `first` on, in the lower halves of 16 bits each. PTX ISA 9.7.9.7
// (prmt).
template <int first>
DLATTN_DEVICE uint32 spread_bytes(uint32 word) {
  uint32 spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(word), "n"(0x4140 + 0x101 * first));
  return spread;
}

}  // namespace dlattn
