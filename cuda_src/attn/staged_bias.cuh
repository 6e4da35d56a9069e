// What a lane has of a bias that the copy engine brought to shared memory: that of its accumulators.
#pragma once

#include "attn/position.cuh"
#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"
#include "tile/slab_tile.cuh"

namespace dlattn {

// A tile of it: a row for each query, or one for all.
template <class Bias, int queries, int keys>
struct StagedTile : SlabTile<typename Bias::Element, Bias::one_row ? 8 : queries, keys> {
  using Slabs = SlabTile<typename Bias::Element, Bias::one_row ? 8 : queries, keys>;
  using typename Slabs::Element;
  static constexpr bool one_row = Bias::one_row;
  static constexpr int loaded_bytes = one_row ? Slabs::slabs * Slabs::pitch : Slabs::bytes;

  static DLATTN_DEVICE uint32 row(uint32 query) { return one_row ? 0 : query; }
  DLATTN_DEVICE uint32 unit_address(uint32 query, uint32 unit) const {
    return Slabs::unit_address(row(query), unit);
  }
  DLATTN_DEVICE void load(const TensorMap& map, uint64& barrier, int query, int head, int batch,
                          int first_key) {
    Slabs::load(map, barrier, int(row(query)), head, batch, first_key);
  }
};
template <int queries, int keys>
struct StagedTile<void, queries, keys> {
  static constexpr int loaded_bytes = 0;
};

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
      pairs[i] = load_shared_u16(first + i / 2 * 8 + i % 2 * (Tile::row(8) * Tile::pitch));
    }
  }
  DLATTN_DEVICE bool element(int n, int i) const {
    return (pairs[2 * n + i / 2] & (i % 2 == 0 ? 0x00ffu : 0xff00u)) != 0;
  }
};

template <class Tile>
DLATTN_DEVICE auto staged_rows(const Tile& tile, int row, int column) {
  return StagedRows<typename Tile::Element>(tile, row, column);
}

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

template <class Tile>
DLATTN_DEVICE auto staged_columns(const Tile& tile, int query, int key) {
  return StagedColumns<typename Tile::Element>(tile, query, key);
}

}  // namespace dlattn
