// A matrix in shared memory as the copy engine and the warpgroup multiplies see it.
#pragma once

#include "base/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace dlattn {

// Slabs of 128 bytes of columns, one after the other; in a slab, the 16-byte units of row r are
// permuted by XOR with r % 8 (the hardware's 128-byte swizzle). Operands of products have 16-bit
// elements.
template <class T, int rows_, int columns_>
struct SlabTile {
  using Element = T;
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int pitch = 128;  // bytes from a row to the next
  static constexpr int slab_columns = pitch / sizeof(T), unit_columns = 16 / sizeof(T);
  static constexpr int slabs = ceil_div(columns, slab_columns);
  static constexpr int slab_bytes = rows * pitch;
  static constexpr int bytes = slabs * slab_bytes;
  static_assert(sizeof(T) <= 2 && rows % 8 == 0);

  alignas(1024) T data[slabs * rows * slab_columns];

  DLATTN_DEVICE uint32 address() const { return shared_address(data); }

  // Address of the 16-byte unit that holds columns [unit_columns unit, unit_columns (unit + 1)).
  DLATTN_DEVICE uint32 unit_address(uint32 row, uint32 unit) const {
    return address() + unit / 8 * slab_bytes + row * pitch + (((unit % 8) ^ (row % 8)) << 4);
  }

  // From a unit's address, that of the unit of its row and slab whose number differs in these bits.
  static DLATTN_DEVICE uint32 other_unit(uint32 address, uint32 bits) {
    return address ^ (bits << 4);
  }

  // Addresses of such units, at distances from one of them.
  struct UnitAddress {
    const SlabTile& tile;
    int row, column;
    DLATTN_DEVICE uint32 at(int down, int right) const {
      return tile.unit_address(row + down, (column + right) / unit_columns);
    }
  };
  DLATTN_DEVICE UnitAddress unit(int row, int column) const { return {*this, row, column}; }

  // Starts loading rows from `row` and columns from first_column on of one head; arrives on the barrier
  // with `bytes` bytes.
  DLATTN_DEVICE void load(const TensorMap& map, uint64& barrier, int row, int head, int batch,
                          int first_column = 0) {
    load_rows(0, map, barrier, row, head, batch, first_column);
  }

  // The same of what nobody reads again.
  DLATTN_DEVICE void load_once(const TensorMap& map, uint64& barrier, int row, int head,
                               int batch) {
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab) {
      tma_load_4d(address() + slab * slab_bytes, map, barrier, slab * slab_columns, row, head,
                  batch, L2::evict_first);
    }
  }

  // The same, to tile_row and below, of as many rows as the map's boxes have.
  DLATTN_DEVICE void load_rows(int tile_row, const TensorMap& map, uint64& barrier, int row,
                               int head, int batch, int first_column = 0) {
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab) {
      tma_load_4d(address() + slab * slab_bytes + tile_row * pitch, map, barrier,
                  first_column + slab * slab_columns, row, head, batch);
    }
  }

  // The same, into this tile of all blocks of a cluster.
  DLATTN_DEVICE void load_rows_everywhere(int tile_row, const TensorMap& map, uint64& barrier,
                                          int row, int head, int batch, uint32 blocks) {
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab) {
      tma_load_4d_everywhere(address() + slab * slab_bytes + tile_row * pitch, map, barrier,
                             slab * slab_columns, row, head, batch, blocks);
    }
  }

  // Zeros in the rows from `first` on, by some threads side by side.
  DLATTN_DEVICE void clear_rows(int first, int thread, int threads) {
    constexpr int units = slabs * 8;
#pragma unroll 1
    for (int unit = thread; unit < (rows - first) * units; unit += threads) {
      store_shared_zeros(unit_address(first + unit / units, unit % units));
    }
  }

  // Descriptor of columns [16 k_step, 16 k_step + 16) from first_row on, contiguous along columns.
  DLATTN_DEVICE uint64 along_columns(int first_row, int k_step) const {
    const uint32 offset = k_step / 4 * slab_bytes + first_row * 128 + k_step % 4 * 32;
    return wgmma_descriptor(address(), offset, 16, 1024);
  }

  // Descriptor of rows [16 k_step, 16 k_step + 16) with all columns from a slab's on: the transposed
  // right operand.
  DLATTN_DEVICE uint64 along_rows(int k_step, int first_slab = 0) const {
    return wgmma_descriptor(address(), first_slab * slab_bytes + k_step * 2048, slab_bytes, 1024);
  }

  // The same from a column on: of its slab alone, if that begins before.
  DLATTN_DEVICE uint64 along_rows_from(int k_step, int column) const {
    const uint32 offset = column / 64 * slab_bytes + column % 64 * 2 + k_step * 2048;
    return wgmma_descriptor(address(), offset, slab_bytes, 1024);
  }
};

}  // namespace dlattn
