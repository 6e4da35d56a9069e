// Division by numbers that the host knows: 30 instructions, each waiting for the one before, become three.
#pragma once

#include "base/types.cuh"

namespace dlattn {

struct Divisor {
  int number;
  uint32 factor;
  int shift;

  // Of what is not negative, and below 2^31.
  DLATTN_DEVICE int quotient(int of) const { return int(uint64(uint32(of)) * factor >> shift); }
  DLATTN_DEVICE int rest(int of) const { return of - quotient(of) * number; }
  // How many it takes to hold so many.
  DLATTN_DEVICE int ceil(int of) const { return quotient(of + number - 1); }
};

}  // namespace dlattn
