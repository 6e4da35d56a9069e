// How keys and values reach a team of warps of a decode on Hopper: by the copy engine, in boxes of 16 keys
// or values, of which each warp orders its own, ahead of the products and across items. Each tile of a
// team's ring, of keys or of values, is ordered anew as soon as it has been read. Queries come the same way,
// in front of the first keys of their item: loads of what each lane multiplies take longer than keys do.
#pragma once

#include "kernels/decode_block.cuh"
#include "tile/pipeline.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct DecodeBoxes : DecodeBlock<Problem, Tiling> {
  using Base = DecodeBlock<Problem, Tiling>;
  using Base::await_team;
  using Base::first_key;
  using Base::first_loaded;
  using Base::loads;
  using Base::m;
  using Base::p;
  using Base::paged;
  using Base::row_group;
  using Base::row_groups;
  using Base::row_of;
  using Base::stages;
  using Base::team;
  using Base::teams;
  using Base::tile_k;
  using Base::warps;
  using typename Base::KTile;
  using typename Base::Mailbox;
  using typename Base::Part;
  using typename Base::Row;
  using typename Base::RowSums;
  using typename Base::T;
  using typename Base::Tiles;
  using typename Base::VTile;
  static_assert(!Problem::ragged);

  struct Stage {
    KTile k;
    VTile v;
  };
  // A team's part of the rows may lie where its last tiles were if there is one item only.
  union OneAfterTheOther {
    Stage stage[stages];
    Part part;
  };
  struct SideBySide {
    Stage stage[stages];
    Part part;
  };
  static constexpr bool parts_apart = Tiling::shares;
  struct Full {
    uint64 k[stages], v[stages];
  };
  // Of an item, and of those whose keys are on their way: a warp may be as many items ahead as its ring has
  // stages, and all warps have read what was there before.
  using QueryTile = SharedTile<T, Base::rows, Base::dim_qk>;
  static constexpr int query_tiles = Tiling::shares ? stages + 1 : 1;
  struct BlockMemory {
    Either<parts_apart, SideBySide, OneAfterTheOther> of[teams];
    Full full[teams];
    RowSums rows;
    QueryTile queries[query_tiles];
    uint64 queries_full[query_tiles];
  };
  struct ClusterMemory : BlockMemory {
    Mailbox mailbox;
  };
  using SharedMemory = Either<Tiling::clusters, ClusterMemory, BlockMemory>;

  // Where the page numbers of rows are that this warp loads of the next 32 tiles of an item, a lane's each.
  struct PageNumbers {
    const int *k = nullptr, *v = nullptr;

    PageNumbers() = default;
    DLATTN_DEVICE PageNumbers(const Params& p, const Tiles& at, int warp, const int* pages_of_k,
                              const int* pages_of_v) {
      const int lane = threadIdx.x % 32, row = at.first_key() + 16 * (warp - lane * Base::warps);
      if (lane >= at.left || row < at.keys.first || row >= at.keys.last) return;
      if constexpr (Problem::paged_k) k = p.k_pages.number_at(pages_of_k, row);
      if constexpr (Problem::paged_v) v = p.v_pages.number_at(pages_of_v, row);
    }
    // Nothing is done with a number here: the warp would wait for it.
    static DLATTN_DEVICE uint32 start(const int* at, From from) {
      return at == nullptr ? 0 : start_load(reinterpret_cast<const uint32*>(at), from);
    }
  };
  // Heads and page numbers, too: what is left to do when lengths may be read is little.
  struct Beginning : Base::Beginning {
    using Base::Beginning::tiles;
    const bool finds_pages;
    int head_k, head_v;
    const int *pages_of_k = nullptr, *pages_of_v = nullptr;
    PageNumbers numbers;

    DLATTN_DEVICE explicit Beginning(const Params& p)
        : Base::Beginning(p), finds_pages(Base::has_full_tables(p) && tiles.left > 0) {
      if (!finds_pages) return;
      head_k = Base::shared_head(p, tiles, p.heads_per_k);
      head_v = Base::shared_head(p, tiles, p.heads_per_v);
      if constexpr (Problem::paged_k) pages_of_k = p.k_pages.unpacked_entries(tiles.batch);
      if constexpr (Problem::paged_v) pages_of_v = p.v_pages.unpacked_entries(tiles.batch);
      numbers = PageNumbers(p, tiles, threadIdx.x / 32, pages_of_k, pages_of_v);
      numbers.k = opaque(numbers.k);
      numbers.v = opaque(numbers.v);
    }
    // Whether copies that have these tiles begin there, too.
    DLATTN_DEVICE bool holds(const Tiles& at) const {
      return finds_pages && at.batch == tiles.batch && at.group() == tiles.group() &&
             at.first_key() == tiles.first_key() && at.tile == tiles.tile && at.left <= tiles.left;
    }
  };

  SharedMemory& shared;
  int stage = 0, parity;               // where products are
  int head_k, head_v;                  // of the item that copies are at
  const int *pages_of_k, *pages_of_v;  // of its batch entry
  // Of the rows that this warp loads of 32 tiles of the item, a lane's each; the first lane's tile.
  uint32 page_k = 0, page_v = 0;
  int looked_up = 0;
  int next_k, next_v;  // the pages of the tile that is ordered next
  // Of the queries that are ordered next, and read next.
  int ordered = 0, unread = 0, parity_of_unread = 0;

  // What tells this warp where its first tiles are. It is read while a kernel before may still write it,
  // copies are ordered by it as soon as they may be, and then it is read again. If it is not the same, the
  // warp begins anew (decode.cuh) before it shares what it has, if its ring is its own, so that it need not
  // tell others.
  static constexpr bool may_guess = !Tiling::shares && Base::has_registers && row_groups == 1;
  struct Told {
    uint64 lengths;
    uint32 page_k, page_v;

    DLATTN_DEVICE bool differs(const Told& other) const {
      return lengths != other.lengths || page_k != other.page_k || page_v != other.page_v;
    }
  };
  const bool is_first_attempt, guesses;
  Told guess, told;
  PageNumbers first_numbers;  // where they are

  static DLATTN_DEVICE bool guesses_from(const Params& p) {
    return may_guess && (!paged || Base::has_full_tables(p)) && p.attn_scale_device == nullptr;
  }

  static DLATTN_DEVICE void open_rings(const MappedDecodeParams& m, SharedMemory& shared,
                                       int warp) {
    const int team = warp / row_groups;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < query_tiles; ++i) mbarrier_init(shared.queries_full[i], warps);
    }
    if (warp % row_groups == 0 && threadIdx.x % 32 == 0) {
      Full& full = shared.full[team];
#pragma unroll
      for (int i = 0; i < stages; ++i) {
        mbarrier_init(full.k[i], row_groups);
        mbarrier_init(full.v[i], row_groups);
      }
      fence_mbarrier_init();
      tma_prefetch(m.k);
      tma_prefetch(m.v);
    }
    __syncthreads();
  }

  // Where a first attempt has left the ring, if this is another one.
  struct Attempt {
    From from = From::l1;
    int parity = 0;
  };
  DLATTN_DEVICE DecodeBoxes(const MappedDecodeParams& params, SharedMemory& shared_memory,
                            const Beginning& beginning, int warp, Attempt attempt)
      : Base(params, beginning.tiles, warp),
        shared(shared_memory),
        parity(attempt.parity),
        is_first_attempt(attempt.from == From::l1),
        guesses(is_first_attempt && Base::reads_first(p) && guesses_from(p)),
        first_numbers(beginning.numbers) {
    const From from = attempt.from;
    if (beginning.finds_pages) take(first_numbers, from);
    if constexpr (may_guess) {
      guess.lengths = loads.lengths.start(from);
      loads.take(loads.lengths.of(p, guess.lengths));
    } else {
      loads.read_lengths();
    }
    if (loads.left > 0) find_first(beginning, from);
    // Read twice, they might not be the same.
    if (may_guess && has_one_table()) page_v = page_k;
    guess.page_k = page_k;
    guess.page_v = page_v;
    find_next();
  }

  // Whether what was read early is what is there, when all that was ordered has been read.
  DLATTN_DEVICE bool began_right() const {
    return !may_guess || !guesses || !__any_sync(0xffffffffu, told.differs(guess));
  }
  // In the same phase everywhere.
  DLATTN_DEVICE Attempt another_attempt() const {
#pragma unroll 1
    for (int i = stage; i > 0 && i < stages; ++i) {
      release(shared.full[team].k[i]);
      release(shared.full[team].v[i]);
    }
    __syncwarp();
    return {From::l2, stage > 0 ? parity ^ 1 : parity};
  }

  DLATTN_DEVICE void read_again() {
    if (may_guess && guesses) {
      told = {loads.lengths.start(From::l2), PageNumbers::start(first_numbers.k, From::l2),
              guess.page_v};
      if (!has_one_table()) told.page_v = PageNumbers::start(first_numbers.v, From::l2);
    }
  }

  DLATTN_DEVICE void start() {
    if (Tiling::shares ? loads.left > 0 && !loads.enters_item() : is_first_attempt) {
      order_queries();
    }
#pragma unroll 1
    for (int ahead = 0; ahead < stages; ++ahead) {
      load_keys(ahead);
      load_values(ahead);
      find_next();
    }
  }
  DLATTN_DEVICE void load_ahead() {}
  DLATTN_DEVICE const KTile& await_keys() {
    find_next();  // while memory is waited for, and not when there is room for that tile
    mbarrier_wait(shared.full[team].k[stage], parity);
    return shared.of[team].stage[stage].k;
  }
  DLATTN_DEVICE void keys_read() {
    await_team();
    load_keys(stage);
  }
  // Rows beyond the last key are zeros: what is there may be no number.
  DLATTN_DEVICE const VTile& await_values(const Tiles& at) {
    mbarrier_wait(shared.full[team].v[stage], parity);
    VTile& s_v = shared.of[team].stage[stage].v;
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
    load_values(stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }

  DLATTN_DEVICE Part& part(int of_team) const { return shared.of[of_team].part; }

  // Of the item that products are at; of rows that do not exist, anything.
  template <int k_steps>
  DLATTN_DEVICE void read_queries(RegisterLeft<T, 1, k_steps>& queries) {
    mbarrier_wait(shared.queries_full[unread], parity_of_unread);
    const SharedLeft<QueryTile, false> s_queries(shared.queries[unread], 16 * row_group);
#pragma unroll
    for (int k = 0; k < k_steps; ++k) s_queries.load(queries.at[0][k], 0, k);
    if (Tiling::shares && ++unread == query_tiles) unread = 0, parity_of_unread ^= 1;
  }

 private:
  // Of the item that copies have come to: each warp some of its rows, all that are declared, since lengths may
  // be guessed.
  DLATTN_DEVICE void order_queries() {
    constexpr int row_bytes = sizeof(T) * Problem::head_dim_qk;
    QueryTile& s_queries = shared.queries[ordered];
    uint64& full = shared.queries_full[ordered];
    const int rows = p.seq_q * p.heads_per_block.number, row = threadIdx.x % 32 * warps + warp();
    if (elected()) {
      mbarrier_arrive_expect(full, ceil_div(rows - warp(), warps) * row_bytes);
    }
    __syncwarp();
    if (row < rows) {
      const Row at = row_of(p, row);
      bulk_load(s_queries.address(row, 0),
                p.q.template rows<T>(loads.batch, Base::first_head(loads) + at.head, at.query),
                row_bytes, full);
    }
    if (Tiling::shares && ++ordered == query_tiles) ordered = 0;
  }
  // Orders keys of the next tile, if there is one; then its values.
  DLATTN_DEVICE void load_keys(int stage) {
    if (loads.left == 0) return;
    if (Tiling::shares && loads.enters_item()) order_queries();
    load<Problem::paged_k>(shared.of[team].stage[stage].k, m.k, shared.full[team].k[stage],
                           p.k_pages, head_k, next_k);
  }
  DLATTN_DEVICE void load_values(int stage) {
    if (loads.left == 0) return;
    load<Problem::paged_v>(shared.of[team].stage[stage].v, m.v, shared.full[team].v[stage],
                           p.v_pages, head_v, next_v);
    loads.advance();
    if (loads.left == 0) return;
    if (loads.enters_item()) {
      enter_item();
    } else if (paged && lane_of_tile() == 32) {
      look_up();
    }
  }
  template <bool is_paged, class Tile>
  DLATTN_DEVICE void load(Tile& s_tile, const TensorMap& map, uint64& full,
                          const PageTableRef& table, int head, int page) const {
    const int first = first_loaded(loads);
    if (elected()) {
      if (first >= loads.keys.last) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, Tile::slabs * 16 * 128);
        s_tile.load_rows(16 * row_group, map, full, is_paged ? table.slot(first) : first, head,
                         is_paged ? page : loads.batch);
      }
    }
    __syncwarp();
  }

  // Of keys and values, as far as this lane has read it. All blocks ask L2 for the same few sectors, so that
  // each question counts.
  DLATTN_DEVICE bool has_one_table() const { return first_numbers.k == first_numbers.v; }

  DLATTN_DEVICE void find_first(const Beginning& beginning, From from) {
    if (beginning.holds(loads)) {
      head_k = beginning.head_k;
      head_v = beginning.head_v;
      pages_of_k = beginning.pages_of_k;
      pages_of_v = beginning.pages_of_v;
    } else {
      find_entries();
      first_numbers = PageNumbers(p, loads, warp(), pages_of_k, pages_of_v);
      take(first_numbers, from);
    }
  }
  DLATTN_DEVICE void find_entries() {
    head_k = Base::shared_head(p, loads, p.heads_per_k);
    head_v = Base::shared_head(p, loads, p.heads_per_v);
    if constexpr (Problem::paged_k) pages_of_k = p.k_pages.entries(loads.batch);
    if constexpr (Problem::paged_v) pages_of_v = p.v_pages.entries(loads.batch);
  }
  DLATTN_DEVICE void enter_item() {
    find_entries();
    look_up();
  }
  DLATTN_DEVICE void find_next() {
    if (loads.left == 0) return;
    if constexpr (Problem::paged_k) next_k = existing_page(p.k_pages, page_k);
    if constexpr (Problem::paged_v) next_v = existing_page(p.v_pages, page_v);
  }
  // One that the container does not have is beyond its bounds: zeros.
  DLATTN_DEVICE int existing_page(const PageTableRef& table, uint32 pages) const {
    const int page = uniform(from_lane(pages, lane_of_tile()));
    return table.has(page) ? page : table.pages;
  }
  DLATTN_DEVICE int warp() const { return row_groups * team + row_group; }
  DLATTN_DEVICE int lane_of_tile() const { return looked_up - loads.tile; }
  // Starts loading the pages of the next tiles, so early that copies need not wait.
  DLATTN_DEVICE void look_up() {
    if constexpr (paged) {
      // What was read early, L1 keeps.
      const From from = may_guess ? From::l2 : From::l1;
      take(PageNumbers(p, loads, warp(), pages_of_k, pages_of_v), from);
    }
  }
  DLATTN_DEVICE void take(const PageNumbers& numbers, From from) {
    looked_up = loads.tile;
    if constexpr (Problem::paged_k) page_k = PageNumbers::start(numbers.k, from);
    if constexpr (Problem::paged_v) page_v = PageNumbers::start(numbers.v, from);
  }
};

}  // namespace dlattn
