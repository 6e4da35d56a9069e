// The loaders of a Hopper backward block: a warp for q and keys, which scores are made of, and one for dO
// and values.
#pragma once

#include "kernels/bwd_sm90_item.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct BwdSm90Loads : BwdSm90Item<Problem, Tiling> {
  using Base = BwdSm90Item<Problem, Tiling>;
  using Base::Base;
  using Base::ends_walk;
  using Base::first_head;
  using Base::keys;
  using Base::length;
  using Base::m;
  using Base::p;
  using Base::shared;
  using Base::stages;
  using Base::tile_q;
  using Base::tiles;
  using Base::work;

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zeros do. A tile with such rows is full once they are cleared.
  template <int ring_stages, class Tile, class Start>
  DLATTN_DEVICE void fill_rows(Ring<ring_stages>& ring, const Place<ring_stages>& place,
                               Tile (&tile)[ring_stages], int rows, uint64& landed,
                               uint32& clearings, uint32 bytes, Start start) {
    const bool is_full = rows >= Tile::rows;
    order<Base::elects>(ring, place, is_full ? ring.full[place.stage] : landed, bytes, start);
    if (is_full) return;
    mbarrier_wait(landed, clearings++ % 2);
    tile[place.stage].clear_rows(rows, threadIdx.x % 32, 32);
    fence_proxy_async();
    __syncwarp();
    release(ring.full[place.stage]);
  }

  // Starts loading a query tile. Each block of a cluster loads a part of it for all; but what is to be
  // cleared, for itself.
  template <class Tile>
  DLATTN_DEVICE void load_queries(Tile& tile, const TensorMap& map, Mapped tensor, uint64& landed,
                                  bool is_full, int query_tile, int head) {
    const MappedEntry entry = this->entry(tensor);
    const int row = entry.row + query_tile * tile_q;
    if constexpr (Base::cluster == 1) {
      tile.load(map, landed, row, head, entry.batch);
    } else {
      constexpr int part = tile_q / Base::cluster;
      if (is_full) {
        const int first = Base::rank() * part;
        tile.load_rows_everywhere(first, map, landed, row + first, head, entry.batch,
                                  (1 << Base::cluster) - 1);
      } else {
        for (int first = 0; first < tile_q; first += part) {
          tile.load_rows(first, map, landed, row + first, head, entry.batch);
        }
      }
    }
  }

  // The keys or values that this head of the item is the first to need.
  template <bool paged, class Tile>
  DLATTN_DEVICE void load_keys(Tile (&tile)[1], Ring<1>& ring, uint64& landed, uint32& clearings,
                               const MappedKeys& mapped, int i, const Divisor& heads_per_key) {
    if ((Base::parts_of_groups ? i : heads_per_key.rest(i)) != 0) return;
    const Place<1> place{0, this->fill_parity(i, heads_per_key)};
    const int head = heads_per_key.quotient(first_head() + i);
    const bool cleared = !mapped.ref.is_ragged<Problem::ragged>();
    // In these items, ptxas has no register for what follows from them during the walk.
    const int end = Base::parts_of_groups ? opaque(keys.last) : keys.last;
    const int rows = cleared ? most(end - keys.first, 0) : Tile::rows;
    // Of an item without keys nothing is read.
    const bool moves = may_move<Problem>(mapped.ref, keys.first, keys.last);
    const uint32 bytes = moves ? Tile::bytes : 0;
    // In a cluster, the other block reads some columns of the keys; other parts of an item read all.
    constexpr bool once = Base::cluster == 1 && !Tiling::adds_keys;
    fill_rows(ring, place, tile, rows, landed, clearings, bytes, [&](int, uint64& full) {
      if (!moves) return;
      load_key_tile<Problem, paged, once>(tile[0], mapped, full, keys.first, head, work.batch,
                                          length, p);
    });
  }

  // The other block's keys, of which the columns of this block's dQ.
  DLATTN_DEVICE void load_other_keys(uint32& clearings, int i) {
    if (p.heads_per_k.rest(i) != 0) return;
    const Interval others = this->keys_of_block(1 - Base::rank());
    const Place<1> place{0, this->fill_parity(i, p.heads_per_k)};
    fill_rows(shared.other_k_ring, place, shared.other_k, most(others.last - others.first, 0),
              shared.landed[0], clearings, Base::OtherKTile::bytes, [&](int, uint64& full) {
                const MappedEntry entry = this->entry(Mapped::k);
                shared.other_k[0].load(m.k, full, entry.row + others.first,
                                       p.heads_per_k.quotient(first_head() + i), entry.batch,
                                       first_other_column());
              });
  }
  // Where the slabs begin that have those columns.
  static DLATTN_DEVICE int first_other_column() { return Base::rank() * other_columns; }
  static constexpr int other_columns = (Base::KTile::slabs - ceil_div(Base::own_columns, 64)) * 64;

  // Calls visit(i, tile) for the query tiles of the item's heads, in the order of the steps.
  template <class Visit>
  DLATTN_DEVICE void for_each_tile(Visit visit) {
    if constexpr (Base::hands_on) return this->for_each_in_relay(visit);
#pragma unroll 1
    for (int i = 0; i < p.heads_per_block.number; ++i) {
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.last; ++tile) visit(i, tile);
    }
  }

  // The same for those that are steps; and begin(i) after the first tile of a head, whose memory is free
  // before that of keys.
  template <class Begin, class Visit>
  DLATTN_DEVICE void for_each_step(Begin begin, Visit visit) {
    if constexpr (Base::hands_on) {
      if (tiles.empty()) begin(0);
      return this->for_each_in_relay([&](int i, int tile) {
        visit(i, tile);
        if (i == 0 && tile == this->first_in_relay()) begin(0);
      });
    }
#pragma unroll 1
    for (int i = 0; i < p.heads_per_block.number; ++i) {
      int tile = tiles.first;
#pragma unroll 1
      do {
        if (tile < tiles.last && this->is_step(i, tile)) visit(i, tile);
        if (tile == tiles.first) begin(i);
      } while (++tile < tiles.last);
    }
  }

  // Beyond a sequence of a ragged tensor, the copy engine loads zeros.
  DLATTN_DEVICE int existing_rows(const TensorRef& ref, int tile) const {
    const bool all = p.seq_len_q.data == nullptr || ref.is_ragged<Problem::ragged>();
    return all ? tile_q : length.q - tile * tile_q;
  }

  DLATTN_DEVICE bool is_masked(int tile) const {
    const Interval queries{tile * tile_q, least((tile + 1) * tile_q, length.q)};
    // A bias there may be NaN, whatever the log-sum-exp.
    const bool unknown = Problem::Score::reads_memory && queries.last - queries.first < tile_q;
    return unknown || !Problem::Mask::full_keys(queries, length, p)
                           .contains({keys.first, keys.first + Base::block_k});
  }

  // Whether a user's function masks nothing of a tile.
  DLATTN_DEVICE bool is_whole(int head, int tile) const {
    if constexpr (!MasksElements<Problem>) return true;
    return Base::Tiles::is_whole(p, work.batch, head, tile, work.tile);
  }

  // How far a loader has come, in its ring and with what it was to clear.
  template <int ring_stages>
  struct Loads {
    Place<ring_stages> place;
    uint32 clearings = 0;
  };

  DLATTN_DEVICE void load_keys_and_queries(Loads<stages>& at) {
    constexpr uint32 stats_bytes = sizeof(shared.row_stats[0]);
    constexpr uint32 bias_bytes = Base::BiasTile::loaded_bytes;
    const auto load_keys_of = [&](int i) {
      if constexpr (Base::cluster > 1) load_other_keys(at.clearings, i);
      load_keys<Problem::paged_k>(shared.k, shared.k_ring, shared.landed[0], at.clearings,
                                  {m.k, Mapped::k, p.k, p.k_pages}, i, p.heads_per_k);
    };
    for_each_step(load_keys_of, [&](int i, int tile) {
      const int head = first_head() + i;
      const bool last = ends_walk(i + 1) && tile == this->last_tile();
      auto& place = at.place;
      // Before the arrival that publishes it, hence not where the copies start.
      mbarrier_wait(shared.q_ring.empty[place.stage], place.parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        shared.steps[place.stage] = {head, tile, last, is_masked(tile) | !is_whole(head, tile)};
      }
      fill_rows(shared.q_ring, place, shared.q, existing_rows(p.q, tile), shared.landed[0],
                at.clearings, Base::QTile::bytes + stats_bytes + bias_bytes,
                [&](int stage, uint64& full) {
                  if constexpr (Problem::Score::stages_bias) load_bias(stage, full, head, tile);
                  load_queries(shared.q[stage], m.q, Mapped::q, full, &full != &shared.landed[0],
                               tile, head);
                  const int row_tile = this->own_row_tile(head, tile);
                  bulk_load(shared_address(shared.row_stats[stage]), Base::row_stats(p, row_tile),
                            stats_bytes, full);
                });
      place.advance();
    });
  }

  DLATTN_DEVICE void load_bias(int stage, uint64& full, int head, int tile) {
    shared.bias[stage].load(m.bias, full, tile * tile_q, p.bias.head == 0 ? 0 : head,
                            p.bias.batch == 0 ? 0 : work.batch, keys.first);
  }

  DLATTN_DEVICE void load_values_and_gradients(Loads<Base::do_stages>& at) {
    const auto load_values_of = [&](int i) {
      load_keys<Problem::paged_v>(shared.v, shared.v_ring, shared.landed[1], at.clearings,
                                  {m.v, Mapped::v, p.v, p.v_pages}, i, p.heads_per_v);
    };
    for_each_step(load_values_of, [&](int i, int tile) {
      fill_rows(shared.do_ring, at.place, shared.dO, existing_rows(p.dO, tile), shared.landed[1],
                at.clearings, Base::DOTile::bytes, [&](int stage, uint64& full) {
                  load_queries(shared.dO[stage], m.dO, Mapped::dO, full, &full != &shared.landed[1],
                               tile, first_head() + i);
                });
      at.place.advance();
    });
  }
};

}  // namespace dlattn
