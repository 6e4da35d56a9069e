// What a lane has of a bias that the copy engine brought to shared memory: that of its accumulators.
#pragma once

#include "attn/position.cuh"
#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

// Of two accumulator tiles side by side, whose first element is at (row, column) of the bias's tile.
// Numbers come two in a word.
template <class T>
struct StagedRows {
  uint32 words[4];

  template <class Tile>
  DLATTN_DEVICE StagedRows(const Tile& tile, int row, int column) {
    const int lane = opaque(threadIdx.x % 32);
    ldmatrix_x4<false>(words, tile.unit_address(row + lane % 16, column / 8 + lane / 16));
  }
  // Element i of the first or the second of them.
  DLATTN_DEVICE float element(int n, int i) const {
    const uint32 pair = words[2 * n + i / 2];
    return i % 2 == 0 ? Convert<T>::low(pair) : Convert<T>::high(pair);
  }
};

// Booleans are bytes, of which ldmatrix would give a lane other columns.
template <>
struct StagedRows<bool> {
  uint32 pairs[4];

  template <class Tile>
  DLATTN_DEVICE StagedRows(const Tile& tile, int row, int column) {
    const int lane = opaque(threadIdx.x % 32);
    const uint32 first = tile.unit_address(row + lane / 4, column / 16) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = load_shared_u16(first + i / 2 * 8 + i % 2 * Tile::pitch * 8);
    }
  }
  DLATTN_DEVICE bool element(int n, int i) const {
    return (pairs[2 * n + i / 2] & (i % 2 == 0 ? 0x00ffu : 0xff00u)) != 0;
  }
};

// Of one accumulator tile of transposed scores, whose first element is at (query, key) of the bias's
// tile.
template <class T>
struct StagedColumns {
  uint32 words[2];

  template <class Tile>
  DLATTN_DEVICE StagedColumns(const Tile& tile, int query, int key) {
    const int lane = opaque(threadIdx.x % 32);
    ldmatrix_x2<true>(words, tile.unit_address(query + lane % 8, key / 8 + lane / 8 % 2));
  }
  DLATTN_DEVICE float element(int i) const {
    return i % 2 == 0 ? Convert<T>::low(words[i / 2]) : Convert<T>::high(words[i / 2]);
  }
};

template <>
struct StagedColumns<bool> {
  uint32 bytes[4];

  template <class Tile>
  DLATTN_DEVICE StagedColumns(const Tile& tile, int query, int key) {
    const int lane = opaque(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32 unit = tile.unit_address(query + lane % 4 * 2 + i % 2, key / 16);
      bytes[i] = load_shared_u8(unit + lane / 4 + i / 2 * 8);
    }
  }
  DLATTN_DEVICE bool element(int i) const { return bytes[i] != 0; }
};

}  // namespace dlattn
