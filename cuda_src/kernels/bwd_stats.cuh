// The statistics of query rows, which bwd_delta writes for the kernels after it: a log-sum-exp in log2
// units and -delta. Either as numbers, or as a part of the products: sums of S then begin with what is
// subtracted from the scores, sums of dP with -delta, at the price of one step of 16 columns each,
// instead of a load for every two elements.
#pragma once

#include "attn/score.cuh"
#include "ptx/convert.cuh"
#include "ptx/opaque.cuh"
#include "ptx/wgmma.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// A number as the sum of three of 16 bits, to fp32's precision.
struct ThreeParts {
  float at[3];

  DLATTN_DEVICE explicit ThreeParts(float x) {
    constexpr float lowest = -3e38f;  // in the place of -infinity, which times zero is no number
    x = x < lowest ? lowest : x;
#pragma unroll
    for (float& part : at) {
      part = Convert<bf16>::low(Convert<bf16>::pack(x, 0.f));
      x -= part;
    }
  }
};

// As a right operand, a row: three parts of what scores begin with, three of -delta, zeros. Of 16 columns
// these eight alone are stored, and read twice: the left operand has zeros for the second eight.
struct ProductStats {
  static constexpr int words = 4;  // a row's
  enum Column { score = 0, minus_delta = 3 };

  static DLATTN_DEVICE void write(float* g_tile, int row, float first_score, float first_dp) {
    const ThreeParts s(first_score), d(first_dp);
    const auto pack = &Convert<bf16>::pack;
    reinterpret_cast<uint4*>(g_tile)[row] =
        uint4{pack(s.at[0], s.at[1]), pack(s.at[2], d.at[0]), pack(d.at[1], d.at[2]), 0};
  }

  // Starts c = one of the two, of as many rows as c has columns, for each of its rows.
  template <Column column, int n_tiles>
  static DLATTN_DEVICE void start(Accumulator<1, n_tiles>& c, const float* s_tile, int first_row) {
    const uint32 pair = opaque(threadIdx.x) % 4 * 2 - column;  // of this lane
    const uint32 ones = (pair < 3 ? 0x3f80 : 0) | (pair + 1 < 3 ? 0x3f800000 : 0);
    const uint32 left[4] = {ones, ones, 0, 0};
    // Overwritten: but ptxas of CUDA 13.3 to 13.5 would have what was there before live until here, from one
    // step to the next, in 64 registers that nobody has. No instruction is left of it.
    c.clear();
    auto& d = reinterpret_cast<float (&)[4 * n_tiles]>(c.at);
    wgmma_fence();
    WgmmaShape<8 * n_tiles>::template register_shared<bf16, 0>(
        d, left, wgmma_descriptor_of_units(shared_address(s_tile + words * first_row), 0, 128), 0);
  }
};

}  // namespace dlattn
