// How keys and values reach a warp of a decode on Hopper, if 16 rows are all that there are: by the copy
// engine, in boxes of 16 keys or values, which the warp orders for itself, ahead of the products and across
// items. Its ring has tiles of keys and of values in turn, and each is ordered anew as soon as it has been
// read.
#pragma once

#include "kernels/decode_block.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct DecodeBoxes : DecodeBlock<Problem, Tiling> {
  using Base = DecodeBlock<Problem, Tiling>;
  using Base::await_team;
  using Base::first_head;
  using Base::first_key;
  using Base::first_loaded;
  using Base::loads;
  using Base::m;
  using Base::p;
  using Base::stages;
  using Base::team;
  using Base::teams;
  using Base::tile_k;
  using typename Base::KTile;
  using typename Base::Mailbox;
  using typename Base::Part;
  using typename Base::RowSums;
  using typename Base::Tiles;
  using typename Base::VTile;
  static_assert(Base::row_groups == 1 && !Problem::ragged);

  union Slot {
    KTile k;
    VTile v;
  };
  // In a cluster a team's part of the rows may lie where its last tiles were: there is one item only.
  union OneAfterTheOther {
    Slot slot[stages];
    Part part;
  };
  struct SideBySide {
    Slot slot[stages];
    Part part;
  };
  struct BlockMemory {
    Either<Tiling::clusters, OneAfterTheOther, SideBySide> of[teams];
    uint64 full[teams][stages];
    RowSums rows;
  };
  struct ClusterMemory : BlockMemory {
    Mailbox mailbox;
  };
  using SharedMemory = Either<Tiling::clusters, ClusterMemory, BlockMemory>;

  struct Place {
    int slot = 0, parity = 0;
    DLATTN_DEVICE Place next() const {
      return slot + 1 == stages ? Place{0, parity ^ 1} : Place{slot + 1, parity};
    }
  };

  SharedMemory& shared;
  Place place;                 // of products
  bool values_next = false;    // of the tile that copies are at
  int page_k = 0, page_v = 0;  // of the rows that this warp loads next

  DLATTN_DEVICE DecodeBoxes(const MappedDecodeParams& params, SharedMemory& shared_memory)
      : Base(params), shared(shared_memory) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < stages; ++i) mbarrier_init(shared.full[team][i], 1);
      fence_mbarrier_init();
      tma_prefetch(m.k);
      tma_prefetch(m.v);
    }
    await_team();
    look_up();
  }

  DLATTN_DEVICE void start() {
#pragma unroll 1
    for (int slot = 0; slot < stages; ++slot) load_next(slot);
  }
  DLATTN_DEVICE const KTile& await_keys() const {
    mbarrier_wait(shared.full[team][place.slot], place.parity);
    return shared.of[team].slot[place.slot].k;
  }
  DLATTN_DEVICE void keys_read() {
    await_team();
    load_next(place.slot);
  }
  // Rows beyond the last key are zeros: what is there may be no number.
  DLATTN_DEVICE const VTile& await_values(const Tiles& at) {
    const Place values = place.next();
    mbarrier_wait(shared.full[team][values.slot], values.parity);
    VTile& s_v = shared.of[team].slot[values.slot].v;
    const int existing = at.keys.last - first_key(at);
    if (existing > 0 && existing < tile_k) {
      s_v.clear_rows(existing, threadIdx.x % 32, 32);
      fence_proxy_async();
      await_team();
    }
    return s_v;
  }
  DLATTN_DEVICE void values_read() {
    await_team();
    place = place.next();
    load_next(place.slot);
    place = place.next();
  }

  DLATTN_DEVICE Part& part(int of_team) const { return shared.of[of_team].part; }

 private:
  // Orders the next tile of keys or of values, if there is one.
  DLATTN_DEVICE void load_next(int slot) {
    if (loads.left == 0) return;
    const int first = first_loaded(loads), head = first_head(loads);
    Slot& s_slot = shared.of[team].slot[slot];
    uint64& full = shared.full[team][slot];
    if (threadIdx.x % 32 == 0) {
      if (first >= loads.keys.last) {
        mbarrier_arrive(full);
      } else if (values_next) {
        order<Problem::paged_v>(s_slot.v, m.v, full, p.v_pages, first, head / p.heads_per_v,
                                page_v);
      } else {
        order<Problem::paged_k>(s_slot.k, m.k, full, p.k_pages, first, head / p.heads_per_k,
                                page_k);
      }
    }
    __syncwarp();
    if (values_next) {
      loads.advance();
      look_up();
    }
    values_next = !values_next;
  }
  template <bool paged, class Tile>
  DLATTN_DEVICE void order(Tile& s_tile, const TensorMap& map, uint64& full,
                           const PageTableRef& table, int first, int head, int page) const {
    mbarrier_arrive_expect(full, Tile::slabs * 16 * 128);
    s_tile.load_rows(0, map, full, paged ? table.slot(first) : first, head,
                     paged ? page : loads.batch);
  }

  // The pages of 16 rows, so early that copies need not wait.
  DLATTN_DEVICE void look_up() {
    const int first = loads.left > 0 ? first_loaded(loads) : 0;
    if (loads.left == 0 || first >= loads.keys.last) return;
    if constexpr (Problem::paged_k) page_k = number(p.k_pages, first);
    if constexpr (Problem::paged_v) page_v = number(p.v_pages, first);
  }
  // A page that the container does not have is beyond its bounds: zeros.
  DLATTN_DEVICE int number(const PageTableRef& table, int row) const {
    const int number = table.number(table.entries(loads.batch), row);
    return table.has(number) ? number : table.pages;
  }
};

}  // namespace dlattn
