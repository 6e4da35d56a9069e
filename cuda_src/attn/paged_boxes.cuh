// Tiles of keys or values that the copy engine gathers from pages: a box of as many rows at a
// time as pages and tile have in common, a power of two, at least 8.
#pragma once

#include "attn/seqlen.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace dlattn {

template <int tile_rows>
struct PagedBoxes {
  const PageTableRef& table;
  const int* const entries;

  DLATTN_DEVICE PagedBoxes(const PageTableRef& page_table, int batch)
      : table(page_table), entries(table.entries(batch)) {}

  // A page that the container does not have: loads give zeros.
  DLATTN_DEVICE int nowhere() const { return table.pages; }

  DLATTN_DEVICE int rows() const { return least(1 << table.log2_rows, tile_rows & -tile_rows); }

  // What the table says of a row; entries for rows from `end` on are not read. Whether there is such a page
  // is asked when its box is loaded: a thread that asks has waited for the number.
  DLATTN_DEVICE int number(int row, int end) const {
    return row < end ? table.number(entries, row) : -1;
  }
  DLATTN_DEVICE int existing(int number) const { return table.has(number) ? number : nowhere(); }

  // Of the box of this lane in the tile that begins with this row.
  DLATTN_DEVICE int number_of_lane(int first, int end) const {
    const int offset = threadIdx.x % 32 * rows();
    return offset < tile_rows ? number(first + offset, end) : -1;
  }

  // By a warp, of which each lane has the number for its box: so they are there without waiting. Copies are
  // short, and the time between two of them counts: four lie side by side.
  template <class Tile>
  DLATTN_DEVICE void load_by_warp(Tile& tile, const TensorMap& map, uint64& landed, int first,
                                  int head, int number_of_lane) const {
#pragma unroll 4
    for (int row = 0, box = 0; row < tile_rows; row += rows(), ++box) {
      const int number = existing(from_lane(number_of_lane, box));
      if (elected()) tile.load_rows(row, map, landed, table.slot(first + row), head, number);
    }
    __syncwarp();
  }

  // By one thread, which reads the table as it goes.
  template <class Tile>
  DLATTN_DEVICE void load(Tile& tile, const TensorMap& map, uint64& landed, int first, int head,
                          int end) const {
#pragma unroll 1
    for (int row = 0; row < tile_rows; row += rows()) {
      const int own = existing(number(first + row, end));
      tile.load_rows(row, map, landed, table.slot(first + row), head, own);
    }
  }
};

// Whether the copy engine may be given a box of a tensor that begins with row `first` of an entry. One that
// lies wholly past the end of its map makes it look at the map's beginning (an illegal address, seen on an
// H200), which for a ragged tensor is before the tensor, where there may be no memory.
template <class Problem>
DLATTN_DEVICE bool may_move(const TensorRef& ref, int first, int length) {
  return !ref.is_ragged<Problem::ragged>() || first < length;
}

// Where the copy engine finds keys or values.
struct MappedKeys {
  const TensorMap& map;
  Mapped tensor;
  const TensorRef& ref;
  const PageTableRef& table;  // if they are paged
};

// Starts loading a tile of keys or values, paged or not, that begins with this row; by one thread. `once`:
// nobody else reads it.
template <class Problem, bool paged, bool once = false, class Tile>
DLATTN_DEVICE void load_key_tile(Tile& tile, const MappedKeys& keys, uint64& landed, int first,
                                 int head, int batch, const Lengths& length, const Params& p) {
  if constexpr (paged) {
    const PagedBoxes<Tile::rows> boxes(keys.table, batch);
    boxes.load(tile, keys.map, landed, first, head, length.kv);
  } else {
    const MappedEntry entry = p.mapped_entry<Problem::ragged>(keys.tensor, batch);
    if constexpr (once) {
      tile.load_once(keys.map, landed, entry.row + first, head, entry.batch);
    } else {
      tile.load(keys.map, landed, entry.row + first, head, entry.batch);
    }
  }
}

}  // namespace dlattn
