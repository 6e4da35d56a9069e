// Puts query tiles together whose keys many blocks of the Hopper forward shared, after it: what each of
// them has of the rows is in the workspace (attn/key_parts.cuh).
//
// A block has 16 rows, of a warp there, and 32 of their columns. Its warps, as many as the launch says,
// share out the parts, several on their way from memory at a time; the first adds up what all have, and
// stores it.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/key_parts.cuh"
#include "kernels/fwd_sm90_block.cuh"
#include "ptx/grid.cuh"
#include "tile/quad.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct FwdParts {
  using Block = FwdSm90Block<Problem, Tiling>;
  using T = typename Problem::Element;
  static constexpr int at_a_time = 4;  // parts that a warp loads
  static constexpr int warps_of_tile = 4 * Tiling::consumers;
  static constexpr int columns = 32, n_tiles = columns / 8, v_tiles = Block::dim_v / 8;
  static constexpr int slices = ceil_div(v_tiles, n_tiles);
  using Part = KeyPart<warps_of_tile, v_tiles>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;
  using Output = Accumulator<1, n_tiles>;

  // A lane's elements of a part.
  struct Loaded {
    float4 softmax{Softmax::no_key, Softmax::no_key, 0.f, 0.f}, output[n_tiles]{};
  };
  // What a warp but the first has, in shared memory.
  struct Sum {
    float4 softmax[32], output[n_tiles][32];
  };

  // Where the parts of a query tile are (dlattn/plans/schedule.py): side by side, but for that with the
  // last keys.
  struct Places {
    int first, last, count;
    DLATTN_DEVICE int operator[](int i) const { return i == count - 1 ? last : first + i; }
  };

  const Params& p;
  Sum* const sums;
  const int slice = blockIdx.x % slices;
  const int warp_of_tile = blockIdx.x / slices % warps_of_tile;
  const int warp = warp_index(), warps = blockDim.x / 32, lane = threadIdx.x % 32;

  DLATTN_DEVICE Loaded load(int place) const {
    const Part& part = static_cast<const Part*>(p.parts.data)[place];
    const int thread = 32 * warp_of_tile + lane;
    Loaded loaded;
    loaded.softmax = load_relaxed(&part.softmax[thread]);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int v = slice * n_tiles + n;
      if (v_tiles % n_tiles == 0 || v < v_tiles) {
        loaded.output[n] = load_relaxed(&part.output[v][thread]);
      }
    }
    return loaded;
  }
  static DLATTN_DEVICE void add(const Loaded& loaded, Softmax& softmax, Output& output) {
    add_part(softmax, output, loaded.softmax, [&](int n) { return loaded.output[n]; });
  }

  DLATTN_DEVICE void add_own(const Places& places, Softmax& softmax, Output& output) const {
#pragma unroll 1
    for (int i = warp; i < places.count; i += at_a_time * warps) {
      Loaded loaded[at_a_time];
#pragma unroll
      for (int j = 0; j < at_a_time; ++j) {
        if (i + j * warps < places.count) loaded[j] = load(places[i + j * warps]);
      }
#pragma unroll
      for (const Loaded& each : loaded) add(each, softmax, output);
    }
  }
  DLATTN_DEVICE void leave(const Softmax& softmax, const Output& output) const {
    Sum& sum = sums[warp - 1];
    sum.softmax[lane] = told_of(softmax);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) sum.output[n][lane] = told_of(output.at[0][n]);
  }
  DLATTN_DEVICE void add_others(Softmax& softmax, Output& output) const {
#pragma unroll 1
    for (int other = 0; other < warps - 1; ++other) {
      const Sum& sum = sums[other];
      add_part(softmax, output, sum.softmax[lane], [&](int n) { return sum.output[n][lane]; });
    }
  }

  DLATTN_DEVICE void store(int batch, int head, int first, int length_q,
                           const Output& output) const {
    const int rows = p.o.template stored_rows<Problem::ragged>(length_q, p.seq_q) - first;
    const int column = slice * columns + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 words[4];
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const float (&o)[4] = output.at[0][n];
        words[n] = Convert<T>::pack(o[2 * half], o[2 * half + 1]);
      }
      transpose_quad(words, lane);
      const int row = lane / 4 + 8 * half;
      if (row >= rows || column >= Problem::head_dim_v) continue;
      T* o = p.o.template rows<T, Problem::ragged>(batch, head, first + row) + column;
      store_16(o, uint4{words[0], words[1], words[2], words[3]});
    }
  }

  DLATTN_DEVICE void run() const {
    launch_dependents();                                  // of the next call, which waits
    if (p.items_taken != nullptr) await_kernel_before();  // which tells of parts
    const int4* told = p.parts.tiles + 2 * (blockIdx.x / (slices * warps_of_tile));
    const int4 tile = told[0], parts = told[1];
    if (parts.z == 0) return;
    const typename Block::Work work(p, {tile.x, tile.y, tile.z});
    const auto own = Block::own_rows(p, work, warp_of_tile / 4);
    const auto rows = Block::rows_from(p, 16 * (warp_of_tile % 4));
    const int head = own.head + rows.head, first = own.first + rows.first;
    const int length_q = work.length.q;
    // Rows of no query, and their statistics, are stored here if others of their consumer have some.
    if (own.first < 0 || own.first >= length_q || rows.head >= own.heads) return;
    if (first >= p.seq_q) return;

    await_kernel_before();
    const ScoreValues values(p);
    Softmax softmax(Problem::Score::factor(values));
    Output output;
    output.clear();
    add_own({parts.x, parts.y, parts.z}, softmax, output);
    if (warp > 0) leave(softmax, output);
    __syncthreads();
    if (warp > 0) return;
    add_others(softmax, output);
    // Statistics are the same in blocks of other columns, and stored by all.
    finish_rows<Problem>(p, tile.z, head, first, length_q, softmax, output);
    store(tile.z, head, first, length_q, output);
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void fwd_parts(const Params& p) {
  using Kernel = FwdParts<Problem, Tiling>;
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  static_assert(sizeof(typename Kernel::Sum) == Problem::shared_memory);
  Kernel{p, reinterpret_cast<typename Kernel::Sum*>(dynamic_shared_memory)}.run();
}

}  // namespace dlattn
