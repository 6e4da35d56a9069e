// One warp's matrix products: operands in shared memory or registers, accumulators in registers.
#pragma once

#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

// Accumulators of a (16 m_tiles) x (8 n_tiles) block, as mma leaves them.
template <int m_tiles, int n_tiles>
struct Accumulator {
  float at[m_tiles][n_tiles][4];

  DLATTN_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0.f;
  }

  // Calls visit(value, m, n, i); row() and column() say where that element is.
  template <class Visit>
  DLATTN_DEVICE void for_each(Visit visit) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(at[m][n][i], m, n, i);
  }

  static DLATTN_DEVICE int row(int m, int i) {
    return 16 * m + (threadIdx.x % 32) / 4 + 8 * (i / 2);
  }
  static DLATTN_DEVICE int column(int n, int i) { return 8 * n + 2 * (threadIdx.x % 4) + i % 2; }
  // From a lane's first element: constants, once loops are unrolled.
  static DLATTN_DEVICE constexpr int row_step(int m, int i) { return 16 * m + 8 * (i / 2); }
  static DLATTN_DEVICE constexpr int column_step(int n, int i) { return 8 * n + i % 2; }
};

// The left operand (m x k) in shared memory, stored [m][k], or [k][m] when transposed.
template <class Tile, bool transposed>
struct SharedLeft {
  uint32 base;

  DLATTN_DEVICE SharedLeft(Tile& s_tile, int first_m) {
    const int lane = threadIdx.x % 32;
    base = transposed ? s_tile.address(lane % 8 + lane / 16 * 8, first_m + lane / 8 % 2 * 8)
                      : s_tile.address(first_m + lane % 16, lane / 16 * 8);
  }
  DLATTN_DEVICE void load(uint32 (&a)[4], int m, int k_step) const {
    const int row = transposed ? 16 * k_step : 16 * m, column = transposed ? 16 * m : 16 * k_step;
    ldmatrix_x4<transposed>(a, base + (row * Tile::pitch + column) * 2);
  }
};

// The left operand in registers: accumulators of an earlier product, rounded to T.
template <class T, int m_tiles, int k_steps>
struct RegisterLeft {
  uint32 at[m_tiles][k_steps][4];

  DLATTN_DEVICE RegisterLeft() {}
  DLATTN_DEVICE explicit RegisterLeft(const Accumulator<m_tiles, 2 * k_steps>& c) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int k = 0; k < k_steps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = c.at[m][2 * k + i / 2];
          at[m][k][i] = Convert<T>::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
  }
  DLATTN_DEVICE void load(uint32 (&a)[4], int m, int k_step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = at[m][k_step][i];
  }
};

// The right operand (k x n) in shared memory, stored [n][k], or [k][n] when row_major.
template <class Tile, bool row_major>
struct SharedRight {
  uint32 base;

  DLATTN_DEVICE SharedRight(const Tile& s_tile, int first_n, int first_k = 0) {
    const int lane = threadIdx.x % 32;
    base = row_major
               ? s_tile.address(first_k + lane % 16, first_n + lane / 16 * 8)
               : s_tile.address(first_n + lane % 8 + lane / 16 * 8, first_k + lane / 8 % 2 * 8);
  }
  DLATTN_DEVICE uint32 address(int n, int k_step) const {
    const int row = row_major ? 16 * k_step : 8 * n, column = row_major ? 8 * n : 16 * k_step;
    return base + (row * Tile::pitch + column) * 2;
  }
};

// c += left x right over 16 k_steps. One mma column pair shares an ldmatrix.
template <class T, int k_steps, int m_tiles, int n_tiles, class Left, class Right, bool row_major>
DLATTN_DEVICE void gemm(Accumulator<m_tiles, n_tiles>& c, const Left& left,
                        const SharedRight<Right, row_major>& right) {
#pragma unroll
  for (int k = 0; k < k_steps; ++k) {
    uint32 a[m_tiles][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) left.load(a[m], m, k);
#pragma unroll
    for (int n = 0; n + 1 < n_tiles; n += 2) {
      uint32 b[4];
      ldmatrix_x4<row_major>(b, right.address(n, k));
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        mma_m16n8k16<T>(c.at[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(c.at[m][n + 1], a[m], b[2], b[3]);
      }
    }
    if constexpr (n_tiles % 2 == 1) {
      uint32 b[2];
      ldmatrix_x2<row_major>(b, right.address(n_tiles - 1, k));
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) mma_m16n8k16<T>(c.at[m][n_tiles - 1], a[m], b[0], b[1]);
    }
  }
}

// Rounds accumulators to the tile's type and stores them at (first_row, first_column).
template <class Tile, int m_tiles, int n_tiles>
DLATTN_DEVICE void store_accumulator(Tile& s_tile, int first_row, int first_column,
                                     const Accumulator<m_tiles, n_tiles>& c) {
  using C = Accumulator<m_tiles, n_tiles>;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        auto* s_pair = s_tile.at(first_row + C::row(m, i), first_column + C::column(n, i));
        *reinterpret_cast<uint32*>(s_pair) =
            Convert<typename Tile::Element>::pack(c.at[m][n][i], c.at[m][n][i + 1]);
      }
}

}  // namespace dlattn
