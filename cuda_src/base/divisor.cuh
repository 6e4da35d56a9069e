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

// By a number that only the device knows, in half the time of a division: of what is not negative, where
// all numbers are below 2^24, or the quotient is below 2^20. That of fp32 is out by no more than one then.
DLATTN_DEVICE int small_quotient(int of, int by) {
  const int near = __fdividef(of, by), rest = of - near * by;
  return near + (rest >= by) - (rest < 0);
}

}  // namespace dlattn
