// The two products of a decode, by warps or by warpgroups: tiles of keys and values as each needs them,
// and how queries, in registers, meet them.
#pragma once

#include "ptx/tma.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"
#include "tile/slab_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

// The right operand (k x n) of a warp's product in slabs: the swizzle of a lane's row is the same for all
// of its rows, and an XOR of the columns.
template <class T, int rows, int columns, bool row_major>
struct SharedRight<SlabTile<T, rows, columns>, row_major> {
  using Tile = SlabTile<T, rows, columns>;
  uint32 base;

  DLATTN_DEVICE SharedRight(const Tile& s_tile, int first_n, int first_k = 0) {
    const int lane = threadIdx.x % 32;
    const int row = row_major ? first_k + lane % 16 : first_n + lane % 8 + lane / 16 * 8;
    base = s_tile.unit_address(row, row_major ? lane / 16 : lane / 8 % 2);
  }
  DLATTN_DEVICE uint32 address(int n, int k_step) const {
    const int row = row_major ? 16 * k_step : 8 * n, unit = row_major ? n : 2 * k_step;
    return (base + unit / 8 * Tile::slab_bytes + row * 128) ^ (unit % 8 << 4);
  }
};

// A warp's, by mma.
template <template <class, int, int> class Tile, class T, int tile_k, int head_dim_qk,
          int head_dim_v>
struct WarpProductsOf {
  static constexpr int dim_qk = round_up(head_dim_qk, 16), dim_v = round_up(head_dim_v, 16);
  using KTile = Tile<T, tile_k, dim_qk>;
  using VTile = Tile<T, tile_k, dim_v>;

  // Copies of this thread have landed: the products of others may read them after a barrier.
  static DLATTN_DEVICE void publish() {}

  // Scores of the keys from first_key on, once they have been awaited.
  template <int n_tiles, int k_steps>
  static DLATTN_DEVICE void start_scores(Accumulator<1, n_tiles>& c,
                                         const RegisterLeft<T, 1, k_steps>& queries,
                                         const KTile& s_keys, int first_key) {
    c.clear();
    gemm<T, k_steps>(c, queries, SharedRight<KTile, false>(s_keys, first_key));
  }
  template <int n_tiles>
  static DLATTN_DEVICE void await(Accumulator<1, n_tiles>&) {}
  // c += probabilities x values from first_key on.
  template <int n_tiles, int k_steps>
  static DLATTN_DEVICE void add(Accumulator<1, n_tiles>& c,
                                const RegisterLeft<T, 1, k_steps>& probabilities,
                                const VTile& s_values, int first_key) {
    gemm<T, k_steps>(c, probabilities, SharedRight<VTile, true>(s_values, 0, first_key));
  }
};
template <class T, int tile_k, int head_dim_qk, int head_dim_v>
using WarpProducts = WarpProductsOf<SharedTile, T, tile_k, head_dim_qk, head_dim_v>;
template <class T, int tile_k, int head_dim_qk, int head_dim_v>
using BoxedWarpProducts = WarpProductsOf<SlabTile, T, tile_k, head_dim_qk, head_dim_v>;

// A warpgroup's, by wgmma: its four warps read each tile once.
template <class T, int tile_k, int head_dim_qk, int head_dim_v>
struct WarpgroupProducts {
  static constexpr int dim_qk = round_up(head_dim_qk, 16);
  // Widths that wgmma_shapes.cuh has.
  static constexpr int dim_v =
      head_dim_v <= 128 ? round_up(head_dim_v, 32) : round_up(head_dim_v, 64);
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;

  static DLATTN_DEVICE void publish() { fence_proxy_async(); }

  template <int n_tiles, int k_steps>
  static DLATTN_DEVICE void start_scores(Accumulator<1, n_tiles>& c,
                                         const RegisterLeft<T, 1, k_steps>& queries,
                                         const KTile& s_keys, int first_key) {
    start_product(c, queries, s_keys, first_key);
  }
  template <int n_tiles>
  static DLATTN_DEVICE void await(Accumulator<1, n_tiles>& c) {
    wgmma_wait<0>();
    tie(c);
  }
  template <int n_tiles, int k_steps>
  static DLATTN_DEVICE void add(Accumulator<1, n_tiles>& c,
                                const RegisterLeft<T, 1, k_steps>& probabilities,
                                const VTile& s_values, int first_key) {
    start_accumulation(c, probabilities, s_values, first_key / 16);
    await(c);
  }
};

}  // namespace dlattn
