// Which elements a user's function of scores keeps, where that depends on places and not on scores.
// dlattn/plans/score_source.py writes
//
//   struct ScoreMask {
//     struct OfQuery;                            // what is computed of a query alone, or of nothing
//     struct OfKey;                              // of a key alone
//     static OfQuery of_query(at, values);
//     static OfKey of_key(at, values);
//     static bool keeps(query, key)              // what is left to do for each element
//     static constexpr bool queries_repeat;      // neighbouring queries may be equal; keys_repeat
//     static bool equal(query, query);           // the same elements are kept; also of keys
//     static OfQuery from_lane(query, lane);     // another lane's
//     static OfKey from_lane(key, lane);
//   };
//
// Kernels ask before they have scores, and only of tiles of which some elements may be masked
// (kernels/score_blocks.cuh): answers take a bit each, and no branch.
#pragma once

#include "attn/problem.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// The same to whatever is computed of them: 0 and -0 are not, a NaN may be.
template <class T>
DLATTN_DEVICE bool identical(T a, T b) {
  static_assert(!same_type<T, double>);
  if constexpr (same_type<T, float>) return __float_as_uint(a) == __float_as_uint(b);
  return a == b;
}

template <class Problem>
concept MasksElements = requires { typename Problem::ElementMask; };

// Of a tile's elements that a lane has in two rows, as accumulators have them: two in each eight columns.
struct KeptElements {
  uint32 of_row[2] = {~0u, ~0u};  // a bit each
  DLATTN_DEVICE uint32 row(int i) const { return of_row[i / 2]; }
};
struct AllElements {
  DLATTN_DEVICE uint32 row(int) const { return ~0u; }
};
template <class Problem>
using Kept = Either<MasksElements<Problem>, KeptElements, AllElements>;

// What is asked of a lane's rows, and of `count` elements in each, that is of a warp's 4 * count columns.
// Rows are queries and columns keys, or the other way round.
template <class Mask, int count, bool rows_are_keys>
struct MaskedRows {
  using OfQuery = typename Mask::OfQuery;
  using OfKey = typename Mask::OfKey;
  using OfRow = Either<rows_are_keys, OfKey, OfQuery>;
  using OfColumn = Either<rows_are_keys, OfQuery, OfKey>;
  static constexpr int columns_of_lane = ceil_div(4 * count, 32);

  OfRow rows[2];
  OfColumn columns[columns_of_lane];  // one in 32, of which all lanes take what they need

  MaskedRows() = default;
  // Of the lane's first element on.
  DLATTN_DEVICE MaskedRows(const Position& first, const ScoreValues& values) {
    const int lane = threadIdx.x % 32, first_column = lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Position at = existing(first, 8 * r, 0);
      if constexpr (rows_are_keys) {
        rows[r] = Mask::of_key(at, values);
      } else {
        rows[r] = Mask::of_query(at, values);
      }
    }
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const Position at = existing(first, 0, 32 * i + lane - first_column);
      if constexpr (rows_are_keys) {
        columns[i] = Mask::of_query(at, values);
      } else {
        columns[i] = Mask::of_key(at, values);
      }
    }
  }

  DLATTN_DEVICE KeptElements kept() const {
    if constexpr (rows_repeat) {
      // As of documents: the warp's rows are like its first one, or like its last.
      const OfRow first = Mask::from_lane(rows[0], 0), last = Mask::from_lane(rows[1], 31);
      const bool like_first[2] = {Mask::equal(rows[0], first), Mask::equal(rows[1], first)};
      const bool like_either = (like_first[0] | Mask::equal(rows[0], last)) &
                               (like_first[1] | Mask::equal(rows[1], last));
      if (__all_sync(0xffffffffu, like_either)) {
        const uint32 of_first = kept_of(first);
        const bool one = __all_sync(0xffffffffu, like_first[0] & like_first[1]);
        const uint32 of_last = one ? of_first : kept_of(last);
        return {{like_first[0] ? of_first : of_last, like_first[1] ? of_first : of_last}};
      }
    }
    return kept_one_by_one();
  }

 private:
  static constexpr bool rows_repeat = rows_are_keys ? Mask::keys_repeat : Mask::queries_repeat;

  // Of a row that all lanes know: each asks for its columns, and takes those of its elements.
  DLATTN_DEVICE uint32 kept_of(const OfRow& row) const {
    uint32 kept = 0;
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) {
      const uint32 of_columns = __ballot_sync(0xffffffffu, keeps(row, columns[i]));
      const uint32 own = of_columns >> threadIdx.x % 4 * 2 & 0x03030303u;  // two in each eight
      kept |= own * 0x01041040u >> 24 << 8 * i;
    }
    return kept;
  }

  DLATTN_DEVICE KeptElements kept_one_by_one() const {
    constexpr int group = least(8, count);  // of 32 columns; more at once take more registers
    OfColumn next[columns_of_lane];
#pragma unroll
    for (int i = 0; i < columns_of_lane; ++i) next[i] = columns[i];
    KeptElements kept{{0, 0}};
#pragma unroll 1
    for (int begin = 0; begin < count; begin += group) {
      uint32 found[2] = {};
#pragma unroll
      for (int e = 0; e < group; ++e) {
        const int lane = threadIdx.x % 4 * 2 + e / 2 * 8 + e % 2;
        const OfColumn column = Mask::from_lane(next[0], lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (keeps(rows[r], column)) found[r] |= 1u << e;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) kept.of_row[r] |= found[r] << begin;
#pragma unroll
      for (int i = 1; i < columns_of_lane; ++i) next[i - 1] = next[i];
    }
    return kept;
  }

  // What does not exist is as the last that does, and masked elsewhere.
  static DLATTN_DEVICE Position existing(Position at, int row, int column) {
    at.query = least(at.query + (rows_are_keys ? column : row), at.length_q - 1);
    at.key = least(at.key + (rows_are_keys ? row : column), at.length_kv - 1);
    at.down = at.right = 0;
    return at;
  }
  static DLATTN_DEVICE bool keeps(const OfQuery& query, const OfKey& key)
    requires(!rows_are_keys)
  {
    return Mask::keeps(query, key);
  }
  static DLATTN_DEVICE bool keeps(const OfKey& key, const OfQuery& query)
    requires rows_are_keys
  {
    return Mask::keeps(query, key);
  }
};

// What there is to ask of a problem's function, and its answer.
struct NothingAsked {
  NothingAsked() = default;
  DLATTN_DEVICE NothingAsked(const Position&, const ScoreValues&) {}
  DLATTN_DEVICE AllElements kept() const { return {}; }
};
template <class Problem, int count, bool rows_are_keys>
struct AskedOf {
  using Type = NothingAsked;
};
template <MasksElements Problem, int count, bool rows_are_keys>
struct AskedOf<Problem, count, rows_are_keys> {
  using Type = MaskedRows<typename Problem::ElementMask, count, rows_are_keys>;
};

// Elements of a warp's tile that the mask drops become `value`.
template <class Mask, int m_tiles, int n_tiles>
DLATTN_DEVICE void drop_masked(Accumulator<m_tiles, n_tiles>& tile, float value,
                               const Position& first, const ScoreValues& values) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    Position at = first;
    at.query += 16 * m;
    const KeptElements kept = MaskedRows<Mask, 2 * n_tiles, false>(at, values).kept();
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((kept.row(i) >> (2 * n + i % 2) & 1) == 0) tile.at[m][n][i] = value;
      }
  }
}

}  // namespace dlattn
