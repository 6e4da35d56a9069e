// The lengths of one batch entry, read once per block.
#pragma once

#include "attn/params.cuh"
#include "base/math.cuh"

namespace dlattn {

// Functions of scores measure the bottom right corner from lengths as they were given, whatever rows
// there are; arguments, from lengths cut to those. A choice at run time would take registers.
#ifdef DLATTN_CORNER_AS_GIVEN
constexpr bool corner_as_given = true;
#else
constexpr bool corner_as_given = false;
#endif

struct Lengths {
  int q, kv;
  int shift;  // key position that query 0's diagonal passes through

  DLATTN_DEVICE Lengths(const Params& p, int batch)
      : Lengths(p, uniform(read(p.seq_len_q, batch, p.seq_q)),
                uniform(read(p.seq_len_kv, batch, p.seq_kv))) {}

  // The same, where nothing else is on its way: lanes ask for both at once.
  static DLATTN_DEVICE Lengths at_once(const Params& p, int batch) {
    const bool of_kv = threadIdx.x % 2 != 0;
    const LengthRef& own = of_kv ? p.seq_len_kv : p.seq_len_q;
    const int length = read(own, batch, of_kv ? p.seq_kv : p.seq_q);
    return {p, from_lane(length, 0), from_lane(length, 1)};
  }

  // Full ones.
  DLATTN_DEVICE explicit Lengths(const Params& p) : Lengths(p, p.seq_q, p.seq_kv) {}

  // Known ones, where the corner is that of those.
  static DLATTN_DEVICE Lengths of(const Params& p, int length_q, int length_kv) {
    return {p, length_q, length_kv};
  }

  // Known ones, with their shift.
  static DLATTN_DEVICE Lengths of(int length_q, int length_kv, int known_shift) {
    return {length_q, length_kv, known_shift};
  }

  // Of an entry that the lane alone asks for.
  static DLATTN_DEVICE Lengths of_lane(const Params& p, int batch) {
    return {p, read(p.seq_len_q, batch, p.seq_q), read(p.seq_len_kv, batch, p.seq_kv)};
  }

 private:
  static DLATTN_DEVICE int read(const LengthRef& length, int batch, int longest) {
    return corner_as_given ? length.given(batch, longest) : length.at(batch, longest);
  }
  static DLATTN_DEVICE int cut(int length, int longest) {
    return corner_as_given ? least(length, longest) : length;
  }
  // As they are read.
  DLATTN_DEVICE Lengths(const Params& p, int length_q, int length_kv)
      : q(cut(length_q, p.seq_q)),
        kv(cut(length_kv, p.seq_kv)),
        shift(p.bottom_right ? length_kv - length_q : 0) {}
  DLATTN_DEVICE Lengths(int length_q, int length_kv, int known_shift)
      : q(length_q), kv(length_kv), shift(known_shift) {}
};

}  // namespace dlattn
