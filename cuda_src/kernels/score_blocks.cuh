// Before the kernels of a problem with a user's function of scores: which blocks the function masks
// whole, and of which it masks nothing. The function's conditions are computed once for each block of
// queries and keys, of the least and greatest that they read there (attn/ranges.cuh); what is provably
// false nowhere visits. The block mask that is written is read as one that the user gives
// (attn/walk.cuh), which it includes.
//
// A thread block has 32 x 32 blocks: each warp sums up what some of its rows and columns read, then has
// rows of it, of which each lane has a block.
#pragma once

#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/ranges.cuh"
#include "attn/seqlen.cuh"
#include "ptx/grid.cuh"

namespace dlattn {

template <int warps_>
struct ScoreBlocksTiling {
  static constexpr int warps = warps_;
};

// Which block of scores, and its positions, at least one of each.
struct ScoreBlock {
  int batch, head;
  Interval queries, keys;
};

namespace ranges {

// What `load` makes of an element.
template <class T>
inline constexpr bool is_float = same_type<T, float> || same_type<T, bf16> || same_type<T, half>;
template <class T>
using Loaded =
    Either<is_float<T>, float, Either<same_type<T, int64> || same_type<T, bool>, T, int>>;

template <class T>
DLATTN_DEVICE const T* element(const BiasRef& tensor, int batch, int head) {
  return static_cast<const T*>(tensor.data) + batch * tensor.batch + head * tensor.head;
}

// The only element that a head has of a tensor.
template <class T>
DLATTN_DEVICE auto read(const BiasRef& tensor, const ScoreBlock& at) {
  return only(Loaded<T>(pointwise::load(element<T>(tensor, at.batch, at.head))));
}

// Those at some positions, `step` elements apart. A warp's.
template <class T>
DLATTN_DEVICE auto read(const BiasRef& tensor, int64 step, int batch, int head, Interval at) {
  using Number = Loaded<T>;
  const T* g_elements = element<T>(tensor, batch, head);
  Number low = Number(pointwise::load(g_elements + at.first * step)), high = low;
#pragma unroll 4
  for (int i = at.first + int(threadIdx.x % 32); i < at.last; i += 32) {
    const Number x = Number(pointwise::load(g_elements + i * step));
    low = pointwise::min(low, x);
    high = pointwise::max(high, x);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    low = pointwise::min(low, Number(__shfl_xor_sync(0xffffffffu, low, lanes)));
    high = pointwise::max(high, Number(__shfl_xor_sync(0xffffffffu, high, lanes)));
  }
  return between(low, high);
}

}  // namespace ranges

template <class Problem, class Tiling>
DLATTN_DEVICE void score_blocks(const Params& p) {
  using Blocks = typename Problem::Blocks;  // dlattn/plans/score_blocks.py
  constexpr int side = 32;
  __shared__ typename Blocks::Queries s_queries[side];
  __shared__ typename Blocks::Keys s_keys[side];
  const int patches = ceil_div(ceil_div(p.seq_kv, block_size), side);
  const int first_row = int(blockIdx.x) / patches * side;
  const int first_column = int(blockIdx.x) % patches * side;
  const int head = blockIdx.y, batch = blockIdx.z, warp = warp_index(), lane = threadIdx.x % 32;
  launch_dependents();
  // Entries that share the mask have it as long as the longest may be.
  const Lengths length = p.block_mask.batch == 0 && p.batch > 1 ? Lengths(p) : Lengths(p, batch);
  const auto positions = [](int block, int end) {
    return Interval{block * block_size, least((block + 1) * block_size, end)};
  };

#pragma unroll 1
  for (int i = warp; i < side; i += Tiling::warps) {
    const Interval queries = positions(first_row + i, length.q);
    const Interval keys = positions(first_column + i, length.kv);
    if (!queries.empty()) {
      const auto read = Blocks::queries(p, batch, head, queries);
      if (lane == 0) s_queries[i] = read;
    }
    if (!keys.empty()) {
      const auto read = Blocks::keys(p, batch, head, keys);
      if (lane == 0) s_keys[i] = read;
    }
    __syncwarp();
  }
  __syncthreads();

  const int rows = ceil_div(p.seq_q, block_size);
#pragma unroll 1
  for (int i = warp; i < side && first_row + i < rows; i += Tiling::warps) {
    const int row = first_row + i, column = first_column + lane;
    const ScoreBlock block{batch, head, positions(row, length.q), positions(column, length.kv)};
    Truth kept{false, false};
    if (!block.queries.empty() && !block.keys.empty()) {
      kept = Blocks::keeps(p, block, s_queries[i], s_keys[lane]);
      const BlockMaskRef& given = p.given_block_mask;
      kept.maybe = kept.maybe && (given.data == nullptr || given.keeps(batch, head, row, column));
    }
    const uint32 some = __ballot_sync(0xffffffffu, kept.maybe);
    const uint32 all = __ballot_sync(0xffffffffu, kept.surely);
    if (lane == 0) {
      const BlockMaskRef& mask = p.block_mask;
      const int64 at = batch * mask.batch + head * mask.head + row * mask.row + first_column / 8;
      *reinterpret_cast<uint32*>(const_cast<unsigned char*>(mask.data) + at) = some;
      *reinterpret_cast<uint32*>(p.whole_blocks + at) = all;
    }
    __syncwarp();
  }
}

}  // namespace dlattn
