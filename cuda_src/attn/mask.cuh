// Masks: which keys a query attends to. Each mask answers for ranges and for one element:
//   keys(queries)       the keys that any of these queries may attend to (others are never visited);
//                       of a single query, exactly those that it attends to
//   queries(keys)       the queries that may attend to any of these keys; of a single key,
//                       exactly those that do
//   full_keys(queries)  the keys that all of these queries attend to (no element test needed)
//   keep(query, key)    the element test
//   bounded_right       a query attends to no keys beyond a bound that moves with it
//   same_keys           every query attends to the same ones
#pragma once

#include "attn/seqlen.cuh"
#include "ptx/bits.cuh"

namespace dlattn {

// Positions beyond the actual length. Part of every problem, because tiles overhang the end.
// Queries beyond their length need no element test: their rows are discarded in the forward, and
// carry a log-sum-exp of +infinity in the backward.
struct Padding {
  static constexpr bool bounded_right = false, same_keys = true;
  static DLATTN_DEVICE Interval keys(Interval, const Lengths& length, const Params&) {
    return {0, length.kv};
  }
  static DLATTN_DEVICE Interval queries(Interval keys, const Lengths& length, const Params&) {
    return {0, keys.first < length.kv ? length.q : 0};
  }
  static DLATTN_DEVICE Interval full_keys(Interval, const Lengths& length, const Params&) {
    return {0, length.kv};
  }
  static DLATTN_DEVICE bool keep(int, int key, const Lengths& length, const Params&) {
    return key < length.kv;
  }
};

// A diagonal band: key + band_left > diagonal, key <= diagonal + band_right, where
// diagonal = query + shift. Bounds are at most 2^30, so no sum overflows.
template <bool left, bool right>
struct Band {
  static constexpr bool bounded_right = right, same_keys = !left && !right;
  static constexpr int least_position = -(1 << 30), most_position = 1 << 30;

  static DLATTN_DEVICE Interval keys(Interval queries, const Lengths& length, const Params& p) {
    return {left ? queries.first + length.shift - p.band_left + 1 : least_position,
            right ? queries.last + length.shift + p.band_right : most_position};
  }
  static DLATTN_DEVICE Interval queries(Interval keys, const Lengths& length, const Params& p) {
    return {right ? keys.first - length.shift - p.band_right : least_position,
            left ? keys.last - 1 - length.shift + p.band_left : most_position};
  }
  static DLATTN_DEVICE Interval full_keys(Interval queries, const Lengths& length,
                                          const Params& p) {
    return {left ? queries.last + length.shift - p.band_left : least_position,
            right ? queries.first + length.shift + p.band_right + 1 : most_position};
  }
  static DLATTN_DEVICE bool keep(int query, int key, const Lengths& length, const Params& p) {
    const int diagonal = query + length.shift;
    return (!left | (key + p.band_left > diagonal)) & (!right | (key <= diagonal + p.band_right));
  }
};

// Blocks of queries and keys that are kept whole or not at all: it answers for everything, because
// kernels visit no tile of a block that is not kept (attn/walk.cuh).
inline constexpr int block_size = 128;

struct BlockMask {
  static constexpr bool bounded_right = false, same_keys = false;
  static constexpr Interval everything{-(1 << 30), 1 << 30};
  static DLATTN_DEVICE Interval keys(Interval, const Lengths&, const Params&) { return everything; }
  static DLATTN_DEVICE Interval queries(Interval, const Lengths&, const Params&) {
    return everything;
  }
  static DLATTN_DEVICE Interval full_keys(Interval, const Lengths&, const Params&) {
    return everything;
  }
  static DLATTN_DEVICE bool keep(int, int, const Lengths&, const Params&) { return true; }
};

// Keeps what every mask of the pack keeps.
template <class... Pack>
struct Masks {
  static constexpr bool by_blocks = (false | ... | same_type<Pack, BlockMask>);
  static constexpr bool bounded_right = (false | ... | Pack::bounded_right);
  static constexpr bool same_keys = (true & ... & Pack::same_keys);
  static DLATTN_DEVICE Interval keys(Interval queries, const Lengths& length, const Params& p) {
    return (everything() & ... & Pack::keys(queries, length, p));
  }
  static DLATTN_DEVICE Interval queries(Interval keys, const Lengths& length, const Params& p) {
    return (everything() & ... & Pack::queries(keys, length, p));
  }
  static DLATTN_DEVICE Interval full_keys(Interval queries, const Lengths& length,
                                          const Params& p) {
    return (everything() & ... & Pack::full_keys(queries, length, p));
  }
  static DLATTN_DEVICE bool keep(int query, int key, const Lengths& length, const Params& p) {
    // Not &&: a branch per element and mask costs more than the comparison that it saves.
    return (true & ... & Pack::keep(query, key, length, p));
  }

 private:
  static DLATTN_DEVICE Interval everything() { return {0, 0x7fffffff}; }
};

// A row of an accumulator tile, 128 columns of it: of the 32 elements of a lane, two in each eight
// columns from first_key on, those that an interval keeps; a bit each. ptxas tests bits seven at a
// time, where two comparisons an element cost as much as its exponential.
DLATTN_DEVICE uint32 kept_elements(Interval keys, int first_key) {
  const auto elements_below = [&](int key) {
    const int column = least(most(key - first_key, 0), 128);
    return column / 8 * 2 + least(column % 8, 2);
  };
  const int first = elements_below(keys.first), last = elements_below(keys.last);
  return bit_mask(first, most(last - first, 0));
}

}  // namespace dlattn
