// Between kernels/score_blocks.cuh and a Hopper forward: which keys of visited blocks each query keeps, if
// they are an interval, as in documents, windows and prefixes; a query whose keys are none is marked. The
// forward then masks by two numbers a row, and computes a user's function of no element. And in which
// order blocks take tiles of queries.
//
// A thread block has a block of queries. Each warp walks over the visited blocks of keys with some of its
// rows, a lane having a key, and leaves a row when it is known to be no interval.
#pragma once

#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/score_mask.cuh"
#include "attn/seqlen.cuh"
#include "ptx/grid.cuh"

namespace dlattn {

template <int warps_>
struct ScoreRowsTiling {
  static constexpr int warps = warps_;
};

// Keys that a query keeps, of those that are visited, in their order.
struct Run {
  Interval keys{0, 0};
  bool ended = false, broken = false;

  // Of the next block, from `first` on, these; a bit each.
  template <int words>
  DLATTN_DEVICE void add(int first, const uint32 (&kept)[words]) {
    int count = 0, begin = 32 * words, end = 0;
#pragma unroll
    for (int i = words - 1; i >= 0; --i) {
      count += __popc(kept[i]);
      if (kept[i] != 0) begin = 32 * i + __ffs(kept[i]) - 1;
      if (kept[i] != 0 && end == 0) end = 32 * (i + 1) - __clz(kept[i]);
    }
    ended |= begin != 0 && !keys.empty();
    if (count == 0) return;
    add({first + begin, first + end});
    broken |= count != end - begin;
    ended |= end != 32 * words;
  }
  // All of the next ones.
  DLATTN_DEVICE void add(Interval kept) {
    if (keys.empty()) keys.first = kept.first;
    broken |= ended;
    keys.last = kept.last;
  }
};

// Gives a tile of queries its place among the items. A warp's.
template <class Problem>
DLATTN_DEVICE void place_item(const Params& p, const Lengths& length, int batch, int head,
                              int tile) {
  const LongestFirstRef& order = p.longest_first;
  const Interval queries{tile * block_size, least((tile + 1) * block_size, length.q)};
  const Interval keys = Problem::Mask::keys(queries, length, p);
  const Interval blocks{keys.first / block_size, ceil_div(keys.last, block_size)};
  int visited = 0;
  for (int from = int(threadIdx.x % 32) * 32; from < blocks.last; from += 32 * 32) {
    const Interval seen = blocks & Interval{from, from + 32};
    if (seen.empty()) continue;
    const uint32 kept = p.block_mask.word(p.block_mask.data, batch, head, tile, from);
    visited += __popc(kept & bit_mask(seen.first - from, seen.last - seen.first));
  }
  visited = __reduce_add_sync(0xffffffffu, visited);
  if (threadIdx.x % 32 != 0) return;
  const int at = batch * LongestFirstRef::classes + LongestFirstRef::class_of(visited);
  const int item = p.block_mask.head == 0 ? tile : tile * p.heads_q + head;
  atomicAdd(order.counts + at, 1);
  atomicOr(order.members + int64(at) * order.words + item / 32, 1u << item % 32);
}

template <class Problem, class Tiling>
DLATTN_DEVICE void score_rows(const Params& p) {
  using Mask = typename Problem::ElementMask;
  using OfKey = typename Mask::OfKey;
  constexpr int rows = block_size / Tiling::warps;  // of a warp: a lane has what is known of each
  launch_dependents();
  await_kernel_before();
  const int block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32, first_row = block * block_size + rows * warp_index();
  const Lengths length = Lengths::of_mask(p, batch);
  if (first_row >= length.q) return;
  if (p.longest_first.counts != nullptr && warp_index() == 0) {
    place_item<Problem>(p, length, batch, head, block);
  }
  const ScoreValues values(p);
  // What does not exist is as the last that does.
  const auto position = [&](int query, int key) -> Position {
    return {batch, head, length.q, length.kv, least(query, length.q - 1), least(key, length.kv - 1),
            0,     0};
  };
  const auto query = Mask::of_query(position(first_row + lane % rows, 0), values);

  Run run;
#pragma unroll 1
  for (int from = 0; from < ceil_div(length.kv, block_size); from += 32) {
    uint32 visited = p.block_mask.word(p.block_mask.data, batch, head, block, from);
    const uint32 whole = visited & p.block_mask.word(p.whole_blocks, batch, head, block, from);
#pragma unroll 1
    while (visited != 0) {
      const int i = __ffs(visited) - 1, first_key = (from + i) * block_size;
      if (whole >> i & 1) {
        const uint32 others = ~whole >> i;
        const int blocks = others == 0 ? 32 - i : __ffs(others) - 1;
        run.add({first_key, least(first_key + blocks * block_size, length.kv)});
        visited &= ~bit_mask(i, blocks);
        continue;
      }
      visited &= visited - 1;
      constexpr int words = block_size / 32;
      OfKey keys[words];  // of all words at once, or each would wait for memory
#pragma unroll
      for (int word = 0; word < words; ++word) {
        keys[word] = Mask::of_key(position(0, first_key + 32 * word + lane), values);
      }
      uint32 kept[words];
#pragma unroll
      for (int word = 0; word < words; ++word) {
        const uint32 exist = bit_mask(0, most(length.kv - first_key - 32 * word, 0));
        kept[word] = 0;
#pragma unroll
        for (int row = 0; row < rows; ++row) {
          const bool keeps = Mask::keeps(Mask::from_lane(query, row), keys[word]);
          const uint32 of_row = __ballot_sync(0xffffffffu, keeps) & exist;
          if (lane == row) kept[word] = of_row;
        }
      }
      run.add(first_key, kept);
    }
    if (__all_sync(0xffffffffu, lane >= rows || run.broken)) break;
  }
  const int row = first_row + lane;
  if (lane < rows && row < length.q) {
    p.kept_keys.store(batch, head, row, run.broken ? KeptKeysRef::no_interval : run.keys);
  }
}

}  // namespace dlattn
