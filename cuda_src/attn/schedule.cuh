// Which block does what.
#pragma once

#include "attn/params.cuh"

namespace dlattn {

// Of the Hopper forward: numbered along y first, blocks begin along x, so that those with the same keys (of
// one y) stand next to each other.
DLATTN_DEVICE int block_number() { return blockIdx.x * gridDim.y + blockIdx.y; }
DLATTN_DEVICE int block_count() { return gridDim.x * gridDim.y; }

struct WorkItem {
  int tile, head, batch;
  bool reversed : 1 = false;  // of warpgroups that share its rows, the first takes the last ones
  bool late : 1 = false;      // it is one of the last that are handed out
  bool ascends : 1 = false;   // its key tiles are visited from the first to the last
  // Of the last part of an item whose keys blocks share, how many parts there are before it; of these -1, less
  // how many they add, if they meet in groups (attn/key_parts.cuh).
  short parts = 0;
};

// Decodes a flat index. (batch, head) pairs are taken some at a time, so that the keys and values of a wave
// stay in L2; inside a wave the last tiles of all heads come first, because under a causal mask they are the
// longest.
DLATTN_DEVICE WorkItem longest_first(int index, int tiles, const Params& p) {
  const ItemsRef& items = p.items;
  const int first_pair = items.of_wave.quotient(index) * items.pairs.number;
  const bool is_last = first_pair >= items.heads.number * p.batch - items.pairs.number;
  const Divisor width = is_last ? items.last_pairs : items.pairs;
  const int rest = index - first_pair * tiles, round = width.quotient(rest);
  const int pair = first_pair + rest - round * width.number, batch = items.heads.quotient(pair);
  return {tiles - 1 - round, pair - batch * items.heads.number, batch};
}

// longest_first with the first tiles first: under a causal mask, the longest key tiles.
DLATTN_DEVICE WorkItem first_first(int index, int tiles, const Params& p) {
  WorkItem item = longest_first(index, tiles, p);
  item.tile = tiles - 1 - item.tile;
  return item;
}

// Numbers items through the batch, so many per entry as only the device knows. A warp's, whose lanes count
// together: count(batch), of its own entry each.
struct BatchWalk {
  int first_batch = 0;  // of the 32 entries looked at
  int first_item = 0;   // of the first of them
  int batch, rest;      // found: an entry, and the number of the item in it

  // How many there are.
  template <class Count>
  static DLATTN_DEVICE int count(int batches, Count count) {
    int own = 0;
    for (int first = 0; first < batches; first += 32) own += of_lane(first, batches, count);
    return __reduce_add_sync(0xffffffffu, own);
  }

  // Finds an item, not before the last one asked for. False if there are not so many. The entries
  // looked at together come in their order, or those with the most items first.
  template <bool largest_first = false, class Count>
  DLATTN_DEVICE bool find(int item, int batches, Count count) {
    for (; first_batch < batches; first_batch += 32) {
      const int own = of_lane(first_batch, batches, count);
      const int begin = largest_first ? in_larger(own) : in_earlier(own);
      const int number = item - first_item - begin;
      const uint32 found = __ballot_sync(0xffffffffu, number >= 0 && number < own);
      if (found != 0) {
        const int owner = __ffs(found) - 1;
        batch = first_batch + owner;
        rest = __shfl_sync(0xffffffffu, number, owner);
        return true;
      }
      first_item += __reduce_add_sync(0xffffffffu, own);
    }
    return false;
  }

 private:
  // Beyond the last entry, none.
  template <class Count>
  static DLATTN_DEVICE int of_lane(int first, int batches, Count count) {
    const int batch = first + int(threadIdx.x % 32), items = count(least(batch, batches - 1));
    return batch < batches ? items : 0;
  }
  // Of numbers of items, one a lane: the sum of those of lanes before.
  static DLATTN_DEVICE int in_earlier(int own) {
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, step);
      if (threadIdx.x % 32 >= step) end += before;
    }
    return end - own;
  }
  // Of larger ones, and of those of lanes before that are equal.
  static DLATTN_DEVICE int in_larger(int own) {
    int sum = 0;
#pragma unroll 4
    for (int lane = 0; lane < 32; ++lane) {
      const int items = __shfl_sync(0xffffffffu, own, lane);
      if (items > own || (items == own && lane < threadIdx.x % 32)) sum += items;
    }
    return sum;
  }
};

}  // namespace dlattn
