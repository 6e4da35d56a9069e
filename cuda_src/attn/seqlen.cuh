// The lengths of one batch entry, read once per block.
#pragma once

#include "attn/params.cuh"

namespace dlattn {

struct Lengths {
  int q, kv;
  int shift;  // key position that query 0's diagonal passes through

  DLATTN_DEVICE Lengths(const Params& p, int batch)
      : q(uniform(p.seq_len_q.at(batch, p.seq_q))),
        kv(uniform(p.seq_len_kv.at(batch, p.seq_kv))),
        shift(p.bottom_right ? kv - q : 0) {}

  // The same, where nothing else is on its way: lanes ask for both at once.
  static DLATTN_DEVICE Lengths at_once(const Params& p, int batch) {
    const bool of_kv = threadIdx.x % 2 != 0;
    const LengthRef& own = of_kv ? p.seq_len_kv : p.seq_len_q;
    const int length = own.at(batch, of_kv ? p.seq_kv : p.seq_q);
    return {p, from_lane(length, 0), from_lane(length, 1)};
  }

  // Full ones.
  DLATTN_DEVICE explicit Lengths(const Params& p) : Lengths(p, p.seq_q, p.seq_kv) {}

  // Known ones.
  static DLATTN_DEVICE Lengths of(const Params& p, int length_q, int length_kv) {
    return {p, length_q, length_kv};
  }

  // Of an entry that the lane alone asks for.
  static DLATTN_DEVICE Lengths of_lane(const Params& p, int batch) {
    return {p, p.seq_len_q.at(batch, p.seq_q), p.seq_len_kv.at(batch, p.seq_kv)};
  }

 private:
  DLATTN_DEVICE Lengths(const Params& p, int length_q, int length_kv)
      : q(length_q), kv(length_kv), shift(p.bottom_right ? kv - q : 0) {}
};

}  // namespace dlattn
