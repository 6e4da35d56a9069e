// Attention of few queries to many keys: decoding, with or without speculation, for sm_80 and up.
//
// It takes as long as reading K and V, so all is about having enough of them on their way. The queries of
// all heads that share keys are the rows of one item (so that grouped heads read each key once), and
// blocks, one or two of a multiprocessor, have equal shares of the key tiles of all items; or an item has a
// block to itself, or a cluster of them (attn/shares.cuh). In a block, teams of warps have keys of their
// own, and rings of key and value tiles that they fill by themselves (decode_boxes.cuh, decode_loads.cuh):
// between items there is no barrier but a team's, and a team of one warp needs none. A block's copies run
// ahead of its products, across items.
//
// At the end of an item the teams' partial outputs meet in shared memory, and then those of the blocks
// that had tiles of it (decode_parts.cuh).
#pragma once

#include "kernels/decode_parts.cuh"
#include "ptx/grid.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct Decode : DecodeParts<Problem, Tiling> {
  using Base = DecodeParts<Problem, Tiling>;
  using Base::Base;
  using Base::dim_qk;
  using Base::first_head;
  using Base::first_key;
  using Base::has_registers;
  using Base::p;
  using Base::ragged;
  using Base::row_group;
  using Base::row_of;
  using Base::tile_k;
  using Base::values;
  using Base::work;
  using T = typename Base::T;
  using Mask = typename Problem::Mask;
  using typename Base::Output;
  using typename Base::Products;
  using typename Base::Row;
  using typename Base::Softmax;
  static constexpr bool edits_much =
      Problem::Score::reads_memory && (Base::row_groups == 8 || dim_qk > 128);
  // Keys of which a warp has scores at a time: as many as registers allow.
  static constexpr int step_k =
      least(tile_k, Tiling::warpgroups ? (edits_much ? 32 : 64) : (dim_qk > 128 ? 16 : 32));
  using Queries = RegisterLeft<T, 1, dim_qk / 16>;
  using Scores = Accumulator<1, step_k / 8>;

  // Zeros where there is no query.
  DLATTN_DEVICE void read(Queries& queries, const Row (&row)[2]) {
    const bool exists[2] = {row[0].query < work.length.q, row[1].query < work.length.q};
    if constexpr (Tiling::boxes) {
      Base::read_queries(queries);
      for_each_half([&](int k, int half, int column) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!exists[i] || column >= Problem::head_dim_qk) queries.at[0][k][2 * half + i] = 0;
        }
      });
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const T* g_own =
            p.q.template rows<T, ragged>(work.batch, first_head(work) + row[i].head, row[i].query) +
            2 * (threadIdx.x % 4);
        if constexpr (has_registers) g_own = opaque(g_own);  // not an address for each column
        for_each_half([&](int k, int half, int column) {
          const bool valid = exists[i] && column < Problem::head_dim_qk;
          queries.at[0][k][2 * half + i] =
              valid ? __ldg(reinterpret_cast<const uint32*>(g_own + column)) : 0;
        });
      }
    }
  }
  // Calls use(k, half, column) for each eight columns of a row.
  template <class Use>
  static DLATTN_DEVICE void for_each_half(Use use) {
#pragma unroll
    for (int k = 0; k < dim_qk / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) use(k, half, 16 * k + 8 * half);
  }

  DLATTN_DEVICE void edit(Scores& scores, const Row (&row)[2], int first) {
    Problem::Score::prepare(scores, values);
    const int key = first + Scores::column(0, 0);
    scores.for_each([&](float& score, int, int n, int i) {
      const Row& at = row[i / 2];
      const Position position{
          work.batch, first_head(work) + at.head, work.length.q, work.length.kv, at.query, key,
          0,          Scores::column_step(n, i)};
      score = Problem::Score::apply(score, position, values);
    });
  }
  DLATTN_DEVICE void mask(Scores& scores, const Row (&row)[2], int first) {
    scores.for_each([&](float& score, int, int n, int i) {
      const int key = first + Scores::column(n, i);
      if (!Mask::keep(row[i / 2].query, key, work.length, p)) score = -infinity();
    });
  }

  // This team's keys of a tile: scores, probabilities, output.
  DLATTN_DEVICE void attend(Interval full, const Queries& queries, const Row (&row)[2],
                            Softmax& softmax, Output& output) {
    constexpr bool at_once = step_k == tile_k;
    const auto& s_keys = Base::await_keys();
#pragma unroll 1
    for (int step = 0; step < tile_k; step += step_k) {
      const int first = first_key(work) + step;
      if (!has_registers && step == 0) Base::load_ahead();
      Scores scores;
      Products::start_scores(scores, queries, s_keys, step);
      if (has_registers && step == 0) Base::load_ahead();
      Products::await(scores);
      if (at_once) Base::keys_read();
      const auto& s_values = Base::await_values(work);
      if (first >= work.keys.last) break;
      edit(scores, row, first);
      if (!full.contains({first, first + step_k})) mask(scores, row, first);
      float factor[2];
      if (softmax.advance(scores, factor)) softmax.rescale(output, factor);
      softmax.add(softmax.exponentiate(scores));
      Products::add(output, RegisterLeft<T, 1, step_k / 16>(scores), s_values, step);
    }
    if (!at_once) Base::keys_read();
    Base::values_read();
  }

  // One item, or what this block has of it. False if it was begun too early.
  DLATTN_DEVICE bool visit_item() {
    const Row row[2] = {row_of(p, 16 * row_group + Scores::row(0, 0)),
                        row_of(p, 16 * row_group + Scores::row(0, 2))};
    Base::read_again();
    Queries queries;
    read(queries, row);
    Softmax softmax(Problem::Score::factor(values));
    Output output;
    output.clear();
    const Interval full = Mask::full_keys({0, work.length.q}, work.length, p);
    if constexpr (Tiling::shares) {
      walk(full, queries, row, softmax, output);
      const auto others = Base::sources();
      Base::await_open(others);
      Base::share(softmax, output);
      Base::conclude(others);
      work.advance();
    } else {
      if (work.left > 0) walk(full, queries, row, softmax, output);
      if (!Base::began_right()) return false;
      Base::share(softmax, output);
      if constexpr (Tiling::clusters) {
        Base::conclude_together();
      } else {
        Base::conclude_alone();
      }
    }
    return true;
  }
  DLATTN_DEVICE void walk(Interval full, const Queries& queries, const Row (&row)[2],
                          Softmax& softmax, Output& output) {
#pragma unroll 1
    for (;; work.advance()) {
      attend(full, queries, row, softmax, output);
      if (work.tile == work.last_of_item()) break;
    }
  }

  static DLATTN_DEVICE typename Base::SharedMemory& shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return *reinterpret_cast<typename Base::SharedMemory*>(dynamic_shared_memory);
  }

  // False if it was begun too early.
  DLATTN_DEVICE bool run() {
    Base::start();
    if constexpr (Tiling::shares) {
      Base::open_part();
#pragma unroll 1
      while (work.left > 0) visit_item();
      return true;
    } else {
      return visit_item();
    }
  }
};

// By a warp whose first attempt began too early. Code of its own, which others need not jump over.
template <class Problem, class Tiling>
__device__ __noinline__ void decode_anew(const MappedDecodeParams& m,
                                         typename Decode<Problem, Tiling>::Attempt attempt) {
  using Kernel = Decode<Problem, Tiling>;
  const typename Kernel::Beginning beginning(m.p);
  Kernel kernel(m, Kernel::shared_memory(), beginning, warp_index(), attempt);
  kernel.run();
}

template <class Problem, class Tiling>
DLATTN_DEVICE void decode(const MappedDecodeParams& m) {
  using Kernel = Decode<Problem, Tiling>;
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);
  static_assert(sizeof(typename Kernel::Left) == Problem::part_bytes);
  launch_dependents();
  const typename Kernel::Beginning beginning(m.p);
  const int warp = warp_index();
  Kernel::open(m, Kernel::shared_memory(), beginning, warp);
  if (Kernel::reads_first(m.p) && !Kernel::guesses_from(m.p)) await_kernel_before();
  Kernel kernel(m, Kernel::shared_memory(), beginning, warp);
  await_kernel_before();
  const bool began_right = kernel.run();
  if constexpr (Kernel::may_guess) {
    if (!began_right) decode_anew<Problem, Tiling>(m, kernel.another_attempt());
  }
}

}  // namespace dlattn
