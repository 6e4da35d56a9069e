// What is where in a block of a decode, however keys and values reach it.
#pragma once

#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/shares.cuh"
#include "kernels/decode_products.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"

namespace dlattn {

// Whose an item is.
enum class ItemOf {
  all,      // each block has as many tiles as any other, of whichever items
  cluster,  // the blocks of a cluster divide its tiles
  block,
};

template <int warps_, int row_groups_, int stages_, bool warpgroups_, bool boxes_, ItemOf item_of>
struct DecodeTiling {
  static constexpr int warps = warps_;
  static constexpr int row_groups = row_groups_;   // of 16 rows, each of which a warp of a team has
  static constexpr int stages = stages_;           // of a team's ring: tiles of keys and values
  static constexpr bool warpgroups = warpgroups_;  // multiply together
  static constexpr bool boxes = boxes_;            // the copy engine brings keys and values
  static constexpr bool shares = item_of == ItemOf::all, clusters = item_of == ItemOf::cluster;
};

struct alignas(64) MappedDecodeParams {
  TensorMap k, v;  // boxes of 16 rows and 64 columns; if the copy engine brings them
  Params p;
};

template <class Problem, class Tiling>
struct DecodeBlock {
  using T = typename Problem::Element;
  static constexpr bool ragged = Problem::ragged;
  static constexpr bool paged = Problem::paged_k || Problem::paged_v;
  static constexpr int warps = Tiling::warps, stages = Tiling::stages;
  static constexpr int row_groups = Tiling::row_groups, teams = warps / row_groups;
  static constexpr int rows = 16 * row_groups;
  static constexpr int tile_k = 16 * row_groups;  // of a team
  static_assert(warps % row_groups == 0 && stages >= (Tiling::boxes ? 1 : 2));
  static_assert(!Tiling::warpgroups || row_groups % 4 == 0);

  template <template <class, int, int, int> class Kind>
  using ProductsOf = Kind<T, tile_k, Problem::head_dim_qk, Problem::head_dim_v>;
  using Products =
      Either<Tiling::warpgroups, ProductsOf<WarpgroupProducts>,
             Either<Tiling::boxes, ProductsOf<BoxedWarpProducts>, ProductsOf<WarpProducts>>>;
  static constexpr int dim_qk = Products::dim_qk, dim_v = Products::dim_v;
  // For more than products and what they must have: rows of wide heads leave few.
  static constexpr bool has_registers = dim_qk <= 128;
  using KTile = typename Products::KTile;
  using VTile = typename Products::VTile;
  using Tiles = Either<Tiling::shares, Share<typename Problem::Mask, teams * tile_k>,
                       ClusterShare<typename Problem::Mask, teams * tile_k>>;

  // Partial rows: exponentials times values, which are relative to a reference, and their sum. Columns
  // beyond dim_v are banks between rows.
  struct Part {
    float o[rows][dim_v + 8];
  };
  using RowSums = float2[teams][rows];  // the reference and the sum of each

  // What a block of a cluster sends to another one of eight columns of a row.
  struct alignas(16) Packet {
    static constexpr int bytes = 40;
    float o[8], reference, sum;
  };
  static constexpr int most_blocks = 8;
  struct Mailbox {
    Packet packets[rows * (Problem::head_dim_v / 8) + most_blocks];
    uint64 full;
  };

  // Where the block begins if sequences are full, which is known before lengths may be read.
  struct Beginning {
    const Tiles tiles;
    DLATTN_DEVICE explicit Beginning(const Params& p) : tiles(p) {}
  };

  const MappedDecodeParams& m;
  const Params& p;
  const int team, row_group;  // of this warp
  Tiles loads;                // where copies are

  // Lengths, offsets, page numbers and a scale are read at once, and kernels before may write them.
  static DLATTN_DEVICE bool reads_first(const Params& p) {
    return paged || ragged || p.seq_len_q.data != nullptr || p.seq_len_kv.data != nullptr ||
           p.attn_scale_device != nullptr;
  }

  DLATTN_DEVICE DecodeBlock(const MappedDecodeParams& params, const Tiles& first, int warp)
      : m(params),
        p(params.p),
        team(warp / row_groups),
        row_group(warp % row_groups),
        loads(first) {}

  // What is read first, queries, lengths and page numbers, is asked for while a kernel before may still write
  // it: L2 has what is current. Where it is has then been found, too.
  static DLATTN_DEVICE void prefetch_first(const Params& p, const Tiles& first, int warp) {
    p.seq_len_q.prefetch(32 * threadIdx.x, p.batch);
    p.seq_len_kv.prefetch(32 * threadIdx.x, p.batch);
    if (!ragged && first.left > 0 && warp == 0) prefetch_queries(p, first);
    if (!has_full_tables(p) || first.left == 0 || warp != 0) return;
    const Interval rows = first.keys.rows(first.last_of_item(), first.tile);
    if constexpr (Problem::paged_k) {
      p.k_pages.prefetch_numbers(p.k_pages.unpacked_entries(first.batch), rows);
    }
    if constexpr (Problem::paged_v) {
      p.v_pages.prefetch_numbers(p.v_pages.unpacked_entries(first.batch), rows);
    }
  }
  // Tables have entries for full sequences, unless they are packed.
  static DLATTN_DEVICE bool has_full_tables(const Params& p) {
    return paged && (!Problem::paged_k || p.k_pages.offsets == nullptr) &&
           (!Problem::paged_v || p.v_pages.offsets == nullptr);
  }

  // A row of an item: a query of a head.
  struct Row {
    int query, head;  // head in the item's
  };
  static DLATTN_DEVICE Row row_of(const Params& p, int row) {
    return {p.heads_per_block.quotient(row), p.heads_per_block.rest(row)};
  }
  static DLATTN_DEVICE int shared_head(const Params& p, const Tiles& at, const Divisor& sharing) {
    return sharing.quotient(at.group() * p.heads_per_block.number);
  }
  static DLATTN_DEVICE void prefetch_queries(const Params& p, const Tiles& at) {
    constexpr int line = 64, lines = ceil_div(Problem::head_dim_qk, line);
    const int existing = at.length.q * p.heads_per_block.number * lines;
#pragma unroll 1
    for (int i = opaque(threadIdx.x); i < existing; i += 32) {  // no register during the walk
      const Row row = row_of(p, i / lines);
      const int head = at.group() * p.heads_per_block.number + row.head;
      prefetch_l2(p.q.template rows<T, ragged>(at.batch, head, row.query) + i % lines * line);
    }
  }

  DLATTN_DEVICE int first_head(const Tiles& at) const {
    return at.group() * p.heads_per_block.number;
  }
  DLATTN_DEVICE int first_key(const Tiles& at) const { return at.first_key() + team * tile_k; }
  // The first of 16 keys that this warp loads.
  DLATTN_DEVICE int first_loaded(const Tiles& at) const { return first_key(at) + 16 * row_group; }

  DLATTN_DEVICE void await_team() const { await(team); }
  static DLATTN_DEVICE void await(int team) {
    if constexpr (row_groups == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + team, 32 * row_groups);
    }
  }
};

}  // namespace dlattn
