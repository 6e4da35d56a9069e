// A matrix in shared memory, and copies between it and rows in global memory.
#pragma once

#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// Rows are padded so that their pitch is an odd number of 16-byte units: the eight rows that one
// ldmatrix phase reads then fall into eight different groups of banks, for any column count, and
// every fragment address is one base plus a compile-time offset (a swizzle would cost an XOR each).
template <class T, int rows_, int columns_>
struct SharedTile {
  using Element = T;
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int pitch = (columns / 8) % 2 == 0 ? columns + 8 : columns;
  static_assert(columns % 8 == 0, "a row is a whole number of 16-byte units");

  alignas(16) T data[rows * pitch];

  DLATTN_DEVICE T* at(int row, int column) { return data + row * pitch + column; }
};

// Calls visit(row, column) for each 8-column unit of a tile that this thread owns. Neighbouring
// threads share a row; as many as divide both the row and the block, so that a thread's units lie
// at compile-time distances from its first.
template <int threads, int rows, int columns, class Visit>
DLATTN_DEVICE void for_each_unit(Visit visit) {
  constexpr int threads_per_row = greatest_common_divisor(columns / 8, threads);
  constexpr int rows_per_pass = threads / threads_per_row;
  const int first_row = threadIdx.x / threads_per_row;
  const int first_column = threadIdx.x % threads_per_row * 8;
#pragma unroll
  for (int pass = 0; pass < ceil_div(rows, rows_per_pass); ++pass) {
    const int row = first_row + pass * rows_per_pass;
    if (rows % rows_per_pass != 0 && row >= rows) return;
#pragma unroll
    for (int column = 0; column < columns; column += 8 * threads_per_row) {
      visit(row, first_column + column);
    }
  }
}

// Starts loading rows [0, valid_rows) of g_rows into a tile; the other rows and the columns from
// valid_columns on become zeros, and memory outside the valid part is never read.
// Wait with cp_async_wait_all() and a barrier. access_bytes 16 needs 16-byte aligned rows.
template <int threads, int valid_columns, int access_bytes, class Tile>
DLATTN_DEVICE void load_tile(Tile& s_tile, const typename Tile::Element* g_rows, int64 row_stride,
                             int valid_rows) {
  for_each_unit<threads, Tile::rows, Tile::columns>([&](int row, int column) {
    const bool valid = row < valid_rows && (valid_columns == Tile::columns || column < valid_columns);
    const auto* g_unit = g_rows + row * row_stride + column;
    if constexpr (access_bytes == 16) {
      cp_async_16(shared_address(s_tile.at(row, column)), valid ? g_unit : g_rows, valid);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s_tile.at(row, column)[i] = valid ? g_unit[i] : typename Tile::Element{0};
      }
    }
  });
}

// Stores the first valid_rows rows and valid_columns columns of a tile.
template <int threads, int valid_columns, int access_bytes, class Tile>
DLATTN_DEVICE void store_tile(typename Tile::Element* g_rows, int64 row_stride, Tile& s_tile,
                              int valid_rows) {
  for_each_unit<threads, Tile::rows, Tile::columns>([&](int row, int column) {
    if (row >= valid_rows || column >= valid_columns) return;
    auto* g_unit = g_rows + row * row_stride + column;
    if constexpr (access_bytes == 16) {
      *reinterpret_cast<uint4*>(g_unit) = *reinterpret_cast<const uint4*>(s_tile.at(row, column));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) g_unit[i] = s_tile.at(row, column)[i];
    }
  });
}

// Writes zeros to rows [0, valid_rows) in global memory.
template <int threads, int rows, int valid_columns, class T>
DLATTN_DEVICE void store_zeros(T* g_rows, int64 row_stride, int valid_rows) {
  for_each_unit<threads, rows, valid_columns>([&](int row, int column) {
    if (row >= valid_rows) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) g_rows[row * row_stride + column + i] = T{0};
  });
}

}  // namespace dlattn
