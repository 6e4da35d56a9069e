// Tiles of keys or values that the copy engine gathers from pages, or scatters into them: a box of as
// many rows at a time as pages and tile have in common, a power of two, at least 8.
#pragma once

#include "attn/seqlen.cuh"
#include "ptx/opaque.cuh"
#include "ptx/tma.cuh"

namespace dlattn {

template <int tile_rows>
struct PagedBoxes {
  const PageTableRef& table;
  const int* const entries;

  DLATTN_DEVICE PagedBoxes(const PageTableRef& page_table, int batch)
      : table(page_table), entries(table.entries(batch)) {}

  // The page that no container has: loads give zeros, and stores write nothing.
  static constexpr int nowhere = -1;

  DLATTN_DEVICE int rows() const { return least(1 << table.log2_rows, tile_rows & -tile_rows); }

  // The number of the page of a row; entries for rows from `end` on are not read.
  DLATTN_DEVICE int number(int row, int end) const {
    return row < end ? table.number(entries, row) : nowhere;
  }

  // Of the box of this lane in the tile that begins with this row.
  DLATTN_DEVICE int number_of_lane(int first, int end) const {
    const int offset = threadIdx.x % 32 * rows();
    return offset < tile_rows ? number(first + offset, end) : nowhere;
  }

  // By a warp, of which each lane has the number for its box: so they are there without waiting.
  template <class Tile>
  DLATTN_DEVICE void load_by_warp(Tile& tile, const TensorMap& map, uint64& landed, int first,
                                  int head, int number_of_lane) const {
#pragma unroll 1
    for (int row = 0, box = 0; row < tile_rows; row += rows(), ++box) {
      const int number = __shfl_sync(0xffffffffu, number_of_lane, box);
      if (threadIdx.x % 32 == 0) {
        tile.load(map, landed, table.slot(first + row), head, number, row);
      }
    }
    __syncwarp();
  }

  // By one thread, which reads the table as it goes.
  template <class Tile>
  DLATTN_DEVICE void load(Tile& tile, const TensorMap& map, uint64& landed, int first, int head,
                          int end) const {
#pragma unroll 1
    for (int row = 0; row < tile_rows; row += rows()) {
      tile.load(map, landed, table.slot(first + row), head, number(first + row, end), row);
    }
  }

  // Rows of a tile from tile_row on, that belong at `first`; by one thread.
  template <class Tile>
  DLATTN_DEVICE void store(const Tile& tile, const TensorMap& map, int first, int head, int end,
                           int tile_row) const {
#pragma unroll 1
    for (int row = 0; row < tile_rows; row += rows()) {
      tile.store(map, table.slot(first + row), head, number(first + row, end), tile_row + row);
    }
  }
};

// Starts loading a tile of keys or values, paged or not, that begins with this row; by one thread.
template <bool paged, class Tile>
DLATTN_DEVICE void load_key_tile(Tile& tile, const TensorMap& map, uint64& landed,
                                 const PageTableRef& table, int first, int head, int batch,
                                 const Lengths& length) {
  if constexpr (paged) {
    const PagedBoxes<Tile::rows> boxes(table, batch);
    boxes.load(tile, map, landed, first, head, length.kv);
  } else {
    tile.load(map, landed, first, head, batch);
  }
}

// Starts storing some rows of such a tile, from tile_row on, that belong at `first`; by one thread.
template <bool paged, int rows, class Tile>
DLATTN_DEVICE void store_key_rows(const Tile& tile, int tile_row, const TensorMap& map,
                                  const PageTableRef& table, int first, int head, int batch,
                                  const Params& p) {
  if constexpr (paged) {
    batch = opaque(batch);  // or what follows is read early, and held
    const PagedBoxes<rows> boxes(table, batch);
    const int end = table.whole_pages(p.seq_len_kv.at(batch, p.seq_kv));
    boxes.store(tile, map, first, head, end, tile_row);
  } else {
    tile.store(map, first, head, batch, tile_row);
  }
}

}  // namespace dlattn
