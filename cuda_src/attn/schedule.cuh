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

}  // namespace dlattn
