// One warpgroup's matrix products: the right operand in shared memory, the left one there or in
// registers, accumulators in registers. They run on while the warps go on: wait, then tie.
#pragma once

#include "base/types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/opaque.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// Results that have been waited for: they are not read earlier.
template <int n_tiles>
DLATTN_DEVICE void tie(Accumulator<1, n_tiles>& c) {
  c.for_each([](float& value, int, int, int) { wgmma_tie(value); });
}

// A warp's 16 rows of a left operand, the first of which is `row` of a tile: into registers.
template <class T, int k_steps, class Tile>
DLATTN_DEVICE void load_left(RegisterLeft<T, 1, k_steps>& left, const Tile& tile, int row) {
  const int lane = opaque(threadIdx.x % 32);
#pragma unroll
  for (int k = 0; k < k_steps; ++k) {
    ldmatrix_x4<false>(left.at[0][k], tile.unit_address(row + lane % 16, 2 * k + lane / 16));
  }
}

// Starts c = (64 rows of left, from first_row on) (as many rows of right as c has columns, from
// first_column on)^T, or c += that.
template <bool accumulate = false, class Left, class Right, int n_tiles>
DLATTN_DEVICE void start_product(Accumulator<1, n_tiles>& c, const Left& left, int first_row,
                                 const Right& right, int first_column = 0) {
  auto& d = reinterpret_cast<float (&)[4 * n_tiles]>(c.at);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Left::columns / 16; ++k) {
    WgmmaShape<8 * n_tiles>::template shared_shared<typename Left::Element>(
        d, left.along_columns(first_row, k), right.along_columns(first_column, k),
        accumulate || k > 0);
  }
  wgmma_commit();
}

// The same, with a left operand in registers.
template <bool accumulate = false, int k_steps, class Right, int n_tiles>
DLATTN_DEVICE void start_product(Accumulator<1, n_tiles>& c,
                                 const RegisterLeft<typename Right::Element, 1, k_steps>& left,
                                 const Right& right, int first_column = 0) {
  auto& d = reinterpret_cast<float (&)[4 * n_tiles]>(c.at);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < k_steps; ++k) {
    WgmmaShape<8 * n_tiles>::template register_shared<typename Right::Element, 0>(
        d, left.at[0][k], right.along_columns(first_column, k), accumulate || k > 0);
  }
  wgmma_commit();
}

// Starts c += left (rows of right from 16 first_step on). A product of more columns than most_columns
// is halved: an instruction's registers must fit what a thread is launched with.
template <int most_columns = 256, int k_steps, class Right, int n_tiles>
DLATTN_DEVICE void start_accumulation(Accumulator<1, n_tiles>& c,
                                      const RegisterLeft<typename Right::Element, 1, k_steps>& left,
                                      const Right& right, int first_step = 0) {
  constexpr int columns = 8 * n_tiles <= most_columns ? 8 * n_tiles : 4 * n_tiles;
  wgmma_fence();
#pragma unroll
  for (int first = 0; first < 8 * n_tiles; first += columns) {
    auto& d = reinterpret_cast<float (&)[columns / 2]>(c.at[0][first / 8]);
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      WgmmaShape<columns>::template register_shared<typename Right::Element, 1>(
          d, left.at[0][k], right.along_rows(first_step + k, first / 64), 1);
    }
  }
  wgmma_commit();
}

// Rounds a warp's 16 rows of the accumulator tiles n and n + 1. Lane i has the address of 8 columns:
// of row i % 16, in tile n + i / 16.
template <class T, int n_tiles>
DLATTN_DEVICE void store_columns(uint32 address, Accumulator<1, n_tiles>& c, int n) {
  const RegisterLeft<T, 1, 1> packed(reinterpret_cast<Accumulator<1, 2>&>(c.at[0][n]));
  const auto& r = packed.at[0][0];
  stmatrix_x4(address, r[0], r[1], r[2], r[3]);
}

// Rounds a warp's 16 rows of the accumulator tiles n and n + 1 into rows of the tile, of 16-bit
// elements, from unit on. `row` is the tile's row of this lane: the warp's first plus lane % 16.
template <class Tile, int n_tiles>
DLATTN_DEVICE void store_columns(const Tile& tile, int row, int unit, int lane,
                                 Accumulator<1, n_tiles>& c, int n) {
  store_columns<typename Tile::Element>(tile.unit_address(row, unit + lane / 16), c, n);
}

}  // namespace dlattn
