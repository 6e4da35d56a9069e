// Which elements a user's function of scores keeps, where that depends on places and not on scores.
// dlattn/plans/score_source.py writes
//
//   struct ScoreMask {
//     struct OfQuery;                            // what is computed of a query alone, or of nothing
//     struct OfKey;                              // of a key alone
//     static OfQuery of_query(at, values);
//     static OfKey of_key(at, values);
//     static bool keeps(query, key, at, values)  // what is left to do for each element
//   };
//
// Kernels ask before they need scores, and only of tiles of which some elements may be masked
// (kernels/score_blocks.cuh): answers take a bit each, and no branch.
#pragma once

#include "attn/problem.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

template <class Problem>
concept MasksElements = requires { typename Problem::ElementMask; };

// Of a tile's elements that a lane has in two rows, as accumulators have them: two in each eight columns.
struct KeptElements {
  bool all;
  uint32 of_row[2];  // a bit each, unless all are kept
  DLATTN_DEVICE uint32 row(int i) const { return of_row[i / 2]; }
};
struct AllElements {
  static constexpr bool all = true;
  DLATTN_DEVICE uint32 row(int) const { return ~0u; }
};
template <class Problem>
using Kept = Either<MasksElements<Problem>, KeptElements, AllElements>;

// What the mask makes of a lane's rows and columns, one of which are queries and one keys.
template <class Mask, bool rows_are_keys>
struct MaskedRows {
  const Position first;  // of the lane's elements
  const ScoreValues& values;

  // What does not exist is as the last that does, and masked elsewhere.
  DLATTN_DEVICE Position at(int row, int column) const {
    Position place = first;
    place.query = least(first.query + (rows_are_keys ? column : row), first.length_q - 1);
    place.key = least(first.key + (rows_are_keys ? row : column), first.length_kv - 1);
    place.down = place.right = 0;
    return place;
  }
  DLATTN_DEVICE auto row(int row) const {
    if constexpr (rows_are_keys)
      return Mask::of_key(at(row, 0), values);
    else
      return Mask::of_query(at(row, 0), values);
  }
  DLATTN_DEVICE auto column(int column) const {
    if constexpr (rows_are_keys)
      return Mask::of_query(at(0, column), values);
    else
      return Mask::of_key(at(0, column), values);
  }
  template <class Row, class Column>
  DLATTN_DEVICE bool keeps(const Row& of_row, const Column& of_column, int row, int column) const {
    if constexpr (rows_are_keys)
      return Mask::keeps(of_column, of_row, at(row, column), values);
    else
      return Mask::keeps(of_row, of_column, at(row, column), values);
  }
};

// Of `count` elements a row, in the row of `first` and the one eight rows below.
template <class Mask, int count, bool rows_are_keys>
DLATTN_DEVICE KeptElements kept_by(const Position& first, const ScoreValues& values) {
  const MaskedRows<Mask, rows_are_keys> masked{first, values};
  const decltype(masked.row(0)) rows[2] = {masked.row(0), masked.row(8)};
  KeptElements kept{};
  constexpr int group = 8;  // on their way at a time
#pragma unroll 1
  for (int begin = 0; begin < count; begin += group) {
    uint32 found[2] = {};
#pragma unroll
    for (int e = 0; e < group; ++e) {
      const int column = 4 * begin + e / 2 * 8 + e % 2;
      const auto own = masked.column(column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (masked.keeps(rows[r], own, 8 * r, column)) found[r] |= 1u << e;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) kept.of_row[r] |= found[r] << begin;
  }
  return kept;
}

// Elements of a warp's tile that the mask drops become `value`.
template <class Mask, int m_tiles, int n_tiles>
DLATTN_DEVICE void drop_masked(Accumulator<m_tiles, n_tiles>& tile, float value,
                               const Position& first, const ScoreValues& values) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    Position at = first;
    at.query += 16 * m;
    const KeptElements kept = kept_by<Mask, 2 * n_tiles, false>(at, values);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((kept.row(i) >> (2 * n + i % 2) & 1) == 0) tile.at[m][n][i] = value;
      }
  }
}

}  // namespace dlattn
