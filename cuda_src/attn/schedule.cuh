// Which block does what.
#pragma once

#include "attn/params.cuh"

namespace dlattn {

struct WorkItem {
  int tile, head, batch;
};

// Decodes a flat block index. (batch, head) pairs are taken heads_per_wave at a time, so that the
// keys and values of a wave stay in L2; inside a wave the last tiles of all heads come first,
// because under a causal mask they are the longest.
DLATTN_DEVICE WorkItem longest_first(int index, int tiles, int heads, const Params& p) {
  const int pairs = heads * p.batch;
  const int wave = index / (tiles * p.heads_per_wave);
  const int first_pair = wave * p.heads_per_wave;
  const int width = least(p.heads_per_wave, pairs - first_pair);
  const int rest = index - first_pair * tiles;
  const int pair = first_pair + rest % width;
  return {tiles - 1 - rest / width, pair % heads, pair / heads};
}

// longest_first with the first tiles first: under a causal mask, the longest key tiles.
DLATTN_DEVICE WorkItem first_first(int index, int tiles, int heads, const Params& p) {
  WorkItem item = longest_first(index, tiles, heads, p);
  item.tile = tiles - 1 - item.tile;
  return item;
}

// Numbers items through the batch, so many per entry as only the device knows. A warp's.
struct BatchWalk {
  int first_batch = 0;  // of the 32 entries looked at
  int first_item = 0;   // of the first of them
  int batch, rest;      // found: an entry, and the number of the item in it

  // Finds an item, not before the last one asked for. False if there are not so many.
  template <class Count>
  DLATTN_DEVICE bool find(int item, int batches, Count count) {
    const int lane = threadIdx.x % 32;
    for (; first_batch < batches; first_batch += 32) {
      const int own = first_batch + lane < batches ? count(first_batch + lane) : 0;
      int end = own;  // of this lane's items, after all entries before
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
      }
      const uint32 beyond = __ballot_sync(0xffffffffu, first_item + end > item);
      if (beyond != 0) {
        const int owner = __ffs(beyond) - 1;
        batch = first_batch + owner;
        rest = item - first_item - __shfl_sync(0xffffffffu, end - own, owner);
        return true;
      }
      first_item += __shfl_sync(0xffffffffu, end, 31);
    }
    return false;
  }
};

}  // namespace dlattn
