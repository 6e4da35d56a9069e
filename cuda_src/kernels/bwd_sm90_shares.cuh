// The sums of dQ over key tiles, in global memory: they exist for a few pairs of batch entry and group of
// heads at a time, so that they stay in L2. Blocks add to them, and count. A complete sum is stored as dQ,
// and zeros are left, with an item some time later: its query worker does it beside its own work, a piece
// a step, or, where steps are few, its key workers do after theirs. All workers store what goes with no item, when none is left.
#pragma once

#include "attn/walk.cuh"
#include "kernels/bwd_sm90_block.cuh"
#include "ptx/convert.cuh"
#include "ptx/tma.cuh"
#include "tile/quad.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Shares : BwdSm90Block<Problem, Tiling> {
  using Base = BwdSm90Block<Problem, Tiling>;
  using Base::Base;
  using Base::dim_qk;
  using Base::dq_pieces;
  using Base::none_left;
  using Base::p;
  using Base::piece_columns;
  using Base::share_slots;
  using Base::shared;
  using Base::tile_k;
  using Base::tile_q;
  using typename Base::DQPiece;
  using typename Base::DQRows;
  using typename Base::Share;
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

  // How often their blocks add, to a query tile of those of a pair, its heads one after the other.
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
  static constexpr bool adds_steps_alone = counts_additions<Problem>;
  DLATTN_DEVICE int additions(int batch, int first_head, int tile_of_pair, Interval all) const {
    if constexpr (!adds_steps_alone) return (all.last - all.first) * Base::cluster;
    return p.dq_additions[Base::row_tile(p, batch, first_head, tile_of_pair)] * Base::cluster;
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

  static constexpr int end_of_item = -1;  // in the place of a sum

  // The place of a pair's sums, or a bundle's, is its own: what had it before has stored its dQ, and
  // left zeros.
  DLATTN_DEVICE void await_place(WorkItem item) const { await_place(pair(item)); }
  DLATTN_DEVICE void await_own_place(WorkItem item) const {
    if constexpr (Problem::ragged) {
      await_place(this->told().bundle);
    } else {
      await_place(item);
    }
  }
  DLATTN_DEVICE void await_place(int pair) const {
    const int stored = pair / p.dq_places * query_tiles_per_pair();
    if (stored == 0) return;
    while (load_acquire(p.dq_stored + pair % p.dq_places) < stored) __nanosleep(100);
  }

  // ---- The counter ----

  // Which item's share goes with a part, if not a negative number.
  DLATTN_DEVICE int share_beside(int number) const {
    const int share = number - p.dq_lag;
    return Tiling::adds_keys && share >= p.lone_shares ? -1 : share;
  }

  DLATTN_DEVICE void count_additions() {
    // With an item goes the share of one so long ago that its sums are complete, or nearly so.
    if constexpr (Problem::ragged) {
      const auto& told = this->told();
      const int tiles = most(1, ceil_div(told.length_kv, tile_k));
      const Interval groups = told.entry.groups_of(told.bundle, p.heads_q / p.heads_per_block);
      const int part = (told.item.head - groups.first) * tiles + told.item.tile;
      prepare_ragged_share(shared.share, told.bundle - p.dq_lag, part,
                           (groups.last - groups.first) * tiles);
    } else {
      prepare_share(shared.share, [&] { return share_beside(this->number()); }, {Base::rank()});
    }
    release(shared.share_complete);
    uint32 told = 0;  // a multiple of four in an item: its first message always has the same place
    bool more = true;
    while (more) {
      // One release for as many as wait.
      const int first = listen(told);
      const int second = first != end_of_item && is_told(told) ? listen(told) : first;
      more = second != end_of_item;
      const bool two = more && second != first;
      if (gives_orders() && first != end_of_item) {
        if (two) {
          fence_gpu();
          add_relaxed(p.dq_arrivals + second, 1);
          add_relaxed(p.dq_arrivals + first, 1);
        } else {
          add_release(p.dq_arrivals + first, 1);
        }
      }
      __syncwarp();
    }
    while (told % 4 != 0) listen(told);
    mbarrier_wait(shared.share_stored, this->round % 2);
    if (is_counted(shared.share)) free_sums(shared.share);
  }

  // What the writer tells: a sum that has been added to, or end_of_item.
  DLATTN_DEVICE int listen(uint32& told) const {
    const auto place = place_of<2>(told++);
    mbarrier_wait(shared.sums_ring.full[place.stage], place.parity);
    const int added = uniform(shared.sums_added[place.stage]);
    release(shared.sums_ring.empty[place.stage]);
    return added;
  }
  DLATTN_DEVICE bool is_told(uint32 told) const {
    const auto place = place_of<2>(told);
    return has_ended(shared.sums_ring.full[place.stage], place.parity);
  }

  static DLATTN_DEVICE bool has_ended(uint64& barrier, uint32 parity) {
    return __all_sync(0xffffffffu, mbarrier_test(barrier, parity));
  }

  // ---- Shares: the query tiles of a pair, divided among its items, and their blocks, in the order of
  // their heads ----

  // Which of an item's shares, one for each block, or which of so many parts of one.
  struct SharePart {
    int block, part = 0, parts = 1;
  };
  DLATTN_DEVICE Interval share(WorkItem item, SharePart of) const {
    const int tiles = query_tiles_per_pair();
    const int shares = ceil_div(rows_of_gradients<Problem>(p), tile_k) * Base::cluster;
    const Interval whole = part_of({0, tiles}, item.tile * Base::cluster + of.block, shares);
    return part_of(whole, of.part, of.parts);
  }
  static DLATTN_DEVICE Interval part_of(Interval whole, int part, int parts) {
    const int each = ceil_div(whole.last - whole.first, parts);
    const int first = least(whole.first + part * each, whole.last);
    return {first, least(first + each, whole.last)};
  }

  DLATTN_DEVICE int sum_tile_of(WorkItem item, int tile_of_pair) const {
    return Base::sum_tile(p, item.batch, item.head * p.heads_per_block, 0) + tile_of_pair;
  }

  // A warp waits until a share can be stored. Before the place is the pair's, the counts there are
  // another pair's.
  DLATTN_DEVICE void await_sums(WorkItem item, SharePart of) const {
    await_place(item);
    const Lengths lengths(p, item.batch);
    const Interval tiles = share(item, of);
    const int first = sum_tile_of(item, 0);
#pragma unroll 1
    for (int tile = tiles.first + opaque(threadIdx.x) % 32; tile < tiles.last; tile += 32) {
      const Interval all = visitors(tile % ceil_div(p.seq_q, tile_q), lengths);
      const int count = additions(item.batch, item.head * p.heads_per_block, tile, all);
      while (load_acquire(p.dq_arrivals + first + tile) != count) __nanosleep(100);
    }
    __syncwarp();
  }
  static DLATTN_DEVICE bool is_counted(const Share& share) {
    return share.pieces > 0 || (Problem::ragged && share.tile == 0);
  }
  // What a share adds to the stored tiles of its place. Every place is counted as full: the first
  // share has those tiles that do not exist.
  DLATTN_DEVICE int counted_tiles(const Share& share, int tiles) const {
    if constexpr (Problem::ragged) {
      if (share.tile == 0) return tiles + query_tiles_per_pair() - share.bundled_tiles;
    }
    return tiles;
  }
  DLATTN_DEVICE int query_tiles_of(const Share& share) const {
    if constexpr (Problem::ragged) {
      return share.query_tiles;
    } else {
      return ceil_div(p.seq_q, tile_q);
    }
  }
  DLATTN_DEVICE int pair_of(const Share& share) const {
    if constexpr (Problem::ragged) {
      return share.bundle;
    } else {
      return Base::pair(p, share.batch, share.first_head);
    }
  }
  // A warp tells that a share has been stored.
  DLATTN_DEVICE void free_sums(const Share& share) const {
    const int tiles = share.pieces / dq_pieces;
    const int pair = pair_of(share);
    int* arrivals = p.dq_arrivals + Base::slot(p, pair, 0, share.tile);
    if (gives_orders()) {
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) arrivals[tile] = 0;
      add_release(p.dq_stored + pair % p.dq_places, counted_tiles(share, tiles));
    }
    __syncwarp();
  }

  // A warp describes an item's share once it can be stored; there is none of items before the first.
  template <class Number>
  DLATTN_DEVICE void prepare_share(Share& described, Number number, SharePart of) {
    if (number() < 0) {
      if (gives_orders()) described.pieces = 0;
      return __syncwarp();
    }
    await_sums(Base::work_item(number(), p), of);
    const WorkItem item = Base::work_item(number(), p);
    const Interval tiles = share(item, of);
    if (gives_orders()) {
      described = {sum(sum_tile_of(item, tiles.first)), item.batch, item.head * p.heads_per_block,
                   tiles.first, most(tiles.last - tiles.first, 0) * dq_pieces};
    }
    __syncwarp();
  }

  // The same in ragged problems, whose bundles differ in items and in tiles: those of a bundle are
  // divided among the items of the bundle dq_lag later. What another share is not counted with has no
  // first tile.
  DLATTN_DEVICE void prepare_ragged_share(Share& described, int bundle, int part, int parts) {
    if (gives_orders()) {
      described.tile = -1;
      described.pieces = 0;
      if (bundle >= 0) {
        const int batch = p.ragged.bundles[bundle];
        const RaggedEntry entry = p.ragged.entries[batch];
        const Interval groups = entry.groups_of(bundle, p.heads_q / p.heads_per_block);
        described.dQ = p.dQ.template rows<T, true>(batch, 0, 0);
        described.bundle = bundle;
        described.query_tiles = entry.query_tiles;
        described.length_q = p.seq_len_q.at(batch, p.seq_q);
        described.length_kv = p.seq_len_kv.at(batch, p.seq_kv);
        const int heads = (groups.last - groups.first) * p.heads_per_block;
        const int tiles = heads * entry.query_tiles;
        const int each = ceil_div(tiles, parts), first = part * each;
        described.bundled_tiles = tiles;
        described.batch = batch;
        described.first_head = groups.first * p.heads_per_block;
        described.sums = sum(Base::slot(p, bundle, 0, first));
        if (part == 0 || first < tiles) {
          described.tile = first;
          described.pieces = (least(first + each, tiles) - first) * dq_pieces;
        }
      }
    }
    __syncwarp();
    if (uniform(described.pieces) == 0) return;
    await_place(bundle);
    const Lengths lengths = Lengths::of(p, described.length_q, described.length_kv);
    const int* arrivals = p.dq_arrivals + Base::slot(p, bundle, 0, described.tile);
#pragma unroll 1
    for (int i = opaque(threadIdx.x) % 32; i < described.pieces / dq_pieces; i += 32) {
      const int tile = (described.tile + i) % described.query_tiles;
      const Interval all = visitors(tile, lengths);
      const int count = additions(described.batch, described.first_head, described.tile + i, all);
      while (load_acquire(arrivals + i) != count) __nanosleep(100);
    }
    __syncwarp();
  }

  // A warp's rows of a piece of the share's sums.
  static DLATTN_DEVICE DQRows& sum_rows(const Share& share, int piece, int warp) {
    return share.sums[piece].warp[warp];
  }

  // Where the dQ of a head begins.
  struct HeadOfDQ {
    int rows;  // that are stored
    T* g_dq;
  };
  DLATTN_DEVICE HeadOfDQ head_of(const Share& share, int head) const {
    if constexpr (Problem::ragged) {
      return {share.length_q, share.dQ + head * p.dQ.head};
    } else {
      return head_of_dq(share.batch, head);
    }
  }
  DLATTN_DEVICE HeadOfDQ head_of_dq(int batch, int head) const {
    return {p.seq_q, p.dQ.template rows<T>(batch, head, 0)};
  }

  // Ragged problems of wide heads have registers for quotients of unsigned numbers alone, which take fewer;
  // in all others ptxas spills one by those, and none by quotients of signed ones.
  using Number = Either<Problem::ragged && (dim_qk > 64), uint32, int>;

  // Stores these rows as dQ, and leaves zeros in the sum, if its place will be another pair's. load(n)
  // is this lane's part of columns [8 n, 8 n + 8).
  template <bool leaves_zeros = true, class Load>
  DLATTN_DEVICE void store_rows(const Share& share, int piece_of_share, Load load) const {
    Number tile = share.tile + Number(piece_of_share) / dq_pieces, head = share.first_head;
    if (Problem::ragged || p.heads_per_block > 1) {
      const Number tiles_per_head = query_tiles_of(share);
      head += tile / tiles_per_head;
      tile %= tiles_per_head;
    }
    DQRows& g_rows = sum_rows(share, piece_of_share, Base::warp_of_group());
    store_piece(head_of(share, head), tile, piece_of_share % dq_pieces, load, [&](int n) {
      if constexpr (leaves_zeros) g_rows.at[n][threadIdx.x % 32] = float4{0.f, 0.f, 0.f, 0.f};
    });
  }

  // A warp's rows of a piece of a query tile's dQ. used(n): load(n) has been called.
  template <class Load, class Used>
  DLATTN_DEVICE void store_piece(HeadOfDQ head, int tile, int piece, Load load, Used used) const {
    constexpr int per_row = dim_qk / piece_columns;
    const int lane = Number(opaque(threadIdx.x)) % 32;  // anew: it holds no register between pieces
    const int query = tile * tile_q + piece / per_row * 64 + Base::first_row_of_warp() + lane / 4;
    // A piece that is all of a block's columns has them in that block's order.
    constexpr bool is_whole = Base::cluster > 1 && Base::own_pieces == 1;
    const int column = (is_whole ? 0 : piece % per_row * piece_columns) + lane % 4 * 8;
    const auto further = [=](int n) { return is_whole ? Base::column(8 * n, piece) : 8 * n; };
    T* g_dq = head.g_dq + query * p.dQ.row + column;
    const float factor = gradient_factor<Problem>(ScoreValues(p));
#pragma unroll
    for (int first = 0; first < piece_columns / 8; first += 4) {
      float4 values[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) values[n] = load(first + n);
#pragma unroll
      for (int n = 0; n < 4; ++n) used(first + n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 row[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float4 v = values[n];
          row[n] = half == 0 ? Convert<T>::pack(v.x * factor, v.y * factor)
                             : Convert<T>::pack(v.z * factor, v.w * factor);
        }
        transpose_quad(row, lane);
        if (query + 8 * half < head.rows && column + further(first) < Problem::head_dim_qk) {
          store_streaming(g_dq + 8 * half * p.dQ.row + further(first),
                          uint4{row[0], row[1], row[2], row[3]});
        }
      }
    }
  }

  // A warp's part of a piece of the sums, in registers.
  struct LoadedRows {
    float4 at[piece_columns / 8];
  };
  static DLATTN_DEVICE LoadedRows load_rows(const Share& share, int piece) {
    LoadedRows rows;
    const DQRows& g_rows = sum_rows(share, piece, Base::warp_of_group());
#pragma unroll
    for (int n = 0; n < piece_columns / 8; ++n) rows.at[n] = load_row(g_rows, n);
    return rows;
  }
  static DLATTN_DEVICE float4 load_row(const DQRows& g_rows, int n) {
    return load_relaxed(&g_rows.at[n][threadIdx.x % 32]);
  }

  // A warp's walk through the pieces of the item's share.
  struct ShareWalk {
    int next = 0, ordered = 0;  // pieces to be stored, to be copied
    int last = 0;               // their end; unknown while the share's sums are not complete
    uint32 copies = 0;          // stored by this block before, of all shares
    static constexpr int unknown = -1;

    DLATTN_DEVICE bool goes_on() const { return uniform(uint32(next) < uint32(last)) != 0; }
  };

  DLATTN_DEVICE void begin_share(ShareWalk& walk) {
    walk.next = walk.ordered = 0;
    walk.last = ShareWalk::unknown;
  }

  // Whether a piece can be stored.
  DLATTN_DEVICE bool has_piece(ShareWalk& walk) {
    if (walk.last == ShareWalk::unknown && has_ended(shared.share_complete, this->round % 2)) {
      walk.last = uniform(shared.share.pieces);
      if (walk.last == 0) release(shared.share_stored);
      __syncwarp();
    }
    return uniform(walk.next < walk.last) != 0;
  }
  DLATTN_DEVICE void end_piece(ShareWalk& walk) {
    __syncwarp();
    if (++walk.next == walk.last) release(shared.share_stored);
    __syncwarp();
  }

  // Stores a piece, if there is one, that is loaded while wait() waits for something else.
  template <class Wait>
  DLATTN_DEVICE void store_piece_beside(ShareWalk& walk, Wait wait) {
    if (!has_piece(walk)) return wait();
    const LoadedRows rows = load_rows(shared.share, walk.next);
    wait();
    store_rows(shared.share, walk.next, [&](int n) { return rows.at[n]; });
    end_piece(walk);
  }

  // Goes on, by way of shared memory, as far as it can without waiting.
  DLATTN_DEVICE void continue_share(ShareWalk& walk) {
    if (!has_piece(walk)) return;
    const int warp = Base::warp_of_group();
    if (walk.next < walk.ordered) {
      const auto place = place_of<share_slots>(walk.copies);
      if (has_ended(shared.share_landed[place.stage][warp], place.parity)) {
        DQRows& rows = shared.share_pieces[place.stage].warp[warp];
        store_rows(shared.share, walk.next, [&](int n) { return rows.at[n][threadIdx.x % 32]; });
        ++walk.copies;
        end_piece(walk);
      }
    }
    if (walk.ordered < walk.last && walk.ordered < walk.next + share_slots) {
      const int slot = (walk.copies + walk.ordered - walk.next) % share_slots;
      const DQRows& g_rows = sum_rows(shared.share, walk.ordered, warp);
      if (walk.ordered == 0) fence_proxy_async_global();
      if (gives_orders()) {
        uint64& landed = shared.share_landed[slot][warp];
        mbarrier_arrive_expect(landed, sizeof(DQRows));
        bulk_load(shared_address(&shared.share_pieces[slot].warp[warp]), &g_rows, sizeof(DQRows),
                  landed);
      }
      __syncwarp();
      ++walk.ordered;
    }
  }

  DLATTN_DEVICE void finish_share(ShareWalk& walk) {
#pragma unroll 1
    while (walk.goes_on()) {
      if constexpr (share_slots > 0) {
        continue_share(walk);
      } else {
        store_piece_beside(walk, [] {});
      }
    }
  }

  // What a key worker has asked for of a share, in eights of columns of its first piece: as much as there
  // are registers for beside dK and dV.
  struct RowsAhead {
    static constexpr int count = Base::cluster == 1 ? piece_columns / 16 : 0;
    float4 at[most(count, 1)];
    bool asked = false;
  };

  // The key workers, where they store shares, when the steps of an item are too few for it. L2 takes as
  // long to answer as dK and dV to be stored, so that they ask before, if it is known what for.
  DLATTN_DEVICE void ask_for_share(RowsAhead& ahead) const {
    const int piece = Base::warpgroup_index() - 2;
    if (RowsAhead::count == 0 || !has_ended(shared.share_complete, this->round % 2)) return;
    ahead.asked = uniform(piece < shared.share.pieces);
    if (!ahead.asked) return;
    const DQRows& g_rows = sum_rows(shared.share, piece, Base::warp_of_group());
#pragma unroll
    for (int n = 0; n < RowsAhead::count; ++n) ahead.at[n] = load_row(g_rows, n);
  }
  DLATTN_DEVICE void store_share(RowsAhead& ahead) {
    mbarrier_wait(shared.share_complete, this->round % 2);
    const int pieces = uniform(shared.share.pieces);
#pragma unroll 1
    for (int piece = Base::warpgroup_index() - 2; piece < pieces; piece += 2) {
      const DQRows& g_rows = sum_rows(shared.share, piece, Base::warp_of_group());
      LoadedRows rows;
#pragma unroll
      for (int n = 0; n < piece_columns / 8; ++n) {
        const bool is_there = n < RowsAhead::count && ahead.asked;
        rows.at[n] = is_there ? ahead.at[n] : load_row(g_rows, n);
      }
      ahead.asked = false;
      store_rows(shared.share, piece, [&](int n) { return rows.at[n]; });
    }
    __syncwarp();
    release(shared.share_stored);
  }

  // A share that goes with no item; where those are fewer than blocks, a part of one.
  DLATTN_DEVICE void prepare_rest(int taken) {
    bool exists;
    if constexpr (Problem::ragged) {
      const int bundles = p.ragged.items[0].y;
      const int parts = ceil_div(p.seq_kv, tile_k) * Base::cluster;
      const int bundle = bundles - least(bundles, p.dq_lag) + taken / parts;
      exists = bundle < bundles;
      if (exists) prepare_ragged_share(shared.rest, bundle, taken % parts, parts);
    } else {
      const int lone = Base::item_count(p, shared) - p.lone_shares;
      const int parts = most(1, int(gridDim.x) / (Base::cluster * most(1, lone)));
      const int share = taken / parts;  // of all blocks
      exists = share < lone * Base::cluster;
      if (exists) {
        const int number = p.lone_shares + share / Base::cluster;
        prepare_share(shared.rest, [=] { return opaque(number); },
                      {share % Base::cluster, taken % parts, parts});
      }
    }
    if (!exists && gives_orders()) shared.rest.pieces = none_left;
    __syncwarp();
  }

  // All workers, when no item is left: shares that go with no item. Nobody waits for their places. The
  // next share is asked for before this one is stored, because that there is none takes as long to hear;
  // but ragged problems have no register for the answer.
  template <bool tells>
  DLATTN_DEVICE void store_rest() {
    constexpr int workers = 3, at_once = tells ? 1 : 2;
    const bool asks = tells && Base::warp_of_group() == 0;
    const auto ask = [&] { return gives_orders() ? fetch_add(p.shares_taken, 1) : 0; };
    int taken = asks && !Problem::ragged ? ask() : 0;
    while (true) {
      if (asks) {
        if constexpr (Problem::ragged) taken = ask();
        prepare_rest(uniform(taken));
        if constexpr (!Problem::ragged) taken = ask();
      }
      named_barrier_sync(Base::share_told, 128 * workers);
      const int pieces = uniform(shared.rest.pieces);
      if (pieces == none_left) return;
      int piece = tells ? workers - 1 : Base::warpgroup_index() - 2;
#pragma unroll 1
      for (; piece < pieces; piece += workers * at_once) {
        LoadedRows rows[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int one = piece + workers * i;
          if (one < pieces) rows[i] = load_rows(shared.rest, one);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int one = piece + workers * i;
          if (one >= pieces) break;
          store_rows<false>(shared.rest, one, [&](int n) { return rows[i].at[n]; });
        }
      }
      named_barrier_sync(Base::share_stored, 128 * workers);
    }
  }
};

}  // namespace dlattn
