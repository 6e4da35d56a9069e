// How keys and values reach a team of warps of a decode anywhere: rings of tiles that each warp fills with
// 16 rows of its own by cp.async, ahead of the products and across items.
#pragma once

#include "attn/pages.cuh"
#include "kernels/decode_block.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct DecodeLoads : DecodeBlock<Problem, Tiling> {
  using Base = DecodeBlock<Problem, Tiling>;
  using Base::await_team;
  using Base::first_loaded;
  using Base::has_registers;
  using Base::loads;
  using Base::p;
  using Base::paged;
  using Base::ragged;
  using Base::row_group;
  using Base::shared_head;
  using Base::stages;
  using Base::team;
  using Base::teams;
  using typename Base::Beginning;
  using typename Base::KTile;
  using typename Base::Mailbox;
  using typename Base::Part;
  using typename Base::Products;
  using typename Base::RowSums;
  using typename Base::T;
  using typename Base::Tiles;
  using typename Base::VTile;

  union Stage {
    struct {
      KTile k;
      VTile v;
    } keys;
    Part part;  // of a team, when it is done with an item
  };
  struct BlockMemory {
    Stage stage[stages][teams];
    RowSums rows;
  };
  struct ClusterMemory : BlockMemory {
    Mailbox mailbox;
  };
  using SharedMemory = Either<Tiling::clusters, ClusterMemory, BlockMemory>;
  static constexpr bool parts_apart = false;

  SharedMemory& shared;
  int stage = 0;     // where products are
  const int* pages;  // of keys or values (look_up()) of the batch entry that copies are at
  int page;          // of the row that this lane finds for the next copies

  // Lengths and page numbers are read when they may be.
  static constexpr bool may_guess = false;
  static DLATTN_DEVICE bool guesses_from(const Params&) { return false; }
  struct Attempt {};

  DLATTN_DEVICE DecodeLoads(const MappedDecodeParams& params, SharedMemory& shared_memory,
                            const Beginning& beginning, int warp, Attempt)
      : Base(params, beginning.tiles, warp), shared(shared_memory) {
    loads.read_lengths();
    if (loads.left > 0) enter_item();
  }
  DLATTN_DEVICE void read_again() {}
  static DLATTN_DEVICE bool began_right() { return true; }

  DLATTN_DEVICE void start() {
#pragma unroll 1
    for (int ahead = 0; ahead < stages - 1; ++ahead) load_next(ahead);
  }
  // The oldest tile has landed, and the team is done with the one before.
  DLATTN_DEVICE const KTile& await_keys() const {
    cp_async_wait<stages - 2>();
    Products::publish();
    await_team();
    return shared.stage[stage][team].keys.k;
  }
  DLATTN_DEVICE void load_ahead() { load_next(stage == 0 ? stages - 1 : stage - 1); }
  DLATTN_DEVICE void keys_read() {}
  DLATTN_DEVICE const VTile& await_values(const Tiles&) { return shared.stage[stage][team].keys.v; }
  DLATTN_DEVICE void values_read() { stage = stage + 1 == stages ? 0 : stage + 1; }

  // Where a team leaves its rows: where the last tile was.
  DLATTN_DEVICE Part& part(int of_team) const {
    return shared.stage[stage == 0 ? stages - 1 : stage - 1][of_team].part;
  }

 private:
  // Starts copying the next tile, if there is one.
  DLATTN_DEVICE void load_next(int stage) {
    if (loads.left > 0) {
      auto& s_keys = shared.stage[stage][team].keys;
      copy_rows<Problem::paged_k, Problem::head_dim_qk>(s_keys.k, p.k, p.k_pages,
                                                        shared_head(p, loads, p.heads_per_k), 0);
      copy_rows<Problem::paged_v, Problem::head_dim_v>(s_keys.v, p.v, p.v_pages,
                                                       shared_head(p, loads, p.heads_per_v), 16);
      loads.advance();
      if (loads.left > 0) {
        if (loads.enters_item()) {
          enter_item();
          // Long before they are read, when products wait for them.
          if (has_registers && team + row_group == 0) Base::prefetch_queries(p, loads);
        } else {
          look_up();
        }
      }
    }
    cp_async_commit();
  }

  // Lanes find the pages of their rows, so early that copies need not wait: those of keys in the lower
  // half of the warp, those of values in the upper one.
  DLATTN_DEVICE const PageTableRef& own_table() const {
    const bool of_values = Problem::paged_v && (!Problem::paged_k || threadIdx.x % 32 >= 16);
    return of_values ? p.v_pages : p.k_pages;
  }
  DLATTN_DEVICE void look_up() {
    if constexpr (paged) {
      const int key = first_loaded(loads) + threadIdx.x % 16;
      page = key < loads.keys.last ? own_table().number(pages, key) : -1;
    }
  }
  DLATTN_DEVICE void enter_item() {
    if constexpr (paged) pages = own_table().entries(loads.batch);
    look_up();
  }

  // 16 keys or values of this warp, by all lanes together.
  template <bool is_paged, int columns, class Tile>
  DLATTN_DEVICE void copy_rows(Tile& s_tile, const TensorRef& tensor, const PageTableRef& table,
                               int head, int first_lane) {
    const int lane = threadIdx.x % 32;
    const int first = first_loaded(loads);
    if (is_paged && table.log2_rows >= 4) {  // the rows are in one page
      const int number = __shfl_sync(0xffffffffu, page, first_lane);
      const auto g_rows = strided(tensor.rows<T>(number, head, table.slot(first)), tensor.row);
      load_rows<32, 16, columns, 16>(s_tile, 16 * row_group, g_rows,
                                     table.has(number) ? loads.keys.last - first : 0, lane);
    } else if constexpr (is_paged) {
      const T* g_own =
          table.has(page) ? tensor.rows<T>(page, head, table.slot(first + lane % 16)) : nullptr;
      const GatheredRows<T> g_rows{g_own, first_lane};
      load_rows<32, 16, columns, 16>(s_tile, 16 * row_group, g_rows, 16, lane);
    } else {
      const auto g_rows = strided(tensor.rows<T, ragged>(loads.batch, head, first), tensor.row);
      load_rows<32, 16, columns, 16>(s_tile, 16 * row_group, g_rows, loads.keys.last - first, lane);
    }
  }
};

}  // namespace dlattn
