// Rows of keys and values, and of their gradients: one after another, or in pages.
#pragma once

#include "attn/params.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

// Rows of one sequence and head, from `first` and first_column on, that lie in pages. None of a page that the container
// does not have.
template <class T>
struct PagedRows {
  static constexpr bool has_gaps = true;
  const TensorRef& container;
  const PageTableRef& table;
  int batch, head, first, first_column;

  DLATTN_DEVICE T* at(int row, int column) const {
    const int key = first + row, number = table.number(table.entries(batch), key);
    if (!table.has(number)) return nullptr;
    return container.rows<T>(number, head, table.slot(key)) + first_column + column;
  }

  struct Unit {
    const PagedRows& rows;
    int row, column;

    DLATTN_DEVICE const T* at(bool valid) const { return valid ? rows.at(row, column) : nullptr; }
    DLATTN_DEVICE void advance(int more) { row += more; }
  };
  DLATTN_DEVICE Unit unit(int row, int column) const { return {*this, row, column}; }
};

// Rows that the lanes of a warp have found: row i is that of lane first_lane + i.
template <class T>
struct GatheredRows {
  static constexpr bool has_gaps = true;
  const T* own;  // of this lane; null where there is none
  int first_lane;

  struct Unit {
    const T* own;
    int lane, column;

    // For all lanes.
    DLATTN_DEVICE const T* at(bool) const {
      const uint64 address = __shfl_sync(0xffffffffu, reinterpret_cast<uint64>(own), lane);
      return address == 0 ? nullptr : reinterpret_cast<const T*>(address) + column;
    }
    DLATTN_DEVICE void advance(int more) { lane += more; }
  };
  DLATTN_DEVICE Unit unit(int row, int column) const { return {own, first_lane + row, column}; }
};

// The rows of a sequence's keys or values, or of their gradients, from `first` and first_column on.
template <class Problem, bool paged, class T = typename Problem::Element>
DLATTN_DEVICE Either<paged, PagedRows<T>, StridedRows<T>> key_rows(const TensorRef& tensor,
                                                                   const PageTableRef& table,
                                                                   int batch, int head, int first,
                                                                   int first_column = 0) {
  if constexpr (paged) {
    return {tensor, table, batch, head, first, first_column};
  } else {
    return {tensor.rows<T, Problem::ragged>(batch, head, first) + first_column, tensor.row};
  }
}

// Rows of dK and dV that a sequence may have.
template <class Problem>
DLATTN_DEVICE int rows_of_gradients(const Params& p) {
  return Problem::paged_k || Problem::paged_v ? p.paged_rows : p.seq_kv;
}

// Rows of a gradient that are stored: as `TensorRef::stored_rows`, zeros past the actual length; if
// paged, of pages that hold tokens.
template <class Problem, bool paged>
DLATTN_DEVICE int stored_keys(const Params& p, const TensorRef& gradient, const PageTableRef& table,
                              int length) {
  if constexpr (paged) return table.whole_pages(length);
  return gradient.stored_rows<Problem::ragged>(length, p.seq_kv);
}

}  // namespace dlattn
