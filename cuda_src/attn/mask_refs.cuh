// Masks that are in memory: of blocks, as a user gives them, and what kernels before others find out about a
// user's function of scores.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// A bit for each block of queries and keys, of a byte the lowest first; strides as of a bias.
struct BlockMaskRef {
  const unsigned char* data;  // (batch, heads_q, blocks of queries, bytes of blocks of keys)
  int64 batch, head, row, column;

  DLATTN_DEVICE bool keeps(int b, int h, int queries, int keys) const {
    return bit(data, b, h, queries, keys);
  }
  // Of bits that lie like those of the mask.
  DLATTN_DEVICE bool bit(const unsigned char* bits, int b, int h, int queries, int keys) const {
    const int64 offset = b * batch + h * head + queries * row + keys / 8 * column;
    return __ldg(bits + offset) >> keys % 8 & 1;
  }
  // Several entries have it, as long as the longest may be.
  DLATTN_DEVICE bool is_shared(int entries) const { return batch == 0 && entries > 1; }
  // 32 of them, of a mask whose rows are whole words.
  DLATTN_DEVICE uint32 word(const unsigned char* bits, int b, int h, int queries, int keys) const {
    return *reinterpret_cast<const uint32*>(bits + b * batch + h * head + queries * row + keys / 8);
  }
};

// Of each query the keys that a user's function keeps (kernels/score_rows.cuh); strides are 0 where batch
// entries, or heads, share them.
struct KeptKeysRef {
  static constexpr Interval no_interval{0, -1};
  int2* data;  // (batch, heads_q, seq_q): an interval
  int64 batch, head;

  DLATTN_DEVICE int2* at(int b, int h, int query) const {
    return data + b * batch + h * head + query;
  }
  DLATTN_DEVICE Interval load(int b, int h, int query) const {
    const int2 keys = *at(b, h, query);
    return {keys.x, keys.y};
  }
  DLATTN_DEVICE void store(int b, int h, int query, Interval keys) const {
    *at(b, h, query) = {keys.first, keys.last};
  }
};

// Items of a forward whose mask a kernel before found out (kernels/score_rows.cuh): the tiles of queries that
// visit the most blocks of keys first, roughly: in classes, and in each in their own order, which leaves those
// with the same keys together.
struct LongestFirstRef {
  static constexpr int classes = 96;
  int* counts;      // (batch, classes): of items; a batch of 1 where entries share a mask
  uint32* members;  // (batch, classes, words): a bit for each tile, or where heads differ for
  int words;        // tile and head
  int unused;

  // By so many threads.
  DLATTN_DEVICE void clear(int b, int thread, int threads) const {
    for (int i = thread; i < classes; i += threads) counts[b * classes + i] = 0;
    uint32* own = members + int64(b) * classes * words;
    for (int i = thread; i < classes * words; i += threads) own[i] = 0;
  }
  // One for each number up to 15, then eight for each power of two.
  static DLATTN_DEVICE int class_of(int visited) {
    const int shift = dlattn::most(28 - __clz(visited), 0);
    return classes - 1 - least(8 * shift + (visited >> shift), classes - 1);
  }
};

}  // namespace dlattn
