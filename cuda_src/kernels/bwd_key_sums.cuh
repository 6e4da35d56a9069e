// dK and dV on their way from registers to memory: as rows, or, where several items have parts of a group
// or of its queries, by way of fp32 sums.
#pragma once

#include "attn/pages.cuh"
#include "attn/seqlen.cuh"
#include "kernels/bwd_tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/opaque.cuh"
#include "tile/quad.cuh"

namespace dlattn {

template <class Problem>
struct KeyGradients {
  static constexpr bool paged = Problem::paged_k, of_keys = true;
  static constexpr int head_dim = Problem::head_dim_qk;
  static DLATTN_DEVICE const TensorRef& ref(const Params& p) { return p.dK; }
  static DLATTN_DEVICE const PageTableRef& pages(const Params& p) { return p.k_pages; }
  static DLATTN_DEVICE float factor(const Params& p) {
    return gradient_factor<Problem>(ScoreValues(p));
  }
};

template <class Problem, class Tiling>
struct ValueGradients {
  static constexpr bool paged = Problem::paged_v, of_keys = false;
  static constexpr int head_dim = Problem::head_dim_v;
  static DLATTN_DEVICE const TensorRef& ref(const Params& p) { return p.dV; }
  static DLATTN_DEVICE const PageTableRef& pages(const Params& p) { return p.v_pages; }
  // Brings probabilities back to their size, too.
  static DLATTN_DEVICE float factor(const Params& p) {
    constexpr int raised = 1 << Tiling::template raised<typename Problem::Element>;
    return dropout_scale<Problem>(p) / raised;
  }
};

// Whose dK or dV it is; and where that begins, in a ragged tensor.
template <class T>
struct KeyEntry {
  int batch, length;
  T* g_first = nullptr;
};

// Stores a warp's 16 rows, whose keys begin with `first`, 16 bytes a lane at a time.
template <class Problem, class Of, int n_tiles, class T = typename Problem::Element>
DLATTN_DEVICE void store_key_rows(const Accumulator<1, n_tiles>& gradient, int first,
                                  const KeyEntry<T>& entry, int head, const Params& p) {
  const int lane = opaque(threadIdx.x % 32), key = first + lane / 4, column = lane % 4 * 8;
  const TensorRef& ref = Of::ref(p);
  const int end = stored_keys<Problem, Of::paged>(p, ref, Of::pages(p), entry.length);
  const auto g_rows = [&] {
    if constexpr (Problem::ragged && !Of::paged) {
      return StridedRows<T>{entry.g_first + head * ref.head + key * ref.row + column, ref.row};
    } else {
      return key_rows<Problem, Of::paged>(ref, Of::pages(p), entry.batch, head, key, column);
    }
  }();
  const float factor = Of::factor(p);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* g_row = key + 8 * half < end ? g_rows.at(8 * half, 0) : nullptr;
#pragma unroll
    for (int n = 0; n < n_tiles; n += 4) {
      uint32 row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& value = gradient.at[0][n + i];
        row[i] = Convert<T>::pack(value[2 * half] * factor, value[2 * half + 1] * factor);
      }
      transpose_quad(row, lane);
      if (g_row != nullptr && column + 8 * n < Of::head_dim) {
        store_streaming(g_row + 8 * n, uint4{row[0], row[1], row[2], row[3]});
      }
    }
  }
}

// The sums of a key tile: of dK, then of dV, 16 rows after 16 rows, as accumulators are.
template <class Problem, class Tiling>
struct KeySums {
  static constexpr int tile_k = Tiling::tile_k;
  static constexpr int width_qk = result_width<Problem>(Problem::head_dim_qk);
  static constexpr int width_v = result_width<Problem>(Problem::head_dim_v);
  static constexpr int gradients = tile_k * (width_qk + width_v);
  // In a fixed order of additions, how many there have been, of each 16 rows.
  static constexpr int turns = Problem::deterministic ? round_up(tile_k / 16, 32) : 0;
  static constexpr int size = gradients + turns;
  float* const g_first;

  DLATTN_DEVICE KeySums(const Params& p, int batch, int head, int tile)
      : KeySums(p, (batch * heads(p) + head) * ceil_div(p.seq_kv, tile_k) + tile - p.whole_items) {}
  // Of a ragged problem; in the workspace, even if there are more tokens than promised.
  static DLATTN_DEVICE KeySums of_entry(const Params& p, int batch, int head, int tile) {
    return {p, least(tile_of_all(p, batch, tile), p.ragged.key_tiles - 1) * heads(p) + head};
  }
  static DLATTN_DEVICE int tile_of_all(const Params& p, int batch, int tile) {
    return p.ragged.first_key_tile(p.batch, batch) + tile;
  }
  explicit DLATTN_DEVICE KeySums(float* g_sums) : g_first(g_sums) {}
  DLATTN_DEVICE KeySums(const Params& p, int number) : g_first(p.key_sums + int64(number) * size) {}

  // That have sums of their own.
  static DLATTN_DEVICE int heads(const Params& p) { return p.heads_per_k.quotient(p.heads_q); }

  // Of a ragged problem's entry, all sums are cleared by the blocks of a grid's layer.
  static DLATTN_DEVICE void clear(const Params& p, int batch) {
    const int tiles = most(1, ceil_div(p.seq_len_kv.at(batch, p.seq_kv), tile_k));
    const int first = tile_of_all(p, batch, 0), last = least(first + tiles, p.ragged.key_tiles);
    const int64 units = int64(heads(p)) * (size / 4), end = last * units;
    const int64 block = int64(gridDim.x) * blockIdx.y + blockIdx.x;
    const int64 step = int64(gridDim.x) * gridDim.y * blockDim.x;
    auto* g_sums = reinterpret_cast<float4*>(p.key_sums);
    for (int64 i = first * units + block * blockDim.x + threadIdx.x; i < end; i += step) {
      g_sums[i] = float4{0.f, 0.f, 0.f, 0.f};
    }
  }

  // This lane's part of the first eight columns of the 16 rows from `first` on; 128 later, of the next.
  template <class Of>
  DLATTN_DEVICE float* of_lane(int first) const {
    const int before = Of::of_keys ? first * width_qk : tile_k * width_qk + first * width_v;
    return g_first + before + opaque(threadIdx.x) % 32 * 4;
  }

  template <class Of, int n_tiles>
  DLATTN_DEVICE void add(const Accumulator<1, n_tiles>& gradient, int first) const {
    float* g_sums = of_lane<Of>(first);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) reduce_add_x4(g_sums + 128 * n, 1, gradient.at[0][n]);
  }

  // A warp waits until its 16 rows have been added to so often; and says that it has added.
  DLATTN_DEVICE void await_turn(int first, int turn) const {
    while (load_acquire(additions(first)) < turn) __nanosleep(20);
    __syncwarp();
  }
  DLATTN_DEVICE void end_turn(int first) const {
    __syncwarp();
    if (opaque(threadIdx.x) % 32 == 0) add_release(additions(first), 1);
    __syncwarp();
  }
  DLATTN_DEVICE int* additions(int first) const {
    return reinterpret_cast<int*>(g_first + gradients) + first / 16;
  }

  // A warp stores what 16 rows of the tile have come to.
  template <class Of>
  DLATTN_DEVICE void store(int first, int key, int batch, int head, const Params& p) const {
    Accumulator<1, (Of::of_keys ? width_qk : width_v) / 8> gradient;
    const float* g_sums = of_lane<Of>(first);
    for (auto& d : gradient.at[0]) {
      const float4 sum = *reinterpret_cast<const float4*>(g_sums);
      d[0] = sum.x;
      d[1] = sum.y;
      d[2] = sum.z;
      d[3] = sum.w;
      g_sums += 128;
    }
    using T = typename Problem::Element;
    T* g_entry = Of::ref(p).template rows<T, Problem::ragged>(batch, 0, 0);
    const KeyEntry<T> entry{batch, p.seq_len_kv.at(batch, p.seq_kv), g_entry};
    store_key_rows<Problem, Of>(gradient, key, entry, head, p);
  }
};

}  // namespace dlattn
