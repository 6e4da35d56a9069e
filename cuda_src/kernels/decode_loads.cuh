// How keys and values reach a team of warps of a decode: rings of tiles that each warp fills with 16 rows
// of its own, ahead of the products and across items. By cp.async: bulk copies of single rows are slower
// (half of the bandwidth), and boxes of several need pages of as many.
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/shares.cuh"
#include "kernels/decode_products.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"

namespace dlattn {

template <int warps_, int row_groups_, int stages_, bool warpgroups_, bool clusters_, bool warm_,
          bool early_>
struct DecodeTiling {
  static constexpr int warps = warps_;
  static constexpr int row_groups = row_groups_;   // of 16 rows, each of which a warp of a team has
  static constexpr int stages = stages_;           // key and value tiles of a team
  static constexpr bool warpgroups = warpgroups_;  // multiply together
  static constexpr bool clusters = clusters_;      // each item by the blocks of a cluster
  static constexpr bool warm = warm_, early = early_;
};

template <class Problem, class Tiling>
struct DecodeLoads {
  using T = typename Problem::Element;
  static constexpr bool ragged = Problem::ragged;
  static constexpr bool paged = Problem::paged_k || Problem::paged_v;
  static constexpr int warps = Tiling::warps, stages = Tiling::stages;
  static constexpr int row_groups = Tiling::row_groups, teams = warps / row_groups;
  static constexpr int rows = 16 * row_groups;
  static constexpr int tile_k = 16 * row_groups;  // of a team
  static_assert(warps % row_groups == 0 && stages >= 2);
  static_assert(!Tiling::warpgroups || row_groups % 4 == 0);

  template <template <class, int, int, int> class Kind>
  using ProductsOf = Kind<T, tile_k, Problem::head_dim_qk, Problem::head_dim_v>;
  using Products =
      Either<Tiling::warpgroups, ProductsOf<WarpgroupProducts>, ProductsOf<WarpProducts>>;
  static constexpr int dim_qk = Products::dim_qk, dim_v = Products::dim_v;
  using KTile = typename Products::KTile;
  using VTile = typename Products::VTile;
  using Tiles = Either<Tiling::clusters, ClusterShare<typename Problem::Mask, teams * tile_k>,
                       Share<typename Problem::Mask, teams * tile_k>>;

  // Partial rows: exponentials times values, which are relative to a reference, and their sum. Columns
  // beyond dim_v are banks between rows.
  struct Part {
    float o[rows][dim_v + 8];
  };
  // Rows of all teams of a block.
  struct Left {
    float o[rows][dim_v];
    float reference[rows], sum[rows];
  };
  union Stage {
    struct {
      KTile k;
      VTile v;
    } keys;
    Part part;  // of a team, when it is done with an item
  };
  // What a block of a cluster sends to another one of eight columns of a row.
  struct alignas(16) Packet {
    static constexpr int bytes = 40;
    float o[8], reference, sum;
  };
  static constexpr int row_units = Problem::head_dim_v / 8, most_blocks = 16;
  struct Mailbox {
    Packet packets[rows * row_units + most_blocks];
    uint64 full;
  };
  struct BlockMemory {
    Stage stage[stages][teams];
    float reference[teams][rows], sum[teams][rows];
  };
  struct ClusterMemory : BlockMemory {
    Mailbox mailbox;
  };
  using SharedMemory = Either<Tiling::clusters, ClusterMemory, BlockMemory>;

  const Params& p;
  SharedMemory& shared;
  const int team, row_group;  // of this warp
  Tiles loads;                // where copies are
  // Pages of the rows that this lane finds for the next copies, and where the last of them is.
  static constexpr int looked_up = Tiling::early ? 3 : 1;
  int pages[looked_up];
  Tiles found;

  DLATTN_DEVICE DecodeLoads(const Params& params, SharedMemory& shared_memory)
      : p(params),
        shared(shared_memory),
        team(warp_index() / row_groups),
        row_group(warp_index() % row_groups),
        loads(params),
        found(loads) {
#pragma unroll
    for (int i = 0; i < looked_up; ++i) look_up();
  }

  DLATTN_DEVICE int first_head(const Tiles& at) const { return at.group() * p.heads_per_block; }
  DLATTN_DEVICE int first_key(const Tiles& at) const { return at.first_key() + team * tile_k; }

  DLATTN_DEVICE void await_team() const {
    if constexpr (row_groups == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + team, 32 * row_groups);
    }
  }

  // The oldest tile has landed, and the team is done with the one before.
  DLATTN_DEVICE void await_tile() const {
    cp_async_wait<stages - 2>();
    Products::publish();
    await_team();
  }

  // Starts copying the next tile, if there is one.
  DLATTN_DEVICE void load_next(int stage) {
    if (loads.left > 0) {
      auto& s_keys = shared.stage[stage][team].keys;
      const int head = first_head(loads);
      copy_rows<Problem::paged_k, Problem::head_dim_qk>(s_keys.k, p.k, p.k_pages,
                                                        head / p.heads_per_k, 0);
      copy_rows<Problem::paged_v, Problem::head_dim_v>(s_keys.v, p.v, p.v_pages,
                                                       head / p.heads_per_v, 16);
      loads.advance();
      look_up();
    }
    cp_async_commit();
  }

 private:
  // The first of 16 keys of this warp.
  DLATTN_DEVICE int first_loaded(const Tiles& at) const { return first_key(at) + 16 * row_group; }

  // Lanes find the pages of their rows, so early that copies need not wait: those of keys in the lower
  // half of the warp, those of values in the upper one.
  DLATTN_DEVICE void look_up() {
    if constexpr (paged) {
#pragma unroll
      for (int i = 0; i + 1 < looked_up; ++i) pages[i] = pages[i + 1];
      if (found.left > 0) {
        pages[looked_up - 1] = page_of_lane(found);
        found.advance();
      }
    }
  }
  DLATTN_DEVICE int page_of_lane(const Tiles& at) const {
    const bool of_values = Problem::paged_v && (!Problem::paged_k || threadIdx.x % 32 >= 16);
    const PageTableRef& table = of_values ? p.v_pages : p.k_pages;
    const int key = first_loaded(at) + threadIdx.x % 16;
    return key < at.keys.last ? table.number(table.entries(at.batch), key) : -1;
  }

  // 16 keys or values of this warp, by all lanes together.
  template <bool is_paged, int columns, class Tile>
  DLATTN_DEVICE void copy_rows(Tile& s_tile, const TensorRef& tensor, const PageTableRef& table,
                               int head, int first_lane) {
    const int lane = threadIdx.x % 32;
    const int first = first_loaded(loads), page = pages[0];
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
