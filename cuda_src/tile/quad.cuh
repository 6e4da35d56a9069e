// Exchanges among the four lanes that hold a row of an accumulator.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// Lane c of a quad receives word c of each of its lanes, in their order: a 4 x 4 transposition.
DLATTN_DEVICE void transpose_quad(uint32 (&words)[4], int lane = threadIdx.x) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const uint32 given = upper ? words[i] : words[i | step];
      const uint32 received = __shfl_xor_sync(0xffffffffu, given, step);
      (upper ? words[i] : words[i | step]) = received;
    }
  }
}

}  // namespace dlattn
