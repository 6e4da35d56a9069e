// A matrix in shared memory, and copies between it and rows in global memory.
#pragma once

#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

// Rows are padded so that their pitch is an odd number of 16-byte units: the eight rows that one
// ldmatrix phase reads then fall into eight different groups of banks, for any column count, and
// every fragment address is one base plus a compile-time offset (a swizzle would cost an XOR each).
template <class T, int rows_, int columns_>
struct SharedTile {
  using Element = T;
  static_assert(sizeof(T) == 2);
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int pitch = (columns / 8) % 2 == 0 ? columns + 8 : columns;
  static_assert(columns % 8 == 0, "a row is a whole number of 16-byte units");

  alignas(16) T data[rows * pitch];

  DLATTN_DEVICE T* at(int row, int column) { return data + row * pitch + column; }
  DLATTN_DEVICE uint32 address(int row, int column) const {
    return shared_address(data) + (row * pitch + column) * 2;
  }

  // Addresses of 16-byte units, at distances from one of them.
  struct UnitAddress {
    uint32 first;
    DLATTN_DEVICE uint32 at(int down, int right) const {
      return first + (down * pitch + right) * 2;
    }
  };
  DLATTN_DEVICE UnitAddress unit(int row, int column) const { return {address(row, column)}; }
};

// How a block's threads divide a tile into units of 8 columns. Neighbouring threads share a row, as
// many as divide both the row and the block, so that all units of a thread lie at compile-time
// distances from its first.
template <int threads, int rows, int columns>
struct Units {
  static constexpr int threads_per_row = greatest_common_divisor(columns / 8, threads);
  static constexpr int rows_per_pass = threads / threads_per_row;
  static constexpr int passes = ceil_div(rows, rows_per_pass);
  static constexpr int column_step = 8 * threads_per_row;

  const int first_row, first_column;

  DLATTN_DEVICE Units() : Units(opaque(threadIdx.x)) {}
  DLATTN_DEVICE explicit Units(int thread)
      : first_row(thread / threads_per_row), first_column(thread % threads_per_row * 8) {}

  // Calls visit(row, column) for each unit of this thread.
  template <class Visit>
  DLATTN_DEVICE void for_each(Visit visit) const {
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row + pass * rows_per_pass;
      if (rows % rows_per_pass != 0 && row >= rows) return;
#pragma unroll
      for (int column = 0; column < columns; column += column_step) {
        visit(row, first_column + column);
      }
    }
  }
};

// Where the rows of a tile are in global memory: at equal distances. Other kinds of rows (some lie in
// pages) have the same functions, and give no address where nothing is.
template <class T>
struct StridedRows {
  static constexpr bool has_gaps = false;
  T* first;
  int64 stride;  // in elements

  DLATTN_DEVICE T* at(int row, int column) const { return first + row * stride + column; }

  // What a thread walks down.
  struct Unit {
    const T* address;
    int64 stride;

    DLATTN_DEVICE const T* at(bool) const { return address; }
    DLATTN_DEVICE void advance(int rows) { address += rows * stride; }
  };
  DLATTN_DEVICE Unit unit(int row, int column) const { return {at(row, column), stride}; }
};
template <class T>
DLATTN_DEVICE StridedRows<T> strided(T* first, int64 stride) {
  return {first, stride};
}

// Starts loading rows into some rows of a tile, from first_row on, by some threads of which this is
// one. Those beyond valid_rows, and columns from valid_columns on, become zeros, and memory outside the
// valid part is never read. Wait for the copies and at a barrier. access_bytes 16 needs 16-byte aligned
// rows.
template <int threads, int rows, int valid_columns, int access_bytes, class Tile, class Rows>
DLATTN_DEVICE void load_rows(Tile& s_tile, int first_row, const Rows& g_rows, int valid_rows,
                             int thread) {
  using U = Units<threads, rows, Tile::columns>;
  const U units(thread);
  const int column = units.first_column;
  auto g_at = g_rows.unit(units.first_row, column);
  const auto s_unit = s_tile.unit(first_row + units.first_row, column);
#pragma unroll
  for (int pass = 0; pass < U::passes; ++pass, g_at.advance(U::rows_per_pass)) {
    const int row = units.first_row + pass * U::rows_per_pass;
    if (rows % U::rows_per_pass != 0 && row >= rows) return;
    const auto* g_unit = g_at.at(row < valid_rows);
    const bool exists = Rows::has_gaps ? g_unit != nullptr : row < valid_rows;
#pragma unroll
    for (int step = 0; step < Tile::columns; step += U::column_step) {
      const bool valid =
          exists && (valid_columns == Tile::columns || column + step < valid_columns);
      if constexpr (access_bytes == 16) {
        cp_async_16(s_unit.at(pass * U::rows_per_pass, step), g_unit + step, valid);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          s_tile.at(first_row + row, column + step)[i] =
              valid ? g_unit[step + i] : typename Tile::Element{0};
        }
      }
    }
  }
}

// The same of all rows, by all threads of a block.
template <int threads, int valid_columns, int access_bytes, class Tile, class Rows>
DLATTN_DEVICE void load_tile(Tile& s_tile, const Rows& g_rows, int valid_rows) {
  load_rows<threads, Tile::rows, valid_columns, access_bytes>(s_tile, 0, g_rows, valid_rows,
                                                              opaque(threadIdx.x));
}

// Stores the first valid_rows rows and valid_columns columns of a tile.
template <int threads, int valid_columns, int access_bytes, class Tile, class Rows>
DLATTN_DEVICE void store_tile(const Rows& rows, Tile& s_tile, int valid_rows) {
  Units<threads, Tile::rows, Tile::columns>().for_each([&](int row, int column) {
    if (row >= valid_rows || column >= valid_columns) return;
    auto* g_unit = rows.at(row, column);
    if (Rows::has_gaps && g_unit == nullptr) return;
    if constexpr (access_bytes == 16) {
      *reinterpret_cast<uint4*>(g_unit) = *reinterpret_cast<const uint4*>(s_tile.at(row, column));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) g_unit[i] = s_tile.at(row, column)[i];
    }
  });
}

}  // namespace dlattn
