// Attention forward for Hopper: wgmma, TMA, warp specialisation (FlashAttention-3, section 3).
//
// A block has one producer warpgroup: a scheduler warp hands out query tiles, and a warp each drives
// the copy engine for q, k and v. Two or three consumer warpgroups have 64 rows of a tile each. Key
// tiles are walked from the last to the first. In the steady loop a consumer starts the scores of one
// tile, then the output of the tile before it, and turns the first into exponentials while the tensor
// cores work on the second. Exponentials are relative to a maximum of the tiles before: the scores of
// a tile are searched for a new one only where they are masked, or where a sum shows that it is due;
// everywhere if maxima are results.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/paged_boxes.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "attn/signs.cuh"
#include "attn/softmax.cuh"
#include "attn/walk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace dlattn {

template <int consumers_, int tile_k_, int stages_, int q_stages_, int o_slabs_, bool ping_pong_,
          bool exponentials_first_>
struct Sm90FwdTiling {
  static constexpr int consumers = consumers_;  // warpgroups, of 64 query rows each
  static constexpr int tile_q = 64 * consumers, tile_k = tile_k_;
  static constexpr int stages = stages_;         // key tiles, and value tiles, in shared memory
  static constexpr int q_stages = q_stages_;     // query tiles in shared memory
  static constexpr int o_slabs = o_slabs_;       // 64-column slabs of o staged by each consumer
  static constexpr bool ping_pong = ping_pong_;  // consumers take turns at the tensor cores
  // Of one tile; then the wait for the output of the tile before. Or the other way round.
  static constexpr bool exponentials_first = exponentials_first_;
};

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedFwdParams {
  // Boxes: tile_q, tile_k, tile_k and 64 rows of 64 columns; of pages, fewer (attn/paged_boxes.cuh).
  TensorMap q, k, v, o;
  TensorMap bias;  // 64 rows; if it is staged
  Params p;
};

template <class Problem, class Tiling>
struct FwdSm90 {
  using T = typename Problem::Element;
  using Score = typename Problem::Score;
  static constexpr int consumers = Tiling::consumers;
  static constexpr int stages = Tiling::stages, q_stages = Tiling::q_stages;
  static constexpr int o_slabs = Tiling::o_slabs;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, 16);
  static constexpr int dim_v = Problem::value_columns;  // head_dim_v, up to a width of wgmma
  static constexpr int producer_registers = consumers == 2 ? 40 : 32;
  static constexpr int consumer_registers = consumers == 2 ? 232 : 160;

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using OSlab = SlabTile<T, 64, 64>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using BiasTile = SlabTile<Either<Score::stages_bias, typename Score::BiasElement, T>, 64, tile_k>;
  using Scores = Accumulator<1, tile_k / 8>;
  using Output = Accumulator<1, dim_v / 8>;
  using Probabilities = RegisterLeft<T, 1, tile_k / 16>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;
  using Sums = Softmax::Sums;
  using Tiles = Walk<typename Problem::Mask, tile_q, tile_k>;
  // Exponents come from raw products at once, but in the first tile of a row and where it has gaps.
  static constexpr bool quick = Score::is_quick && !Softmax::exact;

  static constexpr bool stages_bias = Score::stages_bias;
  struct Nothing {};

  // Query tiles handed out: one at work, the next being loaded, one more.
  static constexpr int item_stages = 3;

  struct SharedMemory {
    QTile q[q_stages];
    KTile k[stages];
    VTile v[stages];
    OSlab o[consumers][o_slabs];
    Either<stages_bias, BiasTile, Nothing> bias[consumers];
    int4 items[item_stages];  // tile, head, batch
    Ring<q_stages> q_ring;
    Ring<stages> k_ring, v_ring;
    Ring<item_stages> item_ring;
    Ring<1> bias_ring[consumers];
  };

  // Named barriers, by event; + warpgroup.
  enum Barrier { turn = 2, rows_free = 5, rows_staged = 8, values_cleared = 11 };

  // What a query tile means for both roles.
  struct Work {
    WorkItem item;
    Lengths length;
    Interval queries;  // that exist
    Interval full;     // keys that every query attends to
    int first_tile, last_tile;

    DLATTN_DEVICE Work(const Params& p, WorkItem work_item)
        : item(work_item),
          length(p, item.batch),
          queries{item.tile * tile_q, least((item.tile + 1) * tile_q, length.q)},
          full(Problem::Mask::full_keys(queries, length, p)) {
      const Interval keys = Problem::Mask::keys(queries, length, p);
      const bool none = queries.empty() || keys.empty();
      first_tile = none ? 0 : keys.first / tile_k;
      last_tile = none ? -1 : ceil_div(keys.last, tile_k) - 1;
      if constexpr (Tiles::skips) {
        last_tile = Tiles::last_keys(p, item, last_tile, first_tile);
        first_tile = Tiles::first_keys(p, item, first_tile, last_tile);
      }
    }
    DLATTN_DEVICE bool empty() const { return last_tile < first_tile; }
    DLATTN_DEVICE bool is_full(int tile) const {
      return full.contains({tile * tile_k, (tile + 1) * tile_k});
    }
  };

  const MappedFwdParams& m;
  const Params& p;
  SharedMemory& shared;
  const int warpgroup;  // among the consumers

  DLATTN_DEVICE FwdSm90(const MappedFwdParams& params, SharedMemory& shared_memory)
      : m(params), p(params.p), shared(shared_memory), warpgroup(warp_index() / 4 - 1) {}

  // Of this warp, in the tile.
  static DLATTN_DEVICE int first_row() { return 16 * (warp_index() - 4); }

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      tma_prefetch(m.q);
      tma_prefetch(m.k);
      tma_prefetch(m.v);
      tma_prefetch(m.o);
      shared.q_ring.init(4 * consumers);
      shared.k_ring.init(4 * consumers);
      shared.v_ring.init(4 * consumers);
      shared.item_ring.init(3 + 4 * consumers);
      for (Ring<1>& ring : shared.bias_ring) ring.init(4);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // The query tile in a buffer of the ring; after the last one, a negative tile. Read anew whenever
  // it is needed, which costs less than its registers do.
  DLATTN_DEVICE WorkItem item(int stage) const {
    const int4 row = shared.items[stage];
    return {uniform(row.x), uniform(row.y), uniform(row.z)};
  }
  DLATTN_DEVICE WorkItem await_item(const Place<item_stages>& place) {
    mbarrier_wait(shared.item_ring.full[place.stage], place.parity);
    return item(place.stage);
  }

  // The key tile to visit after this one.
  template <class Item>
  DLATTN_DEVICE int tile_before(Item item, const Work& work, int tile) const {
    if constexpr (!Tiles::skips) return tile - 1;
    return Tiles::last_keys(p, item(), tile - 1, work.first_tile);
  }

  // ---- Scheduler: one warp, which hands out query tiles ----

  DLATTN_DEVICE void schedule() {
    Place<item_stages> place;
    if constexpr (Problem::ragged) {
      offer_numbered(place);
    } else if (p.items_taken == nullptr) {
      const int end = p.schedule[blockIdx.x + 1];
      for (int i = p.schedule[blockIdx.x]; i < end; ++i) {
        const int4 row = reinterpret_cast<const int4*>(p.schedule)[i];
        offer(place, {uniform(row.x), uniform(row.y), uniform(row.z)});
      }
    } else {
      offer_attending(place);
    }
    hand_out(place, {-1, 0, 0});
  }

  DLATTN_DEVICE void hand_out(Place<item_stages>& place, WorkItem item) {
    mbarrier_wait(shared.item_ring.empty[place.stage], place.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      shared.items[place.stage] = int4{item.tile, item.head, item.batch, 0};
      mbarrier_arrive(shared.item_ring.full[place.stage]);
    }
    place.advance();
  }

  DLATTN_DEVICE void offer(Place<item_stages>& place, WorkItem item) {
    const Work work(p, item);
    if (work.empty()) {
      store_nothing(item, work.length.q, threadIdx.x % 32, 32);
    } else {
      hand_out(place, item);
    }
  }

  // The kernel before has numbered the tiles with queries, the longest sequences' first.
  DLATTN_DEVICE void offer_numbered(Place<item_stages>& place) {
    const int count = uniform(p.ragged.items[0].x);
    int taken = ask();
    while (taken < count) {
      const int4 row = p.ragged.items[1 + taken];
      taken = ask();
      offer(place, {uniform(row.x), uniform(row.y), uniform(row.z)});
    }
  }

  // Lengths are known on the device only: a tile with queries goes to the block that first asks for
  // it, the last tile of an entry first.
  DLATTN_DEVICE void offer_attending(Place<item_stages>& place) {
    BatchWalk walk;
    const auto count = [&](int batch) { return tiles_with_queries(batch) * p.heads_q; };
    int taken = ask();
    while (walk.find(taken, p.batch, count)) {
      taken = ask();  // early: the answer takes as long as some key tiles
      const int tile = tiles_with_queries(walk.batch) - 1 - walk.rest / p.heads_q;
      offer(place, {tile, walk.rest % p.heads_q, walk.batch});
    }
  }

  DLATTN_DEVICE int ask() const {
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = fetch_add(p.items_taken, 1);
    return uniform(taken);
  }

  DLATTN_DEVICE int tiles_with_queries(int batch) const {
    return ceil_div(p.seq_len_q.at(batch, p.seq_q), tile_q);
  }

  // By some threads side by side.
  DLATTN_DEVICE void store_nothing(WorkItem at, int length_q, int thread, int threads) {
    const int first = at.tile * tile_q;
    store_empty_rows<Problem>(p, at.batch, at.head, first, least(tile_q, p.seq_q - first), length_q,
                              thread, threads);
  }

  // ---- Loaders: a warp each for q, k and v, of which one lane gives the orders ----

  template <class Visit>
  DLATTN_DEVICE void for_each_work(Visit visit) {
    for (Place<item_stages> place;; place.advance()) {
      const WorkItem item = await_item(place);
      release(shared.item_ring.empty[place.stage]);
      if (item.tile < 0) return;
      visit(Work(p, item));
    }
  }

  // With each tile, a bias that is staged.
  DLATTN_DEVICE void load_queries() {
    Place<q_stages> place;
    Place<1> bias_place;
    for_each_work([&](const Work& work) {
      const WorkItem at = work.item;
      const MappedEntry entry = p.mapped_entry<Problem::ragged>(Mapped::q, at.batch);
      fill(shared.q_ring, place, QTile::bytes, [&](int stage, uint64& full) {
        shared.q[stage].load(m.q, full, entry.row + at.tile * tile_q, at.head, entry.batch);
      });
      if constexpr (stages_bias) load_bias(work, bias_place);
    });
  }

  DLATTN_DEVICE void load_bias(const Work& work, Place<1>& place) {
    const WorkItem at = work.item;
    const int head = p.bias.head == 0 ? 0 : at.head, batch = p.bias.batch == 0 ? 0 : at.batch;
    const auto item = [&] { return at; };
    for (int tile = work.last_tile; tile >= work.first_tile; tile = tile_before(item, work, tile)) {
#pragma unroll
      for (int consumer = 0; consumer < consumers; ++consumer) {
        order(shared.bias_ring[consumer], place, shared.bias_ring[consumer].full[0],
              BiasTile::bytes, [&](int, uint64& full) {
                shared.bias[consumer].load(m.bias, full, at.tile * tile_q + 64 * consumer, head,
                                           batch, tile * tile_k);
              });
      }
      place.advance();
    }
  }

  template <class Tile>
  DLATTN_DEVICE void load_keys(Tile (&tiles)[stages], Ring<stages>& ring, const TensorMap& map,
                               Mapped tensor, int heads_per_key) {
    Place<stages> place;
    for_each_work([&](const Work& work) {
      const int head = work.item.head / heads_per_key;
      const MappedEntry entry = p.mapped_entry<Problem::ragged>(tensor, work.item.batch);
      const auto item = [&] { return work.item; };
      for (int tile = work.last_tile; tile >= work.first_tile;
           tile = tile_before(item, work, tile)) {
        fill(ring, place, Tile::bytes, [&](int stage, uint64& full) {
          tiles[stage].load(map, full, entry.row + tile * tile_k, head, entry.batch);
        });
      }
    });
  }

  // The same through a page table, of which the entries for a tile are read a tile early.
  template <class Tile>
  DLATTN_DEVICE void gather_keys(Tile (&tiles)[stages], Ring<stages>& ring, const TensorMap& map,
                                 const PageTableRef& table, int heads_per_key) {
    Place<stages> place;
    for_each_work([&](const Work& work) {
      const PagedBoxes<tile_k> boxes(table, work.item.batch);
      const int head = work.item.head / heads_per_key;
      const auto item = [&] { return work.item; };
      int next = boxes.number_of_lane(work.last_tile * tile_k, work.length.kv);
#pragma unroll 1
      for (int tile = work.last_tile, before; tile >= work.first_tile; tile = before) {
        const int number = next;
        before = tile_before(item, work, tile);
        if (before >= work.first_tile) {
          next = boxes.number_of_lane(before * tile_k, work.length.kv);
        }
        uint64& full = ring.full[place.stage];
        order(ring, place, full, Tile::bytes, [](int, uint64&) {});
        boxes.load_by_warp(tiles[place.stage], map, full, tile * tile_k, head, number);
        place.advance();
      }
    });
  }

  DLATTN_DEVICE void produce() {
    switch (warp_index()) {
      case 0:
        return load_queries();
      case 1:
        if constexpr (Problem::paged_k) {
          return gather_keys(shared.k, shared.k_ring, m.k, p.k_pages, p.heads_per_k);
        }
        return load_keys(shared.k, shared.k_ring, m.k, Mapped::k, p.heads_per_k);
      case 2:
        if constexpr (Problem::paged_v) {
          return gather_keys(shared.v, shared.v_ring, m.v, p.v_pages, p.heads_per_v);
        }
        return load_keys(shared.v, shared.v_ring, m.v, Mapped::v, p.heads_per_v);
      case 3:
        return schedule();
    }
  }

  // ---- Consumer ----

  DLATTN_DEVICE void await_turn() {
    if constexpr (Tiling::ping_pong) named_barrier_sync(turn + opaque(warpgroup), 256);
  }
  DLATTN_DEVICE void pass_turn() {
    if constexpr (Tiling::ping_pong) {
      const int next = opaque(warpgroup) + 1;
      named_barrier_arrive(turn + (next == consumers ? 0 : next), 256);
    }
  }

  // Where the first element of this lane is.
  DLATTN_DEVICE Position position(const Work& work, int tile) {
    return {anew<Score>(work.item.batch),
            anew<Score>(work.item.head),
            work.length.q,
            work.length.kv,
            anew<Score>(work.queries.first) + first_row() + Scores::row(0, 0),
            anew<Score>(tile) * tile_k + Scores::column(0, 0)};
  }

  DLATTN_DEVICE void edit(Scores& scores, const Work& work, const ScoreValues& values, int tile) {
    Score::template prepare<quick>(scores, values);
    const Position first = position(work, tile);
#pragma unroll
    for (int begin = 0; begin < tile_k / 8; begin += 2) {
      for_each_element(scores, begin, first, [&](float& score, const auto& at, int) {
        score = Score::apply(score, at, values);
      });
    }
  }

  // Calls visit(score, position, i) in the 16 columns of accumulator tiles `pair` and the next.
  template <class Visit>
  DLATTN_DEVICE void for_each_element(Scores& scores, int pair, const Position& first,
                                      Visit visit) {
    uint32 bias[4];
    if constexpr (stages_bias) {
      const int lane = opaque(threadIdx.x % 32);
      ldmatrix_x4<false>(bias, shared.bias[warpgroup].unit_address(first_row() % 64 + lane % 16,
                                                                   pair + lane / 16));
    }
#pragma unroll
    for (int n = pair; n < pair + 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Either<stages_bias, BiasedPosition, Position> at{first};
        at.down = Scores::row_step(0, i);
        at.right = Scores::column_step(n, i);
        if constexpr (stages_bias) {
          using Element = Convert<typename Score::BiasElement>;
          const uint32 both = bias[(n - pair) * 2 + i / 2];
          at.bias = i % 2 == 0 ? Element::low(both) : Element::high(both);
        }
        visit(scores.at[0][n][i], at, i);
      }
  }

  // Columns of a tile that some row of this warp attends to. Three consumers have no registers for
  // the branches that skip the others.
  using Columns = Either<consumers == 2, SeenColumns, AllColumns>;
  DLATTN_DEVICE Columns seen_columns(const Work& work, int tile) {
    if constexpr (consumers == 2) {
      const int first_query = work.queries.first + first_row();
      const Interval keys = Problem::Mask::keys({first_query, first_query + 16}, work.length, p);
      return {{keys.first - tile * tile_k, keys.last - tile * tile_k}};
    } else {
      return {};
    }
  }

  DLATTN_DEVICE void mask(Scores& scores, const Work& work, int tile) {
    const int first_query = work.queries.first + first_row();
    const int first_key = tile * tile_k + Scores::column(0, 0);  // of this lane
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int query = first_query + Scores::row(0, i);
      const Interval keys = Problem::Mask::keys({query, query + 1}, work.length, p);
#pragma unroll
      for (int n = 0; n < tile_k / 8; n += 16) {
        const uint32 kept = kept_elements(keys, first_key + 8 * n);
#pragma unroll
        for (int e = 0; e < least(32, tile_k / 4 - 2 * n); ++e) {
          if ((kept >> e & 1) == 0) scores.at[0][n + e / 2][i + e % 2] = -infinity();
        }
      }
    }
  }

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zero values do. Every consumer clears for itself. What lies beyond
  // a sequence of a ragged tensor, the copy engine does not load.
  DLATTN_DEVICE void clear_padding(WorkItem item, const Place<stages>& place) {
    if (p.seq_len_kv.data == nullptr || p.v.is_ragged<Problem::ragged>()) return;
    const Work work(p, item);
    const int first = work.length.kv - work.last_tile * tile_k;
    if (first >= tile_k) return;
    const int stage = place.stage;
    mbarrier_wait(shared.v_ring.full[stage], place.parity);
    shared.v[stage].clear_rows(first, threadIdx.x % 128, 128);
    fence_proxy_async();
    named_barrier_sync(values_cleared + warpgroup, 128);
  }

  // What a consumer carries from tile to tile.
  struct State {
    Scores scores;
    Probabilities probabilities;
    Output output;
    float factor[2];
    Place<item_stages> item;
    Place<q_stages> q;
    Place<stages> k, v;
    Place<1> bias;
  };

  DLATTN_DEVICE void begin_scores(State& state, const Work& work, int tile) {
    mbarrier_wait(shared.k_ring.full[state.k.stage], state.k.parity);
    await_turn();
    start_product(state.scores, shared.q[state.q.stage], 64 * warpgroup, shared.k[state.k.stage]);
  }

  DLATTN_DEVICE void begin_output(State& state) {
    mbarrier_wait(shared.v_ring.full[state.v.stage], state.v.parity);
    start_accumulation(state.output, state.probabilities, shared.v[state.v.stage]);
  }

  // Products become exponentials at once.
  DLATTN_DEVICE Sums take_quickly(Scores& scores, const Work& work, int tile,
                                  const ScoreValues& values, const Softmax& softmax) {
    constexpr int group = 2, tiles = tile_k / 8;
    const Position first = position(work, tile);
    const auto range = Score::range(
        [&](auto visit) { scores.for_each([&](float raw, int, int, int i) { visit(raw, i); }); });
    Sums sums{};
    Score::in_form(range, values, [&](auto form) {
      float before = 0.f;
#pragma unroll
      for (int begin = 0; begin < tiles; begin += group) {
        for_each_element(scores, begin, first, [&](float& s, const auto& at, int i) {
          const float inner = Score::inner(form, s, values);
          s = exp2_approx(Score::outer(inner, at, values, -softmax.reference[i / 2]));
          sums.of[i / 2] += s;
        });
        form.follow(before);
        before = scores.at[0][begin + group - 1][3];
      }
    });
    return sums;
  }

  // Scores that have arrived become exponentials, and enter the maxima if they are the first, have
  // gaps, or maxima must be exact. True if the output must be rescaled.
  DLATTN_DEVICE bool take_scores(State& state, Sums& sums, const Work& work, int tile, bool first,
                                 const ScoreValues& values, Softmax& softmax) {
    tie(state.scores);
    if constexpr (stages_bias) {
      mbarrier_wait(shared.bias_ring[warpgroup].full[0], state.bias.parity);
    }
    if constexpr (quick) {
      if (!first && work.is_full(tile)) {
        sums = take_quickly(state.scores, work, tile, values, softmax);
        return false;
      }
    }
    edit(state.scores, work, values, tile);
    if (work.is_full(tile)) {
      const bool grew = (first || Softmax::exact) && softmax.advance(state.scores, state.factor);
      sums = softmax.exponentiate(state.scores);
      return grew;
    }
    const Columns seen = seen_columns(work, tile);
    mask(state.scores, work, tile);
    const bool grew = softmax.advance(state.scores, state.factor, seen);
    sums = softmax.exponentiate(state.scores, seen);
    return grew;
  }

  // The scores of this warp's rows once more; the other warps go on without it.
  DLATTN_DEVICE void repeat_scores(Scores& scores, int q_stage, int k_stage) {
    const int lane = opaque(threadIdx.x % 32);
    scores.clear();
#pragma unroll 1
    for (int k = 0; k < dim_qk / 16; ++k) {
      uint32 a[4];
      ldmatrix_x4<false>(
          a, shared.q[q_stage].unit_address(first_row() + lane % 16, 2 * k + lane / 16));
      const uint32 keys =
          shared.k[k_stage].unit_address(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2);
#pragma unroll
      for (int n = 0; n < tile_k / 8; n += 2) {
        uint32 b[4];
        ldmatrix_x4<false>(b,
                           keys + 8 * n * 128);  // rows of 128 bytes; the swizzle repeats every 8
        mma_m16n8k16<T>(scores.at[0][n], a, b[0], b[1]);
        mma_m16n8k16<T>(scores.at[0][n + 1], a, b[2], b[3]);
      }
    }
  }

  // Some score was far above the maxima of the tiles before, which is rare after the first tiles.
  DLATTN_DEVICE bool retake_scores(State& state, Sums& sums, const Work& work, int tile,
                                   const ScoreValues& values, Softmax& softmax) {
    repeat_scores(state.scores, state.q.stage, state.k.stage);
    edit(state.scores, work, values, tile);
    const bool grew = softmax.advance(state.scores, state.factor);
    sums = softmax.exponentiate(state.scores);
    return grew;
  }

  // What the output is made of, from exponentials.
  DLATTN_DEVICE void make_probabilities(State& state, const Work& work, int tile) {
    state.probabilities = Probabilities(state.scores);
    if constexpr (Problem::Dropout::drops) {
      const typename Problem::Dropout dropout(p, work.item.batch, work.item.head, work.length,
                                              !Problem::Score::reads_positions);
      drop(state.probabilities, dropout, work.queries.first + first_row(), tile * tile_k);
    }
  }

  DLATTN_DEVICE void end_scores(State& state, const Work& work, int tile) {
    release(shared.k_ring.empty[state.k.stage]);
    if (tile == work.first_tile) release(shared.q_ring.empty[state.q.stage]);
    if constexpr (stages_bias) {
      release(shared.bias_ring[warpgroup].empty[0]);
      state.bias.advance();
    }
  }

  DLATTN_DEVICE void end_output(State& state) {
    wgmma_wait<0>();
    tie(state.output);
    release(shared.v_ring.empty[state.v.stage]);
    state.v.advance();
  }

  // The scores of one tile, and meanwhile the output of the tile before it. True if the output must
  // be rescaled.
  template <bool first>
  DLATTN_DEVICE bool step(State& state, const Work& work, int tile, const ScoreValues& values,
                          Softmax& softmax) {
    Sums sums;
    begin_scores(state, work, tile);
    begin_output(state);
    pass_turn();
    wgmma_wait<1>();
    bool grew = take_scores(state, sums, work, tile, first, values, softmax);
    const bool retake = !first && !Softmax::exact && softmax.overflown(sums);
    // ptxas moves arithmetic below waits for wgmma, but keeps memory accesses in order with them. This
    // one depends on all exponentials: they stand before the wait if it does.
    if (Tiling::exponentials_first && !retake) end_scores(state, work, tile);
    end_output(state);
    if (!Tiling::exponentials_first && !retake) end_scores(state, work, tile);
    if (retake) {
      grew = retake_scores(state, sums, work, tile, values, softmax);
      end_scores(state, work, tile);
    }
    state.k.advance();
    softmax.add(sums);
    make_probabilities(state, work, tile);
    return grew;
  }

  // The query tiles of a block are one chain of key tiles: the first scores of a query tile stand
  // over the last output of the one before.
  DLATTN_DEVICE void attend() {
    const ScoreValues values(p);
    const float factor = Problem::Score::factor(values);
    if (Tiling::ping_pong && warpgroup == consumers - 1) named_barrier_arrive(turn, 256);

    State state;
    const WorkItem first = await_item(state.item);
    if (first.tile < 0) return;
    Work work(p, first);
    Softmax softmax(factor);
    mbarrier_wait(shared.q_ring.full[state.q.stage], state.q.parity);
    begin_scores(state, work, work.last_tile);
    pass_turn();
    wgmma_wait<0>();
    Sums sums;
    take_scores(state, sums, work, work.last_tile, true, values, softmax);
    softmax.add(sums);
    end_scores(state, work, work.last_tile);
    state.k.advance();
    make_probabilities(state, work, work.last_tile);

    // Read anew for each tile, where it is asked for: it would take registers between tiles.
    const auto item_at_work = [&] { return item(state.item.stage); };
    for (;;) {
      clear_padding(item(state.item.stage), state.v);
      state.output.clear();
#pragma unroll 1
      for (int tile = tile_before(item_at_work, work, work.last_tile); tile >= work.first_tile;
           tile = tile_before(item_at_work, work, tile)) {
        if (step<false>(state, work, tile, values, softmax)) {
          softmax.rescale(state.output, state.factor);
        }
      }
      Softmax next_softmax(factor);
      const int finished = state.item.stage;
      state.item.advance();
      const WorkItem next = await_item(state.item);
      const bool more = next.tile >= 0;
      if (more) {
        work = Work(p, next);
        state.q.advance();
        mbarrier_wait(shared.q_ring.full[state.q.stage], state.q.parity);
        step<true>(state, work, work.last_tile, values, next_softmax);
      } else {
        begin_output(state);
        end_output(state);
      }
      store(Work(p, item(finished)), softmax, state.output);
      release(shared.item_ring.empty[finished]);
      if (!more) break;
      softmax = next_softmax;
      __syncwarp();  // ptxas then knows that stages are the same in all lanes: uniform registers
    }
    if (threadIdx.x % 128 == 0) tma_wait_read<0>();
  }

  // The tiles without queries, evenly among blocks, when there is nothing else to do.
  DLATTN_DEVICE void store_padding() {
    if (!stores_padding<Problem>(p)) return;
    BatchWalk walk;
    const int tiles = ceil_div(p.seq_q, tile_q);
    const auto count = [&](int batch) { return (tiles - tiles_with_queries(batch)) * p.heads_q; };
    for (int i = blockIdx.x; walk.find(i, p.batch, count); i += gridDim.x) {
      const int tile = tiles_with_queries(walk.batch) + walk.rest / p.heads_q;
      store_nothing({tile, walk.rest % p.heads_q, walk.batch}, 0, threadIdx.x - 128,
                    128 * consumers);
    }
  }

  // A slab at a time, through this consumer's buffers.
  DLATTN_DEVICE void store(const Work& work, Softmax& softmax, Output& output) {
    const WorkItem at = work.item;
    const int first_query = at.tile * tile_q;
    finish_rows<Problem>(p, at.batch, at.head, first_query + first_row(), work.length.q, softmax,
                         output);
    const int lane = opaque(threadIdx.x % 32);  // or addresses are held, or spilled, between tiles
    const int row = first_row() % 64 + lane % 16;
    static_assert(VTile::slabs % o_slabs == 0, "the first slab finds the first buffer free");
#pragma unroll
    for (int slab = 0; slab < VTile::slabs; ++slab) {
      const OSlab& staged = shared.o[warpgroup][slab % o_slabs];
      if (threadIdx.x % 128 == 0) tma_wait_read<o_slabs - 1>();
      named_barrier_sync(rows_free + warpgroup, 128);
#pragma unroll
      for (int n = 0; n < least(8, dim_v / 8 - 8 * slab); n += 2) {
        store_columns(staged, row, n, lane, output, 8 * slab + n);
      }
      fence_proxy_async();
      named_barrier_sync(rows_staged + warpgroup, 128);
      if (threadIdx.x % 128 == 0) {
        const MappedEntry entry = p.mapped_entry<Problem::ragged>(Mapped::o, at.batch);
        tma_store_4d(m.o, staged.address(), slab * 64, entry.row + first_query + 64 * warpgroup,
                     at.head, entry.batch);
        tma_commit();
      }
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void fwd_sm90(const MappedFwdParams& params) {
  using Kernel = FwdSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(params, shared);
  kernel.init();
  if (warp_index() / 4 == 0) {
    give_registers<Kernel::producer_registers>();
    kernel.produce();
  } else {
    take_registers<Kernel::consumer_registers>();
    kernel.attend();
    if (params.p.items_taken != nullptr) kernel.store_padding();
  }
}

}  // namespace dlattn
