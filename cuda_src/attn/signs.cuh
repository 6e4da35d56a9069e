// Probabilities that are dropped, marked by their signs: see attn/dropout.cuh.
#pragma once

#include "attn/dropout.cuh"
#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "tile/gemm.cuh"

namespace dlattn {

// Sets the signs of what is dropped, and no others.
DLATTN_DEVICE uint32 with_signs(uint32 pair, uint32 signs) {
  return (pair & 0x7fff7fffu) | (signs & 0x80008000u);
}

// Zero where the sign is set; NaN stays.
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

struct BlockStart {
  int query, key;
};

// The signs of some blocks, of four in each register.
template <int blocks>
struct CollectedSigns {
  static constexpr int words = ceil_div(blocks, 4);
  static constexpr int blocks_per_word = ceil_div(blocks, words);
  uint32 at[words];

  // position(block) says where a block begins.
  template <class Dropout, class PositionOf>
  DLATTN_DEVICE CollectedSigns(const Dropout& dropout, PositionOf position) {
    constexpr int blocks_at_a_time = Dropout::reads_memory ? 1 : blocks_per_word;
#pragma unroll
    for (int word = 0; word < words; ++word) {
      uint32 collected = 0;
#pragma unroll(blocks_at_a_time)
      for (int block = 0; block < blocks_per_word; ++block) {
        const BlockStart first = position(word * blocks_per_word + block);
        uint32 pairs[4];
        dropout.signs(pairs, first.query, first.key);
#pragma unroll
        for (int i = 0; i < 4; ++i) collected = collected >> 1 | (pairs[i] & 0x80008000u);
      }
      at[word] = collected;
    }
  }

  DLATTN_DEVICE void transpose() {
#pragma unroll
    for (uint32& word : at) word = transpose_8x8(word);
  }

  // Where with_signs() looks for those of a pair.
  DLATTN_DEVICE uint32 pair(int block, int i) const {
    return at[block / blocks_per_word] << (4 * (blocks_per_word - block % blocks_per_word) - 1 - i);
  }
};

// How many blocks of a row of `blocks` are asked for at once, if rows begin at multiples of theirs.
template <class Dropout, int blocks>
constexpr int side_by_side = blocks % Dropout::blocks_of_call == 0 ? Dropout::blocks_of_call : 1;

// Drops probabilities, queries by keys, that begin at multiples of 16 queries and of k_steps blocks.
template <class Dropout, class T, int m_tiles, int k_steps>
DLATTN_DEVICE void drop(RegisterLeft<T, m_tiles, k_steps>& probability, const Dropout& dropout,
                        int first_query, int first_key) {
  const auto position = [&](int block) {
    return BlockStart{first_query + block / k_steps * 16, first_key + block % k_steps * 16};
  };
  const auto drop_pair = [&](int block, int i, uint32 signs) {
    uint32& x = probability.at[block / k_steps][block % k_steps][i];
    x = Convert<T>::positive_part(with_signs(x, signs));
  };
  if constexpr (Dropout::reads_memory) {
    const CollectedSigns<m_tiles * k_steps> signs(dropout, position);
#pragma unroll
    for (int block = 0; block < m_tiles * k_steps; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) drop_pair(block, i, signs.pair(block, i));
  } else {
    constexpr int together = side_by_side<Dropout, k_steps>;
#pragma unroll
    for (int block = 0; block < m_tiles * k_steps; block += together) {
      uint32 pairs[4 * together];
      dropout.signs(pairs, position(block).query, position(block).key);
#pragma unroll
      for (int i = 0; i < 4 * together; ++i) drop_pair(block + i / 4, i % 4, pairs[i]);
    }
  }
}

// The signs of keys by queries: of the 16 keys of a warp.
template <int queries>
struct TransposedSigns : CollectedSigns<queries / 16> {
  template <class Dropout>
  DLATTN_DEVICE TransposedSigns(const Dropout& dropout, int first_query, int first_key)
      : CollectedSigns<queries / 16>(
            dropout, [&](int block) { return BlockStart{first_query + 16 * block, first_key}; }) {
    this->transpose();
  }

  template <class T>
  DLATTN_DEVICE void mark(RegisterLeft<T, 1, queries / 16>& x) const {
#pragma unroll
    for (int k = 0; k < queries / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.at[0][k][i] = with_signs(x.at[0][k][i], this->pair(k, i / 2 + i % 2 * 2));
      }
  }
};

// Sets the signs of those that are dropped; keys begin at a multiple of 8 n_tiles.
template <class Dropout, int m_tiles, int n_tiles>
DLATTN_DEVICE void mark_dropped(Accumulator<m_tiles, n_tiles>& probability, const Dropout& dropout,
                                int first_query, int first_key) {
  // A lone tile of 8 columns is either half of a block.
  static_assert(n_tiles == 1 || n_tiles % 2 == 0);
  constexpr int together = n_tiles == 1 ? 1 : side_by_side<Dropout, n_tiles / 2>;
  const bool right = n_tiles == 1 && first_key % 16 != 0;
  if (n_tiles == 1) first_key -= first_key % 16;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2 * together) {
      uint32 pairs[4 * together];
      dropout.signs(pairs, first_query + 16 * m, first_key + 8 * n);
#pragma unroll
      for (int e = 0; e < least(8 * together, 4 * n_tiles); ++e) {
        const int i = e % 4;
        const uint32 pair = right ? pairs[i / 2 + 2] : pairs[i / 2 + e / 4 * 2];
        float& x = probability.at[m][n + e / 4][i];
        x = __uint_as_float(__float_as_uint(x) | ((i % 2 == 0 ? pair << 16 : pair) & 0x80000000u));
      }
    }
}

// dS = P (dP - delta), where dP is zero if it is dropped: of a probability with a sign that says so.
DLATTN_DEVICE float weigh_dropped(float probability, float dP, float minus_delta) {
  return fmaf(fmaxf(probability, 0.f), dP, fabsf(probability) * minus_delta);
}

}  // namespace dlattn
