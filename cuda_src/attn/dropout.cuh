// Dropout: which probabilities are kept after the softmax.
//
// A form of dropout is made for a head, by every lane of a warp, and answers for a 16 x 16 block of
// queries by keys, or for as many side by side as it finds out about together:
//   blocks_of_call            so many
//   signs(pairs, query, key)  the block that begins there: pair a + 2 b is of query 8 a + lane / 4 and
//                             keys 8 b + 2 (lane % 4) + {0, 1}; bit 15 is set if the first of them is
//                             dropped, bit 31 if the second is, and others mean nothing. Of several
//                             blocks, which begin at a multiple of their keys, one after another
// That is how a lane holds a block of an accumulator, and bits 15 and 31 are the signs of two 16-bit
// numbers: a probability that is dropped is marked by its sign until its gradient is made, which
// needs it still. What kept probabilities are multiplied by is a factor of results.
#pragma once

#include "attn/params.cuh"
#include "attn/seqlen.cuh"
#include "ptx/bits.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

struct NoDropout {
  static constexpr bool drops = false;
};

// Philox 4x32 of seven rounds; dlattn/problem/dropout.py defines the counters, and which bits of a
// call an element has: sixteen, of which fifteen are read, in dlattn's own form, so that a call serves
// a block of a lane; eight in FlashAttention-2's, for two blocks side by side.
template <int bits>
struct RandomDropout {
  static constexpr bool drops = true, reads_memory = false;
  static constexpr int blocks_of_call = 16 / bits;
  static constexpr int rounds = 7;

  const bool holds_keys;             // those of all rounds, once made; else each block makes them
  uint32 keys[rounds][2];            // the seed, and what rounds make of it
  uint32 counter_low, counter_high;  // offset, head and lane
  uint32 addend;                     // carries into bits 15 and 31 what is to be dropped

  DLATTN_DEVICE RandomDropout(const Params& p, int batch, int head, const Lengths&,
                              bool has_registers_for_keys = false)
      : holds_keys(has_registers_for_keys), addend(p.dropout_addend) {
    const uint64 seed = p.dropout_seed.value(), offset = p.dropout_offset.value();
    keys[0][0] = uint32(seed);
    keys[0][1] = uint32(seed >> 32);
#pragma unroll
    for (int round = 1; holds_keys && round < rounds; ++round) {
      keys[round][0] = opaque(next_key(keys[round - 1][0], 0));
      keys[round][1] = opaque(next_key(keys[round - 1][1], 1));
    }
    const uint32 lane = 32 * uint32(batch * p.heads_q + head) + threadIdx.x % 32;
    counter_low = uint32(offset) + (bits == 16 ? 0 : lane);
    counter_high = uint32(offset >> 32) + (bits == 16 ? lane : counter_low < lane ? 1 : 0);
  }

  template <int size>
  DLATTN_DEVICE void signs(uint32 (&pairs)[size], int query, int key) const {
    static_assert(size == 4 || size == 4 * blocks_of_call);
    uint32 c0 = counter_low, c1 = counter_high, c2 = uint32(query) / 16;
    uint32 c3 = uint32(key) / (16 * blocks_of_call);
    uint32 k0 = keys[0][0], k1 = keys[0][1];
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      if (size < 4 * blocks_of_call && round + 1 == rounds) {  // of the words that one block has
        const bool left = uint32(key) / 16 % 2 == 0;
        const uint64 product = uint64(left ? c2 : c0) * (left ? 0xCD9E8D57u : 0xD2511F53u);
        c0 = uint32(product >> 32) ^ (left ? c1 ^ k0 : c3 ^ k1);
        c1 = uint32(product);
        break;
      }
      const uint64 first = uint64(c0) * 0xD2511F53u, second = uint64(c2) * 0xCD9E8D57u;
      c0 = uint32(second >> 32) ^ c1 ^ k0;
      c1 = uint32(second);
      c2 = uint32(first >> 32) ^ c3 ^ k1;
      c3 = uint32(first);
      if (round + 1 == rounds) break;
      k0 = holds_keys ? keys[round + 1][0] : next_key(k0, 0);
      k1 = holds_keys ? keys[round + 1][1] : next_key(k1, 1);
    }
    const uint32 words[4] = {c0, c1, c2, c3};
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if constexpr (bits == 16) {
        pairs[i] = (words[i] & 0x7fff7fffu) + addend;
      } else {
        const uint32 word = words[i / 2];
        pairs[i] = (i % 2 == 0 ? spread_bytes<0>(word) : spread_bytes<2>(word)) + addend;
      }
    }
  }

 private:
  static DLATTN_DEVICE uint32 next_key(uint32 key, int word) {
    return key + (word == 0 ? 0x9E3779B9u : 0xBB67AE85u);
  }
};

using PhiloxDropout = RandomDropout<16>;
using FlashDropout = RandomDropout<8>;

// Drops elements for which a tensor has 0, or by sign, what is negative. Keys are contiguous, or have
// any stride.
template <class T, bool contiguous, bool by_sign = false>
struct GivenMask {
  static constexpr bool drops = true, reads_memory = true;
  static constexpr int blocks_of_call = 1;

  const Params& p;
  int batch, head, length_q, length_kv;

  DLATTN_DEVICE GivenMask(const Params& params, int batch_entry, int query_head,
                          const Lengths& length, bool = false)
      : p(params), batch(batch_entry), head(query_head), length_q(length.q), length_kv(length.kv) {}

  DLATTN_DEVICE void signs(uint32 (&pairs)[4], int first_query, int first_key) const {
    using Block = Accumulator<1, 2>;
    // Addresses are made anew for each block: held, they would take registers from accumulators.
    const int query = opaque(first_query) + Block::row(0, 0);
    const int key = opaque(first_key) + Block::column(0, 0);
    const BiasRef& mask = p.dropout_mask;
    const T* g_first = static_cast<const T*>(mask.data) + opaque(batch) * mask.batch +
                       opaque(head) * mask.head + query * mask.row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int down = i % 2 * 8, right = key + i / 2 * 8;
      const T* g_row = g_first + down * mask.row;
      const bool exists = query + down < length_q;
      const bool first = keeps(g_row, right, exists & (right < length_kv));
      const bool second = keeps(g_row, right + 1, exists & (right + 1 < length_kv));
      pairs[i] = (first ? 0u : 0x8000u) | (second ? 0u : 0x80000000u);
    }
  }

 private:
  DLATTN_DEVICE bool keeps(const T* g_row, int key, bool exists) const {
    if (!exists) return true;
    return is_set(load_constant(contiguous ? g_row + key : g_row + key * p.dropout_mask.column));
  }
  static DLATTN_DEVICE bool is_set(bool element) { return element; }
  template <class Number>
  static DLATTN_DEVICE bool is_set(Number element) {
    if constexpr (by_sign) return (__float_as_uint(to_float(element)) >> 31) == 0;
    return to_float(element) != 0.f;
  }
};

// What results are multiplied by, and its inverse, which a row's delta is.
template <class Problem>
DLATTN_DEVICE float dropout_scale(const Params& p) {
  if constexpr (!Problem::Dropout::drops) return 1.f;
  return p.dropout_scale.value();
}
template <class Problem>
DLATTN_DEVICE float dropout_scale_inv(const Params& p) {
  if constexpr (!Problem::Dropout::drops) return 1.f;
  return p.dropout_scale_inv.value();
}

}  // namespace dlattn
