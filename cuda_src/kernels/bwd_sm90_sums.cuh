// The sums of dQ over key tiles, in global memory: they exist for a few pairs of batch entry and group of
// heads at a time, so that they stay in L2. Blocks add to them, and count. A complete sum is stored as dQ,
// and zeros are left, by a block that begins some time later: its query worker does it beside its own
// work, some rows and columns a step. All workers store the rest in blocks that nobody follows.
//
// A writer, one warp, hands the query worker's pieces to the copy engine, which adds them: reductions
// from registers would hold up all other warps' shared memory until the queue to L2 has room. A counter,
// another one, tells other blocks what has been added: a release takes as long as a third of a step.
// Of both, one lane gives the orders.
#pragma once

#include "kernels/bwd_sm90_loads.cuh"
#include "ptx/convert.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/quad.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Sums : BwdSm90Loads<Problem, Tiling> {
  using Base = BwdSm90Loads<Problem, Tiling>;
  using Base::Base;
  using Base::dim_qk;
  using Base::dq_columns;
  using Base::dq_pieces;
  using Base::dq_slots;
  using Base::first_head;
  using Base::length;
  using Base::p;
  using Base::shared;
  using Base::tile_k;
  using Base::tile_q;
  using Base::work;
  using typename Base::DQPiece;
  using typename Base::DQRows;
  using typename Base::T;

  // ---- Who adds to a sum ----

  // The key tiles that add to a query tile.
  DLATTN_DEVICE Interval visitors(int tile, const Lengths& lengths) const {
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, lengths.q)};
    if (queries.empty()) return {0, 0};
    const Interval attended = Problem::Mask::keys(queries, lengths, p);
    if (attended.empty()) return {0, 0};
    return {attended.first / tile_k, ceil_div(attended.last, tile_k)};
  }

  // In a fixed order of additions, those of blocks launched before this one come before: of later keys
  // (last_keys_first), or of earlier ones. Blocks start at the diagonal, where later keys meet a query
  // first, so that hardly one waits.
  static constexpr bool last_keys_first = Problem::deterministic && Problem::Mask::bounded_right;
  DLATTN_DEVICE int turn(int tile) const {
    const Interval all = visitors(tile, length);
    return last_keys_first ? all.last - 1 - work.tile : work.tile - all.first;
  }

  // What the block of this index does.
  static DLATTN_DEVICE WorkItem work_item(int block, const Params& p) {
    constexpr auto order = last_keys_first ? longest_first : first_first;
    return order(block, ceil_div(p.seq_kv, tile_k), p.heads_q / p.heads_per_block, p);
  }

  // ---- Where the sums are ----

  DLATTN_DEVICE int pair(WorkItem item) const {
    return Base::pair(p, item.batch, item.head * p.heads_per_block);
  }
  DLATTN_DEVICE int query_tiles_per_pair() const {
    return p.heads_per_block * ceil_div(p.seq_q, tile_q);
  }
  DLATTN_DEVICE DQPiece* sum(int sum_tile) const {
    return reinterpret_cast<DQPiece*>(Base::dq_accum(p, sum_tile));
  }

  static DLATTN_DEVICE bool gives_orders() { return threadIdx.x % 32 == 0; }

  // ---- The writer ----

  // Additions are counted a step late, once they are surely done; in a fixed order at once, because
  // others wait for them.
  static constexpr bool counts_late = !Problem::deterministic;

  // The place of a pair's sums is its own: the pair that had it before has stored its dQ, and left zeros.
  DLATTN_DEVICE void await_place(WorkItem item) const {
    const int stored = pair(item) / p.dq_places * query_tiles_per_pair();
    while (load_acquire(p.dq_stored + pair(item) % p.dq_places) < stored) __nanosleep(100);
  }

  DLATTN_DEVICE void add_pieces() {
    Place<dq_slots> place;
    Place<2> counted;
    const auto count = [&] {
      mbarrier_wait(shared.sums_ring.empty[counted.stage], counted.parity ^ 1);
      release(shared.sums_ring.full[counted.stage]);
      counted.advance();
    };
    int pieces = 0;
    await_place(work);
    fence_proxy_async_global();
    for_each_sum([&](int at, int tile) {
      if constexpr (Problem::deterministic) {
        while (load_acquire(p.dq_arrivals + at) != turn(tile)) __nanosleep(20);
      }
#pragma unroll 1
      for (int piece = 0; piece < dq_pieces; ++piece) {
        mbarrier_wait(shared.dq_ring.full[place.stage], place.parity);
        if (gives_orders()) {
          bulk_reduce_add(sum(at) + piece, shared_address(&shared.dQ[place.stage]),
                          sizeof(DQPiece));
          tma_commit();
          tma_wait_read<dq_slots - 1>();
        }
        __syncwarp();
        // The slot of dq_slots - 1 pieces ago.
        if (++pieces >= dq_slots) release(shared.dq_ring.empty[(place.stage + 1) % dq_slots]);
        place.advance();
      }
      if (!counts_late || pieces > dq_pieces) {
        await_additions<counts_late ? dq_pieces : 0>();
        count();
      }
    });
    await_additions<0>();
    if (counts_late && pieces > 0) count();
  }

  // All but the last `pending` pieces are in their sums.
  template <int pending>
  DLATTN_DEVICE void await_additions() {
    if (gives_orders()) tma_wait<pending>();
    __syncwarp();
  }

  // Calls visit(sum, tile) for every step.
  template <class Visit>
  DLATTN_DEVICE void for_each_sum(Visit visit) {
    this->for_each_step([](int) {},
                        [&](int i, int tile) {
                          visit(Base::sum_tile(p, work.batch, first_head() + i, tile), tile);
                        });
  }

  // ---- The counter ----

  DLATTN_DEVICE void count_additions() {
    const int earlier = block_of_share();
    const WorkItem item = work_item(most(earlier, 0), p);
    bool freed = earlier < 0;
    if (!freed) {
      await_sums(item);
      release(shared.share_complete);
    }
    Place<2> place;
    for_each_sum([&](int at, int) {
      mbarrier_wait(shared.sums_ring.full[place.stage], place.parity);
      if (gives_orders()) add_release(p.dq_arrivals + at, 1);
      __syncwarp();
      release(shared.sums_ring.empty[place.stage]);
      place.advance();
      if (!freed && has_ended(shared.share_stored, 0)) {
        free_sums(item);
        freed = true;
      }
    });
    if (!freed) {
      mbarrier_wait(shared.share_stored, 0);
      free_sums(item);
    }
  }

  static DLATTN_DEVICE bool has_ended(uint64& barrier, uint32 parity) {
    return __all_sync(0xffffffffu, mbarrier_test(barrier, parity));
  }

  // ---- Shares: the query tiles of a pair, divided among its blocks in the order of their heads ----

  // This block stores the share of one so long ago that its sums are complete, or nearly so.
  DLATTN_DEVICE int block_of_share() const { return int(blockIdx.x) - p.dq_lag; }

  DLATTN_DEVICE Interval share(WorkItem item) const {
    const int tiles = query_tiles_per_pair(), each = ceil_div(tiles, ceil_div(p.seq_kv, tile_k));
    return {least(item.tile * each, tiles), least((item.tile + 1) * each, tiles)};
  }

  DLATTN_DEVICE int sum_tile_of(WorkItem item, int tile_of_pair) const {
    return Base::sum_tile(p, item.batch, item.head * p.heads_per_block, 0) + tile_of_pair;
  }

  // A warp waits until a share can be stored, or tells that it has been. Before the place is the pair's,
  // the counts there are another pair's.
  DLATTN_DEVICE void await_sums(WorkItem item) const {
    await_place(item);
    const Lengths lengths(p, item.batch);
    const Interval tiles = share(item);
    const int* arrivals = p.dq_arrivals + sum_tile_of(item, 0);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
      const Interval all = visitors(tile % ceil_div(p.seq_q, tile_q), lengths);
      while (load_acquire(arrivals + tile) != all.last - all.first) __nanosleep(100);
    }
    __syncwarp();
  }
  DLATTN_DEVICE void free_sums(WorkItem item) const {
    const Interval tiles = share(item);
    int* arrivals = p.dq_arrivals + sum_tile_of(item, 0);
    if (gives_orders()) {
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) arrivals[tile] = 0;
      add_release(p.dq_stored + pair(item) % p.dq_places, tiles.last - tiles.first);
    }
    __syncwarp();
  }

  // This warp's rows of a piece of a pair's sums.
  DLATTN_DEVICE DQRows& sum_rows(WorkItem item, int piece_of_pair) const {
    DQPiece* pieces = sum(sum_tile_of(item, piece_of_pair / dq_pieces));
    return pieces[piece_of_pair % dq_pieces].warp[Base::warp_of_group()];
  }

  // Stores rows of dQ; leaves zeros in the sum. load(n) is this lane's part of columns [8 n, 8 n + 8).
  template <class Load>
  DLATTN_DEVICE void store_rows(WorkItem item, int piece_of_pair, Load load) const {
    constexpr int per_row = dim_qk / dq_columns;
    const int tile_of_pair = piece_of_pair / dq_pieces, piece = piece_of_pair % dq_pieces;
    const int tiles_per_head = ceil_div(p.seq_q, tile_q), tile = tile_of_pair % tiles_per_head;
    const int head = item.head * p.heads_per_block + tile_of_pair / tiles_per_head;
    const int lane = threadIdx.x % 32;
    const int query = tile * tile_q + piece / per_row * 64 + Base::first_row_of_warp() + lane / 4;
    const int column = piece % per_row * dq_columns + lane % 4 * 8;
    T* g_dq = p.dQ.template rows<T>(item.batch, head, query) + column;
    const float factor = Problem::Score::gradient_factor(ScoreValues(p));
    DQRows& g_rows = sum_rows(item, piece_of_pair);
#pragma unroll
    for (int first = 0; first < dq_columns / 8; first += 4) {
      float4 values[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) values[n] = load(first + n);
#pragma unroll
      for (int n = 0; n < 4; ++n) g_rows.at[first + n][lane] = float4{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 row[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float4 v = values[n];
          row[n] = half == 0 ? Convert<T>::pack(v.x * factor, v.y * factor)
                             : Convert<T>::pack(v.z * factor, v.w * factor);
        }
        transpose_quad(row);
        if (query + 8 * half < p.seq_q && column + 8 * first < Problem::head_dim_qk) {
          *reinterpret_cast<uint4*>(g_dq + 8 * half * p.dQ.row + 8 * first) =
              uint4{row[0], row[1], row[2], row[3]};
        }
      }
    }
  }

  // A warp's walk through the pieces of the share, each copied into shared memory first.
  struct ShareWalk {
    int next, ordered, last;  // pieces of the pair: to be stored, to be copied, end
    uint32 parity;            // of the next one's landing
  };

  DLATTN_DEVICE ShareWalk begin_share(WorkItem item) {
    const Interval tiles = share(item);
    const int first = tiles.first * dq_pieces;
    if (block_of_share() < 0) return {first, first, first, 0};
    if (tiles.empty()) release(shared.share_stored);
    return {first, first, tiles.last * dq_pieces, 0};
  }

  DLATTN_DEVICE DQRows& landing() {
    if constexpr (Base::share_in_slot) {
      return shared.dQ[0].warp[Base::warp_of_group()];
    } else {
      return shared.share.warp[Base::warp_of_group()];
    }
  }

  // Goes on with the share as far as it can without waiting.
  DLATTN_DEVICE void continue_share(ShareWalk& walk, WorkItem item) {
    if (walk.next == walk.last) return;
    uint64& landed = shared.share_landed[Base::warp_of_group()];
    if (walk.next < walk.ordered && has_ended(landed, walk.parity)) {
      DQRows& rows = landing();
      store_rows(item, walk.next, [&](int n) { return rows.at[n][threadIdx.x % 32]; });
      fence_proxy_async();
      __syncwarp();
      walk.parity ^= 1;
      if (++walk.next == walk.last) return release(shared.share_stored);
    }
    if (walk.next == walk.ordered && has_ended(shared.share_complete, 0)) {
      ++walk.ordered;
      const DQRows& g_rows = sum_rows(item, walk.next);
      const uint32 rows = shared_address(&landing());
      if (gives_orders()) {
        fence_proxy_async_global();
        mbarrier_arrive_expect(landed, sizeof(DQRows));
        bulk_load(rows, &g_rows, sizeof(DQRows), landed);
      }
      __syncwarp();
    }
  }

  // The query worker: its first thread also asks, at the end, whether all blocks have begun.
  DLATTN_DEVICE void count_block() const {
    if (Base::warp_of_group() == 0 && gives_orders()) add_release(p.blocks_begun, 1);
    __syncwarp();
  }

  // All workers: if no block begins any more, shares that no block will begin for.
  DLATTN_DEVICE void store_rest() {
    const int worker = Base::warpgroup_index() - 1;
    const int blocks = gridDim.x, first = blocks - least(blocks, p.dq_lag);
    const bool tells = worker == 0 && Base::warp_of_group() == 0;
    while (true) {
      if (tells) {
        int block = blocks;
        if (gives_orders() && load_acquire(p.blocks_begun) == blocks) {
          block = first + fetch_add(p.blocks_begun + 1, 1);
        }
        block = uniform(block);
        if (block < blocks) await_sums(work_item(block, p));
        if (gives_orders()) shared.next_share = block;
        __syncwarp();
      }
      named_barrier_sync(Base::share_told, 128 * 3);
      const int block = uniform(shared.next_share);
      if (block >= blocks) return;
      const WorkItem item = work_item(block, p);
      const Interval tiles = share(item);
#pragma unroll 1
      for (int piece = tiles.first * dq_pieces + worker; piece < tiles.last * dq_pieces;
           piece += 3) {
        DQRows& g_rows = sum_rows(item, piece);
        store_rows(item, piece,
                   [&](int n) { return load_relaxed(&g_rows.at[n][threadIdx.x % 32]); });
      }
      named_barrier_sync(Base::share_stored, 128 * 3);
      if (tells) free_sums(item);
    }
  }
};

}  // namespace dlattn
