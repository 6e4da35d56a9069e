// What the warpgroups of a Hopper backward block share.
#pragma once

#include "attn/mask.cuh"
#include "attn/paged_boxes.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "kernels/bwd_key_sums.cuh"
#include "ptx/cluster.cuh"
#include "ptx/opaque.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"

namespace dlattn {

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedBwdParams {
  // Boxes: a block's part of tile_q, of tile_k, of tile_k, of tile_q rows; of pages, fewer
  // (attn/paged_boxes.cuh).
  TensorMap q, k, v, dO;
  TensorMap bias;  // tile_q rows, or one; if it is staged
  Params p;
};

template <class Problem, class Tiling>
struct BwdSm90Block : BwdShapes<Problem, Tiling> {
  using Shapes = BwdShapes<Problem, Tiling>;
  using T = typename Shapes::T;
  using Shapes::dim_qk;
  using Shapes::dim_v;
  using Shapes::tile_k;
  using Shapes::tile_q;
  // Blocks that share an item: each has some of its keys, and computes some columns of dQ.
  static constexpr int cluster = Tiling::cluster, block_k = tile_k / cluster;
  static constexpr bool by_product = Tiling::by_product;
  static constexpr int stages = Tiling::stages, do_stages = Tiling::do_stages;
  static constexpr int ds_stages = Tiling::ds_stages;
  static constexpr int dq_slots = Tiling::dq_slots;
  static constexpr int share_slots = Tiling::share_slots;
  // Nobody adds to sums of dQ (bwd_sm90_relay.cuh): items may hand parts on, or, as in every ragged problem
  // that relays, one tile has all keys.
  static constexpr bool relays = Tiling::relays, hands_on = relays && !Problem::ragged;
  // Of a block; that work on keys: on dK and dV; and those of them that make dS.
  static constexpr int warps = 16, key_warps = 8, ds_warps = by_product ? 4 : 8;

  // Of head dimensions, what products are summed over, and how wide their results are: as wgmma has
  // them. dQ has whole pieces, and the copy engine moves whole slabs.
  static constexpr int steps_qk = round_up(Problem::head_dim_qk, 16);
  static constexpr int steps_v = round_up(Problem::head_dim_v, 16);
  static constexpr int width_qk = result_width<Problem>(Problem::head_dim_qk);
  static constexpr int width_v = result_width<Problem>(Problem::head_dim_v);

  using QTile = SlabTile<T, tile_q, steps_qk>;
  using DOTile = SlabTile<T, tile_q, steps_v>;
  using KTile = SlabTile<T, block_k, steps_qk>;
  using VTile = SlabTile<T, block_k, steps_v>;
  using DSTile = SlabTile<T, tile_q, tile_k>;
  using BiasTile = StagedTile<typename Problem::Score::StagedBias, tile_q, tile_k>;
  // dQ of 64 queries is computed 64 columns at a time, and added to its sum a piece at a time.
  static constexpr int piece_columns = Tiling::piece_columns;
  static constexpr int dq_pieces = tile_q / 64 * (dim_qk / piece_columns);
  // Of those, this block's, and their columns: whole slabs first, then what is left; and how many are
  // computed at a time.
  static constexpr int own_pieces = dq_pieces / cluster, own_columns = dim_qk / cluster;
  static constexpr int slab_columns = own_columns / 64 * 64;
  static constexpr int product_columns =
      Tiling::query_registers >= 40 + own_columns / 2 ? own_columns : 64;
  static_assert(own_pieces % dq_slots == 0 && own_columns % piece_columns == 0);
  static_assert(cluster == 1 || (cluster == 2 && by_product && tile_q == 64 && block_k == 64));

  // Whether elected lanes order copies: in clusters, ptxas has no register for that.
  static constexpr bool elects = cluster == 1;

  struct Nothing {};

  // What all roles are told of an item: the divisions and masks that it follows from are instructions that
  // each of them would have to fetch anew. In a cluster, only its number travels.
  struct TellNumber {
    int number;
  };
  struct TellShift : TellNumber {
    int shift;
  };
  static_assert(!corner_as_given || !Problem::ragged);
  struct TellItem : Either<corner_as_given, TellShift, TellNumber> {
    WorkItem item;
    int length_q, length_kv;
  };
  struct TellTiles : TellItem {
    Interval tiles;  // of queries
  };
  // In a ragged problem more lies in memory, where each role would wait for it in every step: whatever a
  // block looks for what others have added leaves nothing in L1.
  struct alignas(8) TellRagged : TellItem {
    int bundle;
    int first_sum;  // of the first head's first query tile
    RaggedEntry entry;
    MappedEntry mapped[mapped_tensors];
    T *dK, *dV;  // where the entry's begin
  };
  struct TellRelayed : TellRagged {
    T* dQ;  // where that of the item's first head begins
  };
  using OfGroup = Either<relays, TellRelayed, TellRagged>;
  struct TellPartOfGroup : OfGroup {
    float* key_sums;  // of dK and dV
  };
  // All items of a ragged problem have some heads of a group.
  static constexpr bool parts_of_groups = Tiling::adds_keys && Problem::ragged;
  static constexpr bool tells_items = cluster == 1;
  static constexpr bool tells_tiles = tells_items && !Problem::ragged;
  static_assert(tells_items || (!Problem::ragged && !Tiling::adds_keys));
  using OfRagged = Either<parts_of_groups, TellPartOfGroup, OfGroup>;
  using OfOthers = Either<tells_tiles, TellTiles, TellNumber>;
  using Told = Either<Problem::ragged, OfRagged, OfOthers>;

  // The other block's keys, in the slabs that have the columns of this block's dQ.
  using OtherKTile = SlabTile<T, block_k, own_columns>;
  struct KeysOfOther {
    OtherKTile other_k[1];
  };

  // A query tile of a head, as the walk over heads that share keys and values meets it.
  struct alignas(16) Step {
    int head, tile;
    bool last, masked;  // of the walk; some of its scores do not exist, or are masked
  };

  // What the worker on values sends to the worker on keys: 16 words a thread, at its own place.
  struct Weights {
    uint4 at[block_k / 64][tile_q / 16][128];
  };

  // A warp's 16 rows of a piece of dQ, as its accumulators are; four of them are a piece, and a sum is
  // made of pieces.
  struct alignas(128) DQRows {
    float4 at[piece_columns / 8][32];  // 8 columns, lane
  };
  struct DQPiece {
    DQRows warp[4];
  };

  // An earlier item's share of dQ: some query tiles of its pair.
  struct PlainShare {
    DQPiece* sums;
    int batch, group;  // of heads
    int tile, pieces;  // the first tile, of all heads of the pair; how many pieces there are
  };
  // And what memory says of its batch entry.
  struct RaggedShare : PlainShare {
    T* dQ;  // where the entry begins
    int bundle, query_tiles;
    int length_q, length_kv;
    int bundled_tiles;  // of the bundle
  };
  using Share = Either<Problem::ragged, RaggedShare, PlainShare>;

  struct SharedMemory : Either<cluster == 1, Nothing, KeysOfOther> {
    KTile k[1];
    VTile v[1];
    QTile q[stages];
    DOTile dO[do_stages];
    DSTile dS[ds_stages];
    // Come with q. memcheck takes what a product reads of them twice for twice as much memory, so they
    // are not the last.
    alignas(128) float row_stats[stages][Shapes::stats_words];
    DQPiece dQ[dq_slots];
    Either<share_slots == 0, Nothing, DQPiece> share_pieces[most(share_slots, 1)];
    Either<Problem::Score::stages_bias, BiasTile, Nothing> bias[stages];  // comes with q
    Either<by_product, Weights, Nothing> weights[ds_stages];
    Step steps[stages];  // what is in q
    Ring<2> item_ring;
    Told items[2];  // that all roles are told to do; none_left at the end
    Ring<1> k_ring, v_ring;
    Either<cluster == 1, Nothing, Ring<1>> other_k_ring;  // of one reader, the query worker
    Ring<stages> q_ring;
    Ring<do_stages> do_ring;
    Ring<ds_stages> ds_ring;                     // from the key workers to the query worker
    Ring<dq_slots> dq_ring;                      // from the query worker to the writer
    Ring<ds_stages> weights_ring[block_k / 64];  // between the key workers, of each 64 keys
    Ring<2> sums_ring;                           // from the writer to the counter
    Ring<2> rest_ring;                           // from the query worker to the key workers
    Either<relays, Ring<most(share_slots, 1)>, Nothing> parts_ring;  // from the copy engine
    int sums_added[2];  // what a step has been added to
    uint64 landed[2];   // what a loader is to clear
    uint64 share_complete, share_stored;
    uint64 share_landed[most(share_slots, 1)][4];  // of each warp
    Share share, rest[2];                          // that goes with the item; that go with none
    Either<Problem::ragged, int, Nothing> item_count;
  };

  // Named barriers, by event.
  enum Barrier {
    ds_staged = 1,
  };

  const MappedBwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const int round;  // items that this block had before

  DLATTN_DEVICE BwdSm90Block(const MappedBwdParams& params, SharedMemory& shared_memory,
                             int items_before)
      : m(params), p(params.p), shared(shared_memory), round(items_before) {}

  // In a fixed order of additions, those of items taken before this one come before: of later keys
  // (last_keys_first), or of earlier ones. Items start at the diagonal, where later keys meet a query
  // first, so that hardly one waits.
  static constexpr bool last_keys_first =
      Problem::deterministic && Problem::Mask::bounded_right && !relays;

  // What the item of this number is; not of a ragged problem.
  static DLATTN_DEVICE WorkItem work_item(int item, const Params& p) {
    constexpr auto order = last_keys_first ? longest_first : first_first;
    return order(item, ceil_div(rows_of_gradients<Problem>(p), tile_k), p);
  }
  static DLATTN_DEVICE int item_count(const Params& p, const SharedMemory& shared) {
    if constexpr (Problem::ragged) return uniform(shared.item_count);
    return ceil_div(rows_of_gradients<Problem>(p), tile_k) * p.items.heads.number * p.batch;
  }

  // Blocks take items and, of those that are in parts, these: one after another.
  static DLATTN_DEVICE int part_count(const Params& p, const SharedMemory& shared) {
    const int items = item_count(p, shared);
    if constexpr (!Tiling::adds_keys || parts_of_groups) return items;
    return items + (items - p.whole_items) * (p.items.parts.number - 1);
  }
  static DLATTN_DEVICE int item_of_part(int number, const Params& p) {
    if (!Tiling::adds_keys || number < p.whole_items) return number;
    return p.whole_items + p.items.parts.quotient(number - p.whole_items);
  }
  // Which of an item's queries a part has.
  static DLATTN_DEVICE Interval queries_of_part(Interval all, int number, const Params& p) {
    if (!Tiling::adds_keys || parts_of_groups || number < p.whole_items) return all;
    const Divisor& parts = p.items.parts;
    const int part = parts.rest(number - p.whole_items), count = all.last - all.first;
    return {all.first + parts.quotient(count * part),
            all.first + parts.quotient(count * (part + 1))};
  }

  // Of the item at work.
  DLATTN_DEVICE const Told& told() const { return shared.items[opaque(round) % 2]; }
  DLATTN_DEVICE int number() const { return told().number; }

  static DLATTN_DEVICE void init(SharedMemory& shared) {
    if (threadIdx.x == 0) {
      shared.item_ring.init(cluster * warps - 1);
      shared.k_ring.init(key_warps + 4);
      shared.v_ring.init(key_warps);
      shared.q_ring.init(key_warps * cluster);
      shared.do_ring.init(key_warps * cluster);
      if constexpr (cluster > 1) shared.other_k_ring.init(4);
      shared.ds_ring.init(4 * cluster, ds_warps);
      shared.dq_ring.init(1, 4);
      shared.sums_ring.init(1);
      shared.rest_ring.init(key_warps);
      if constexpr (relays) shared.parts_ring.init(4);
      mbarrier_init(shared.share_complete, 1);
      mbarrier_init(shared.share_stored, Tiling::shares_last ? key_warps : 4);
      for (auto& landed : shared.share_landed) {
        for (uint64& of_warp : landed) mbarrier_init(of_warp, 1);
      }
#pragma unroll
      for (auto& ring : shared.weights_ring) ring.init(4, 4);
#pragma unroll
      for (uint64& landed : shared.landed) mbarrier_init(landed, 1);
      fence_mbarrier_init();
    }
    if constexpr (cluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Of this block among those that share an item.
  static DLATTN_DEVICE int rank() {
    if constexpr (cluster == 1) return 0;
    return cluster_rank();
  }

  // Which column of dQ is a block's n-th.
  static DLATTN_DEVICE int column(int n, int block) {
    return n + block * (n < slab_columns ? dim_qk - slab_columns : own_columns - slab_columns);
  }

  // release(), whose lane holds no register during the walk before it.
  static DLATTN_DEVICE void release_after_walk(uint64& event) {
    if (opaque(threadIdx.x) % 32 == 0) mbarrier_arrive(event);
  }

  // A warp arrives on this barrier of one block, or of all.
  static DLATTN_DEVICE void release_in(int block, uint64& event) {
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_in_block(address_in_block(shared_address(&event), block));
    }
  }
  static DLATTN_DEVICE void release_in_all(uint64& event) {
    release(event);
    if constexpr (cluster > 1) release_in(1 - rank(), event);
  }

  // Computed anew where they are needed: a register costs more.
  static DLATTN_DEVICE int warpgroup_index() { return uniform(opaque(threadIdx.x) / 128); }
  static DLATTN_DEVICE int warp_of_group() { return uniform(opaque(threadIdx.x) / 32 % 4); }

  // Of 64, in an accumulator of the warpgroup.
  static DLATTN_DEVICE int first_row_of_warp() { return 16 * warp_of_group(); }

  // ---- Items ----

  static constexpr int none_left = -1;  // in the place of an item, or of a number of pieces

  // A lane each.
  static DLATTN_DEVICE void describe_ragged(Told& told, int item, const Params& p) {
    const int lane = threadIdx.x % 32;
    const int4 row = p.ragged.items[1 + item];
    if (lane < mapped_tensors) told.mapped[lane] = p.ragged.mapped[lane * p.batch + row.z];
    if (lane == mapped_tensors) {
      const RaggedEntry entry = p.ragged.entries[row.z];
      told.entry = entry;
      told.first_sum = Shapes::first_sum(p, entry, row.w, row.y * p.heads_per_block.number);
    }
    if (lane == mapped_tensors + 1) told.length_q = p.seq_len_q.at(row.z, p.seq_q);
    if (lane == mapped_tensors + 2) told.length_kv = p.seq_len_kv.at(row.z, p.seq_kv);
    if (lane == mapped_tensors + 3) {
      told.item = {row.x, row.y, row.z};
      told.bundle = row.w;
    }
    if (lane == mapped_tensors + 4) told.dK = p.dK.template rows<T, true>(row.z, 0, 0);
    if (lane == mapped_tensors + 5) told.dV = p.dV.template rows<T, true>(row.z, 0, 0);
    if constexpr (relays) {
      const int head = row.y * p.heads_per_block.number;
      if (lane == mapped_tensors + 6) told.dQ = p.dQ.template rows<T, true>(row.z, head, 0);
    }
    if constexpr (parts_of_groups) {
      const int head = p.heads_per_k.quotient(row.y * p.heads_per_block.number);
      if (lane == mapped_tensors + 7) {
        told.key_sums = KeySums<Problem, Tiling>::of_entry(p, row.z, head, row.x).g_first;
      }
    }
  }

  // The first warp of the first block: tells everyone of an item.
  template <class Kernel>
  static DLATTN_DEVICE void tell_item(SharedMemory& shared, int round, int item, const Params& p) {
    const auto place = place_of<2>(round);
    mbarrier_wait(shared.item_ring.empty[place.stage], place.parity ^ 1);
    if constexpr (cluster == 1) {
      if (threadIdx.x % 32 == 0) shared.items[place.stage].number = item;
      if (item != none_left) Kernel::describe(shared.items[place.stage], item, p);
      __syncwarp();
      release(shared.item_ring.full[place.stage]);
    } else {
      const int block = threadIdx.x % 32;
      if (block < cluster) {
        const uint32 told = shared_address(&shared.items[place.stage]);
        const uint32 full = shared_address(&shared.item_ring.full[place.stage]);
        const uint32 landed = address_in_block(full, block);
        mbarrier_arrive_expect_in_block(landed, sizeof(int));
        store_in_block(address_in_block(told, block), item, landed);
      }
      __syncwarp();
    }
  }
  static DLATTN_DEVICE int told_item(SharedMemory& shared, int round) {
    const auto place = place_of<2>(round);
    mbarrier_wait(shared.item_ring.full[place.stage], place.parity);
    return uniform(shared.items[place.stage].number);
  }
  static DLATTN_DEVICE void end_item(SharedMemory& shared, int round) {
    __syncwarp();
    uint64& empty = shared.item_ring.empty[opaque(round) % 2];
    if constexpr (cluster == 1) {
      release(empty);
    } else {
      release_in(0, empty);
    }
  }

  // Of the first warp, its first lane has the answer. The first item is asked for, too: a block that
  // starts late, because other kernels are on its multiprocessor, must not have one that blocks wait for.
  static DLATTN_DEVICE int ask_for_item(const Params& p) {
    return threadIdx.x == 0 && rank() == 0 ? fetch_add(p.items_taken, 1) : 0;
  }

  // The first warp: takes items, tells everyone else, and calls work(kernel) for each.
  template <class Kernel, class Work>
  static DLATTN_DEVICE void take_items(int first, const MappedBwdParams& m, SharedMemory& shared,
                                       Work work) {
    const bool takes = rank() == 0;
    int item = takes ? uniform(first) : none_left;
    if constexpr (Problem::ragged) {
      if (threadIdx.x % 32 == 0) shared.item_count = m.p.ragged.items[0].x;
      __syncwarp();
    }
#pragma unroll 1
    for (int round = 0;; ++round) {
      if (takes) {
        if (item >= part_count(m.p, shared)) item = none_left;
        tell_item<Kernel>(shared, round, item, m.p);
      }
      if constexpr (cluster > 1) item = told_item(shared, round);
      if (item == none_left) return;
      Kernel kernel(m, shared, round);
      work(kernel);
      if (takes) {
        item = uniform(ask_for_item(m.p));
      } else {
        end_item(shared, round);
      }
    }
  }

  // Every other warp.
  template <class Kernel, class Work>
  static DLATTN_DEVICE void for_each_item(const MappedBwdParams& m, SharedMemory& shared,
                                          Work work) {
#pragma unroll 1
    for (int round = 0;; ++round) {
      if (told_item(shared, round) == none_left) return;
      Kernel kernel(m, shared, round);
      work(kernel);
      end_item(shared, round);
    }
  }
};

}  // namespace dlattn
