// The lengths of one batch entry, read once per block.
#pragma once

#include "attn/params.cuh"
#include "base/math.cuh"
#include "ptx/opaque.cuh"

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
  struct AtOnce {
    const void* own;
    int is_int64, longest;

    DLATTN_DEVICE AtOnce(const Params& p, int batch) {
      const bool of_kv = threadIdx.x % 2 != 0;
      const LengthRef& length = of_kv ? p.seq_len_kv : p.seq_len_q;
      own = length.address(batch);
      is_int64 = length.is_int64;
      longest = of_kv ? p.seq_kv : p.seq_q;
      if (corner_as_given && own != nullptr) longest = LengthRef::longest_given;
    }
    // Where they are is found here, before they may be read.
    DLATTN_DEVICE void find() {
      own = opaque(own);
      is_int64 = opaque(is_int64);
    }
    // The bits of this lane's, on their way: it would wait if anything were done with them here.
    DLATTN_DEVICE uint64 start(From from) const {
      if (own == nullptr) return longest;
      return is_int64 ? start_load(static_cast<const uint64*>(own), from)
                      : start_load(static_cast<const uint32*>(own), from);
    }
    DLATTN_DEVICE Lengths of(const Params& p, uint64 bits) const {
      const int length = LengthRef::within(is_int64 ? int64(bits) : int(bits), longest);
      return {p, from_lane(length, 0), from_lane(length, 1)};
    }
    DLATTN_DEVICE Lengths read(const Params& p) const {
      int length = longest;
      if (own != nullptr) {
        const int64 given =
            is_int64 ? *static_cast<const int64*>(own) : *static_cast<const int*>(own);
        length = LengthRef::within(given, longest);
      }
      return {p, from_lane(length, 0), from_lane(length, 1)};
    }
  };
  static DLATTN_DEVICE Lengths at_once(const Params& p, int batch) {
    return AtOnce(p, batch).read(p);
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
