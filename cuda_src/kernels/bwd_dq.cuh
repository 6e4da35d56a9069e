// After the backward's main kernel: the fp32 dQ sums, in accumulator order, become rows of dQ.
// One block per query tile; rows beyond the actual length become zeros.
#pragma once

#include "attn/params.cuh"
#include "kernels/bwd_tile.cuh"
#include "tile/gemm.cuh"
#include "tile/shared_tile.cuh"

namespace dlattn {

template <class Problem, class Tiling>
DLATTN_DEVICE void bwd_dq(const Params& p) {
  using Shapes = PortableBwdShapes<Problem, Tiling>;
  using T = typename Problem::Element;
  using Grid = typename Shapes::DQGrid;
  using Tile = SharedTile<T, Shapes::tile_q, Shapes::dim_qk>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  Tile& s_dq = *reinterpret_cast<Tile*>(dynamic_shared_memory);
  static_assert(sizeof(Tile) == Problem::shared_memory);

  const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int first_query = tile * Shapes::tile_q;
  // A ragged problem has sums only of tiles that exist.
  const bool has_sums = !Problem::ragged || tile < Shapes::query_tiles(p, batch);
  const int rows = p.dQ.stored_rows<Problem::ragged>(
      Problem::ragged ? p.seq_len_q.at(batch, p.seq_q) : p.seq_q, p.seq_q);
  if (Problem::ragged && rows <= first_query) return;
  const float factor = gradient_factor<Problem>(ScoreValues(p));
  const float* g_sum = Shapes::dq_accum(p, Shapes::row_tile(p, batch, head, tile));
  typename Grid::Block dq;
  dq.for_each([&](float& value, int m, int n, int i) {
    value = has_sums ? g_sum[Shapes::dq_offset(m, n, i)] * factor : 0.f;
  });
  store_accumulator(s_dq, Grid::first_row(), Grid::first_column(), dq);
  __syncthreads();
  store_tile<Shapes::threads, Problem::head_dim_qk, Problem::access_bytes>(
      strided(p.dQ.rows<T, Problem::ragged>(batch, head, first_query), p.dQ.row), s_dq,
      rows - first_query);
}

}  // namespace dlattn
