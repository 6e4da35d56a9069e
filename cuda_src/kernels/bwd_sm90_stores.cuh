// Complete sums of dQ are stored, and zeros are left. An item's share is: by its query worker beside its own
// work, a piece a step, or, where steps are few, by its key workers after theirs. These also store what goes
// with no item, when none is left.
#pragma once

#include "kernels/bwd_sm90_shares.cuh"
#include "ptx/convert.cuh"
#include "ptx/tma.cuh"
#include "tile/quad.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Stores : BwdSm90Shares<Problem, Tiling> {
  using Base = BwdSm90Shares<Problem, Tiling>;
  using Base::Base;
  using Base::dim_qk;
  using Base::dq_pieces;
  using Base::gives_orders;
  using Base::has_ended;
  using Base::none_left;
  using Base::p;
  using Base::piece_columns;
  using Base::share_slots;
  using Base::shared;
  using Base::tile_q;
  using typename Base::DQRows;
  using typename Base::Share;
  using typename Base::T;

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

  // Stores these rows as dQ, and leaves zeros in the sum, if its place will be another pair's. load(n)
  // is this lane's part of columns [8 n, 8 n + 8).
  template <bool leaves_zeros = true, class Load>
  DLATTN_DEVICE void store_rows(const Share& share, int piece_of_share, Load load) const {
    const auto at = this->tile_of_head(share, share.tile + piece_of_share / dq_pieces);
    const HeadOfDQ head = head_of(share, share.group * p.heads_per_block.number + at.head);
    DQRows& g_rows = sum_rows(share, piece_of_share, Base::warp_of_group());
    store_piece(head, at.tile, piece_of_share % dq_pieces, load, [&](int n) {
      if constexpr (leaves_zeros) g_rows.at[n][threadIdx.x % 32] = float4{0.f, 0.f, 0.f, 0.f};
    });
  }

  // A warp's rows of a piece of a query tile's dQ. used(n): load(n) has been called.
  template <class Load, class Used>
  DLATTN_DEVICE void store_piece(HeadOfDQ head, int tile, int piece, Load load, Used used) const {
    constexpr int per_row = dim_qk / piece_columns;
    const int lane = opaque(threadIdx.x) % 32;  // anew: it holds no register between pieces
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

  // The key workers, when no item is left: shares that go with no item, whose pieces they have by turns. A
  // worker that has no piece of one goes on to the next.
  DLATTN_DEVICE void store_rest() {
    constexpr int workers = 2, at_once = 2;
#pragma unroll 1
    for (uint32 told = 0;; ++told) {
      const auto place = place_of<2>(told);
      const Share& rest = shared.rest[place.stage];
      mbarrier_wait(shared.rest_ring.full[place.stage], place.parity);
      if (uniform(rest.pieces) == none_left) return;
#pragma unroll 1
      for (int piece = (Base::warpgroup_index() + told) % workers; piece < rest.pieces;
           piece += workers * at_once) {
        LoadedRows rows[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int one = piece + workers * i;
          if (one < rest.pieces) rows[i] = load_rows(rest, one);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int one = piece + workers * i;
          if (one >= rest.pieces) break;
          store_rows<false>(rest, one, [&](int n) { return rows[i].at[n]; });
        }
      }
      __syncwarp();
      release(shared.rest_ring.empty[place.stage]);
    }
  }
};

}  // namespace dlattn
