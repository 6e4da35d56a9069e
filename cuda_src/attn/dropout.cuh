// Dropout: which probabilities are kept after the softmax.
//
// A form of dropout is made for a head, by every lane of a warp, and answers for a 16 x 16 block of
// queries by keys:
//   signs(pairs, query, key)  the block that begins there: pair a + 2 b is of query 8 a + lane / 4 and
//                             keys 8 b + 2 (lane % 4) + {0, 1}; bit 15 is set if the first of them is
//                             dropped, bit 31 if the second is, and others mean nothing
// That is how a lane holds a block of an accumulator, and bits 15 and 31 are the signs of two 16-bit
// numbers: a probability that is dropped is marked by its sign until its gradient is made, which
// needs it still. What kept probabilities are multiplied by is a factor of results.
#pragma once

#include "attn/params.cuh"
#include "attn/seqlen.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

struct NoDropout {
  static constexpr bool drops = false;
};

// Philox 4x32 of seven rounds; dlattn/problem/dropout.py defines the counters. A call serves a block of
// a lane: sixteen bits an element, of which it reads fifteen.
struct PhiloxDropout {
  static constexpr bool drops = true;
  static constexpr int rounds = 7;

  uint32 key_low, key_high;          // the seed
  uint32 counter_low, counter_high;  // offset, head and lane
  uint32 addend;                     // carries into bits 15 and 31 what is not below the threshold

  DLATTN_DEVICE PhiloxDropout(const Params& p, int batch, int head, const Lengths&)
      : addend(p.dropout_addend) {
    const uint64 seed = p.dropout_seed.value(), offset = p.dropout_offset.value();
    key_low = uint32(seed);
    key_high = uint32(seed >> 32);
    counter_low = uint32(offset);
    counter_high = uint32(offset >> 32) + 32 * uint32(batch * p.heads_q + head) + threadIdx.x % 32;
  }

  DLATTN_DEVICE void signs(uint32 (&pairs)[4], int query, int key) const {
    uint32 c0 = counter_low, c1 = counter_high, c2 = uint32(query) / 16, c3 = uint32(key) / 16;
    uint32 k0 = key_low, k1 = key_high;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const uint64 first = uint64(c0) * 0xD2511F53u, second = uint64(c2) * 0xCD9E8D57u;
      c0 = uint32(second >> 32) ^ c1 ^ k0;
      c1 = uint32(second);
      c2 = uint32(first >> 32) ^ c3 ^ k1;
      c3 = uint32(first);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const uint32 words[4] = {c0, c1, c2, c3};
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = (words[i] & 0x7fff7fffu) + addend;
  }
};

// Drops elements for which a tensor has 0. Keys are contiguous, or have any stride.
template <class T, bool contiguous>
struct GivenMask {
  static constexpr bool drops = true;

  const BiasRef& mask;
  const T* g_first;  // of the head
  int length_q, length_kv;

  DLATTN_DEVICE GivenMask(const Params& p, int batch, int head, const Lengths& length)
      : mask(p.dropout_mask),
        g_first(static_cast<const T*>(mask.data) + batch * mask.batch + head * mask.head),
        length_q(length.q),
        length_kv(length.kv) {}

  DLATTN_DEVICE void signs(uint32 (&pairs)[4], int query, int key) const {
    using Block = Accumulator<1, 2>;
    query += Block::row(0, 0);
    key += Block::column(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int down = i % 2 * 8, right = i / 2 * 8;
      const bool first = keeps(query + down, key + right);
      const bool second = keeps(query + down, key + right + 1);
      pairs[i] = (first ? 0u : 0x8000u) | (second ? 0u : 0x80000000u);
    }
  }

 private:
  DLATTN_DEVICE bool keeps(int query, int key) const {
    if (query >= length_q || key >= length_kv) return true;
    const T* g_row = g_first + query * mask.row;
    return is_set(load_constant(contiguous ? g_row + key : g_row + key * mask.column));
  }
  static DLATTN_DEVICE bool is_set(bool element) { return element; }
  template <class Number>
  static DLATTN_DEVICE bool is_set(Number element) {
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

// Sets the signs of what is dropped, and no others.
DLATTN_DEVICE uint32 with_signs(uint32 pair, uint32 signs) {
  return (pair & 0x7fff7fffu) | (signs & 0x80008000u);
}

// Zero where the sign is set.
template <class T, int m_tiles, int k_steps>
DLATTN_DEVICE void clear_dropped(RegisterLeft<T, m_tiles, k_steps>& x) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.at[m][k][i] = Convert<T>::positive_part(x.at[m][k][i]);
}

template <class T, int m_tiles, int k_steps>
DLATTN_DEVICE void copy_signs(RegisterLeft<T, m_tiles, k_steps>& x,
                              const RegisterLeft<T, m_tiles, k_steps>& signs) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.at[m][k][i] = with_signs(x.at[m][k][i], signs.at[m][k][i]);
}

// Drops probabilities, queries by keys, that begin at multiples of 16.
template <class Dropout, class T, int m_tiles, int k_steps>
DLATTN_DEVICE void drop(RegisterLeft<T, m_tiles, k_steps>& probability, const Dropout& dropout,
                        int first_query, int first_key) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      uint32 pairs[4];
      dropout.signs(pairs, first_query + 16 * m, first_key + 16 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        auto& x = probability.at[m][k][i];
        x = Convert<T>::positive_part(with_signs(x, pairs[i]));
      }
    }
}

// Sets the signs of those that are dropped; keys begin at a multiple of 8.
template <class Dropout, int m_tiles, int n_tiles>
DLATTN_DEVICE void mark_dropped(Accumulator<m_tiles, n_tiles>& probability, const Dropout& dropout,
                                int first_query, int first_key) {
  // A lone tile of 8 columns is either half of a block.
  static_assert(n_tiles == 1 || n_tiles % 2 == 0);
  const bool right = n_tiles == 1 && first_key % 16 != 0;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      uint32 pairs[4];
      dropout.signs(pairs, first_query + 16 * m, first_key + 8 * n);
#pragma unroll
      for (int e = 0; e < least(8, 4 * n_tiles); ++e) {
        const int i = e % 4;
        const uint32 pair = right ? pairs[i / 2 + 2] : pairs[i / 2 + e / 4 * 2];
        float& x = probability.at[m][n + e / 4][i];
        x = __uint_as_float(__float_as_uint(x) | ((i % 2 == 0 ? pair << 16 : pair) & 0x80000000u));
      }
    }
}

// The signs of keys by queries, in one register for 64 queries: 16 keys of a warp.
template <int queries>
struct TransposedSigns {
  static constexpr int blocks = queries / 16, words = ceil_div(blocks, 4);
  static constexpr int blocks_per_word = blocks / words, bits = 4 * blocks_per_word;
  uint32 at[words];

  template <class Dropout>
  DLATTN_DEVICE TransposedSigns(const Dropout& dropout, int first_query, int first_key) {
#pragma unroll
    for (int word = 0; word < words; ++word) {
      uint32 collected = 0;
#pragma unroll
      for (int block = 0; block < blocks_per_word; ++block) {
        uint32 pairs[4];
        dropout.signs(pairs, first_query + 16 * (word * blocks_per_word + block), first_key);
#pragma unroll
        for (int i = 0; i < 4; ++i) collected = collected >> 1 | (pairs[i] & 0x80008000u);
      }
      at[word] = transpose_8x8(collected);
    }
  }

  // Of pair i of step k of a left operand.
  DLATTN_DEVICE uint32 pair(int k, int i) const {
    const int bit = 16 - bits + k % blocks_per_word * 4 + i / 2 + i % 2 * 2;
    return at[k / blocks_per_word] << (15 - bit);
  }

  template <class T>
  DLATTN_DEVICE void mark(RegisterLeft<T, 1, blocks>& x) const {
#pragma unroll
    for (int k = 0; k < blocks; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.at[0][k][i] = with_signs(x.at[0][k][i], pair(k, i));
  }
};

// dS = P (dP - delta), where dP is zero if it is dropped: of a probability with a sign that says so.
DLATTN_DEVICE float weigh_dropped(float probability, float dP, float minus_delta) {
  return fmaf(fmaxf(probability, 0.f), dP, fabsf(probability) * minus_delta);
}

}  // namespace dlattn
