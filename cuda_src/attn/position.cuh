// What edits of a score know: where its element is, and run-time values.
#pragma once

#include "attn/params.cuh"
#include "ptx/opaque.cuh"

namespace dlattn {

// Run-time values of the edits, read once per block.
struct ScoreValues {
  const Params& p;
  float scale;

  DLATTN_DEVICE explicit ScoreValues(const Params& params) : p(params), scale(params.scale()) {}
};

// Where an element is: so far from the first element that its thread has.
struct Position {
  int batch, head;
  int length_q, length_kv;
  int query, key;   // of the first element
  int down, right;  // constants, once loops are unrolled

  // key - query - shift, of which each thread converts one for all its elements.
  DLATTN_DEVICE float distance(int shift) const {
    return float(key - query - shift) + float(right - down);
  }
  // Inside the actual lengths; beyond them lies whatever the user left there, or no memory at all.
  DLATTN_DEVICE bool exists() const {
    return (query + down < length_q) & (key + right < length_kv);
  }
};

// The same, and its bias, which the kernel has read: a number, or whether it is kept.
template <class Value>
struct BiasedPosition : Position {
  Value bias;
};
template <class Value>
DLATTN_DEVICE BiasedPosition<Value> biased(const Position& at, Value bias) {
  return {at, bias};
}

// A part of positions in a walk over tiles: what edits make of it is not held between tiles, where
// it would take registers from accumulators.
template <class Score>
DLATTN_DEVICE int anew(int value) {
  return Score::reads_positions ? opaque(value) : value;
}

}  // namespace dlattn
