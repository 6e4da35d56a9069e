// Before a Hopper forward whose blocks ask for query tiles of a block mask: those that visit the most
// blocks of keys come first, so that all end together. A thread block has the tiles of a (batch, head) pair.
#pragma once

#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "ptx/bits.cuh"
#include "ptx/grid.cuh"

namespace dlattn {

template <int warps_, int at_once_>
struct TileOrderTiling {
  static constexpr int warps = warps_, at_once = at_once_;  // tiles that a warp looks at
};

// The blocks of keys that a tile's mask leaves it, where the block mask keeps all; before 0, none, of a
// tile without queries.
template <class Mask>
DLATTN_DEVICE Interval blocks_of_keys(const Params& p, int tile, const Lengths& length) {
  const Interval queries{tile * block_size, least((tile + 1) * block_size, length.q)};
  if (queries.empty()) return {-1, -1};
  const Interval keys = Mask::keys(queries, length, p);
  if (keys.empty()) return {0, 0};
  return {keys.first / block_size, ceil_div(keys.last, block_size)};
}

// Of eight blocks, how many a tile visits.
DLATTN_DEVICE int visited(const Params& p, const WorkItem& item, Interval blocks, int eight) {
  const Interval own = blocks & Interval{8 * eight, 8 * eight + 8};
  if (own.empty()) return 0;
  const uint32 kept = p.block_mask.byte(p.block_mask.data, item.batch, item.head, item.tile, eight);
  return __popc(kept & bit_mask(own.first - 8 * eight, own.last - own.first));
}

template <class Problem, class Tiling>
DLATTN_DEVICE void tile_order(const Params& p) {
  extern __shared__ int s_visits[];  // how many blocks each tile visits; -1 of one without queries
  constexpr int at_once = Tiling::at_once, warps = Tiling::warps;
  const int head = blockIdx.x, batch = blockIdx.y, tiles = ceil_div(p.seq_q, block_size);
  const int lane = threadIdx.x % 32;
  launch_dependents();
  await_kernel_before();
  const Lengths length(p, batch);
#pragma unroll 1
  for (int first = warp_index(); first < tiles; first += at_once * warps) {
    Interval blocks[at_once];
    int visits[at_once] = {};
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      blocks[i] = blocks_of_keys<typename Problem::Mask>(p, first + i * warps, length);
    }
#pragma unroll 1
    for (int eight = lane; 8 * eight < ceil_div(p.seq_kv, block_size); eight += 32)
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        visits[i] += visited(p, {first + i * warps, head, batch}, blocks[i], eight);
      }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int tile = first + i * warps, all = __reduce_add_sync(0xffffffffu, visits[i]);
      if (lane == 0 && tile < tiles) s_visits[tile] = blocks[i].first < 0 ? -1 : all;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int tile = threadIdx.x; tile < tiles; tile += 32 * warps) {
    const int own = s_visits[tile];
    int before = 0;
#pragma unroll 8
    for (int other = 0; other < tiles; ++other) {
      before += s_visits[other] + (other < tile) > own;
    }
    p.tile_order.tiles(batch, head)[before] = tile;
  }
}

}  // namespace dlattn
