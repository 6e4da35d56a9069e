// Attention of few queries to many keys: decoding, with or without speculation, for sm_80 and up.
//
// It takes as long as reading K and V, so all is about having enough of them on their way. The queries of
// all heads that share keys are the rows of one item (so that grouped heads read each key once), and
// blocks, one per multiprocessor, have equal shares of the key tiles of all items (attn/shares.cuh). In a
// block, teams of warps have keys of their own, and rings of key and value tiles that they fill by
// themselves: between items there is no barrier but a team's, and a team of one warp needs none. A
// block's copies run ahead of its products, across items.
//
// At the end of an item the teams' partial outputs meet in shared memory. If other blocks have tiles of
// the item, the one that has its last tile collects what they leave in the workspace. A block says that
// its part is there by a mark which is drawn when the plan is made, and which the collector takes away:
// nobody has to clear the workspace, whose other contents differ from the mark.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/softmax.cuh"
#include "kernels/decode_loads.cuh"
#include "ptx/grid.cuh"
#include "tile/unit.cuh"

namespace dlattn {

template <class Problem, class Tiling>
struct Decode : DecodeLoads<Problem, Tiling> {
  using Base = DecodeLoads<Problem, Tiling>;
  using Base::await_team;
  using Base::dim_qk;
  using Base::dim_v;
  using Base::first_head;
  using Base::first_key;
  using Base::load_next;
  using Base::loads;
  using Base::p;
  using Base::ragged;
  using Base::row_group;
  using Base::rows;
  using Base::shared;
  using Base::stages;
  using Base::team;
  using Base::teams;
  using Base::tile_k;
  using T = typename Base::T;
  using Mask = typename Problem::Mask;
  using typename Base::Left;
  using typename Base::Packet;
  using Base::row_units;
  using typename Base::Part;
  using typename Base::Products;
  using typename Base::SharedMemory;
  using typename Base::Tiles;
  static constexpr int threads = 32 * Base::warps;
  // Keys of which a warp has scores at a time: as many as registers allow.
  static constexpr int step_k = least(tile_k, Tiling::warpgroups ? 64 : dim_qk > 128 ? 16 : 32);
  using Queries = RegisterLeft<T, 1, dim_qk / 16>;
  using Scores = Accumulator<1, step_k / 8>;
  using Output = Accumulator<1, dim_v / 8>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;

  // One of a lane's two rows: a query of a head.
  struct Row {
    int query, head;  // head in the item's
  };

  const ScoreValues values;
  Tiles work;  // where products are
  int stage = 0;

  DLATTN_DEVICE Decode(const Params& params, SharedMemory& shared_memory)
      : Base(params, shared_memory), values(params), work(loads) {}

  DLATTN_DEVICE Row row_of(int row) const {
    return {row / p.heads_per_block, row % p.heads_per_block};
  }
  DLATTN_DEVICE void read(Queries& queries, const Row (&row)[2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = row[i].query < work.length.q;
      const T* g_row =
          p.q.template rows<T, ragged>(work.batch, first_head(work) + row[i].head, row[i].query);
#pragma unroll
      for (int k = 0; k < dim_qk / 16; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = 16 * k + 8 * half + 2 * (lane % 4);
          const bool valid = exists && (dim_qk == Problem::head_dim_qk ||
                                        16 * k + 8 * half < Problem::head_dim_qk);
          queries.at[0][k][2 * half + i] =
              valid ? __ldg(reinterpret_cast<const uint32*>(g_row + column)) : 0;
        }
    }
  }

  DLATTN_DEVICE void edit(Scores& scores, const Row (&row)[2], int first) {
    Problem::Score::prepare(scores, values);
    const int key = first + Scores::column(0, 0);
    scores.for_each([&](float& score, int, int n, int i) {
      const Row& at = row[i / 2];
      const Position position{
          work.batch, first_head(work) + at.head, work.length.q, work.length.kv, at.query, key,
          0,          Scores::column_step(n, i)};
      score = Problem::Score::apply(score, position, values);
    });
  }
  DLATTN_DEVICE void mask(Scores& scores, const Row (&row)[2], int first) {
    scores.for_each([&](float& score, int, int n, int i) {
      const int key = first + Scores::column(n, i);
      if (!Mask::keep(row[i / 2].query, key, work.length, p)) score = -infinity();
    });
  }

  // This team's keys of a tile: scores, probabilities, output.
  DLATTN_DEVICE void attend(Interval full, const Queries& queries, const Row (&row)[2],
                            Softmax& softmax, Output& output) {
    auto& s_keys = shared.stage[stage][team].keys;
#pragma unroll 1
    for (int step = 0; step < tile_k; step += step_k) {
      const int first = first_key(work) + step;
      if (first >= work.keys.last) return;
      Scores scores;
      Products::scores(scores, queries, s_keys.k, step);
      edit(scores, row, first);
      if (!full.contains({first, first + step_k})) mask(scores, row, first);
      float factor[2];
      if (softmax.advance(scores, factor)) softmax.rescale(output, factor);
      softmax.add(softmax.exponentiate(scores));
      Products::add(output, RegisterLeft<T, 1, step_k / 16>(scores), s_keys.v, step);
    }
  }

  // Leaves this warp's rows where the team's last tile was.
  DLATTN_DEVICE void share(const Softmax& softmax, Output& output) {
    Part& s_part = shared.stage[stage][team].part;
    await_team();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * row_group + Output::row(0, 2 * i);
      const float sum = reduce_row(softmax.row_sum[i], [](float a, float b) { return a + b; });
      if (threadIdx.x % 4 == 0) {
        shared.reference[team][row] = softmax.reference[i];
        shared.sum[team][row] = sum;
      }
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        *reinterpret_cast<float2*>(&s_part.o[row][Output::column(n, 0)]) =
            float2{output.at[0][n][2 * i], output.at[0][n][2 * i + 1]};
      }
    }
    __syncthreads();
  }

  DLATTN_DEVICE Left& left_by(int block) const { return static_cast<Left*>(p.parts.data)[block]; }

  // What the teams of blocks from `first` to this one have left of this item is there.
  DLATTN_DEVICE void await_parts(int first) const {
    for (int other = first + threadIdx.x; other < work.team; other += threads) {
      uint64& mark = p.parts.marks[work.block_of(other)];
      while (load_acquire(&mark) != p.parts.mark) {
      }
      mark = 0;
    }
    __syncthreads();
  }
  DLATTN_DEVICE void say_part() const {
    __syncthreads();
    if (threadIdx.x == 0) store_release(p.parts.marks + blockIdx.x, p.parts.mark);
  }

  // Eight columns of a partial row.
  struct Unit {
    static constexpr int columns = 8;
    float reference = Softmax::no_key, sum = 0.f, o[columns] = {};

    // Makes another one of it, that nothing will exceed.
    DLATTN_DEVICE void raise(float other) {
      const float raised = fmaxf(reference, other), weight = exp2_approx(reference - raised);
      reference = raised;
      sum *= weight;
#pragma unroll
      for (int i = 0; i < columns; ++i) o[i] *= weight;
    }
    DLATTN_DEVICE void add(const Unit& other) {
      const float weight = exp2_approx(other.reference - reference);
      sum = fmaf(weight, other.sum, sum);
#pragma unroll
      for (int i = 0; i < columns; ++i) o[i] = fmaf(weight, other.o[i], o[i]);
    }
    DLATTN_DEVICE void take(int first, float4 four) {
      o[first] = four.x, o[first + 1] = four.y, o[first + 2] = four.z, o[first + 3] = four.w;
    }
  };

  // Adds `count` units or fewer, all of which are loaded before the first is waited for.
  template <int count, class Load>
  static DLATTN_DEVICE void add_units(Unit& unit, int existing, Load load) {
    Unit other[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i < existing) load(other[i], i);
    }
    float largest = other[0].reference;
#pragma unroll
    for (int i = 1; i < count; ++i) largest = fmaxf(largest, other[i].reference);
    unit.raise(largest);
#pragma unroll
    for (int i = 0; i < count; ++i) unit.add(other[i]);
  }

  DLATTN_DEVICE Unit merge_teams(int row, int column) const {
    Unit unit;
    add_units<teams>(unit, teams, [&](Unit& part, int t) {
      const float* s_o = &shared.stage[stage][t].part.o[row][column];
      part.reference = shared.reference[t][row];
      part.sum = shared.sum[t][row];
      load_unit(part.o, s_o);
    });
    return unit;
  }

  // Of the teams of warps, and if other blocks from the team `first` on have left parts, of these.
  DLATTN_DEVICE Unit merge(int first, int row, int column) const {
    Unit unit = merge_teams(row, column);
    constexpr int at_a_time = 8;
    for (int other = first; other < work.team; other += at_a_time) {
      add_units<at_a_time>(unit, work.team - other, [&](Unit& part, int i) {
        const Left& left = left_by(work.block_of(other + i));
        const auto* g_o = reinterpret_cast<const float4*>(&left.o[row][column]);
        part.reference = load_relaxed(&left.reference[row]);
        part.sum = load_relaxed(&left.sum[row]);
        part.take(0, load_relaxed(g_o));
        part.take(4, load_relaxed(g_o + 1));
      });
    }
    return unit;
  }

  DLATTN_DEVICE void leave(const Unit& unit, int row, int column) const {
    Left& left = left_by(blockIdx.x);
    store_unit(&left.o[row][column], unit.o);
    if (column == 0) {
      left.reference[row] = unit.reference;
      left.sum[row] = unit.sum;
    }
  }

  DLATTN_DEVICE void store(Unit& unit, int row, int column) const {
    const auto [query, head_in_item] = row_of(row);
    const int head = first_head(work) + head_in_item;
    const bool padded = query >= work.length.q;
    if constexpr (Problem::sink) {
      const float sink = p.sink(head) * log2_e;
      unit.raise(sink);
      unit.sum += exp2_approx(sink - unit.reference);
    }
    if (wants_row_stats<Problem> && column == 0) {
      const float factor = Problem::Score::factor(values);
      Softmax softmax(factor);
      softmax.reference[0] = unit.reference;
      softmax.row_sum[0] = unit.sum;
      const RowStats stats = padded ? RowStats() : RowStats(softmax, 0, factor);
      stats.store<Problem>(p, work.batch, head, query, padded);
    }
    if (query >= p.o.template stored_rows<ragged>(work.length.q, p.seq_q)) return;
    const float scale = padded || unit.sum == 0.f ? 0.f : reciprocal_approx(unit.sum);
    float values[Unit::columns];
#pragma unroll
    for (int i = 0; i < Unit::columns; ++i) values[i] = padded ? 0.f : unit.o[i] * scale;
    store_unit(p.o.template rows<T, ragged>(work.batch, head, query) + column, values);
  }

  // All threads, once every team has shared its part of the rows.
  DLATTN_DEVICE void conclude(bool completes, int first) {
    constexpr int units = Problem::head_dim_v / Unit::columns;
    const bool collects = completes && first < work.team;
    if (collects) await_parts(first);
    const int existing = p.seq_q * p.heads_per_block;
    for (int i = threadIdx.x; i < existing * units; i += threads) {
      const int row = i / units, column = i % units * Unit::columns;
      Unit unit = merge(collects ? first : work.team, row, column);
      if (completes) {
        store(unit, row, column);
      } else {
        leave(unit, row, column);
      }
    }
    if (!completes) say_part();
    __syncthreads();
  }

  // Units of an item that each block of a cluster puts together, and those of this one.
  DLATTN_DEVICE int units_of_item() const { return p.seq_q * p.heads_per_block * row_units; }
  DLATTN_DEVICE int units_of_block() const { return ceil_div(units_of_item(), work.blocks); }
  DLATTN_DEVICE int own_units() const {
    const int each = units_of_block();
    return most(0, least(each, units_of_item() - work.rank * each));
  }

  // Ready to be sent parts by the other blocks of the cluster.
  DLATTN_DEVICE void open_mailbox() {
    if (threadIdx.x == 0) {
      mbarrier_init(shared.mailbox.full, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect(shared.mailbox.full, work.blocks * own_units() * Packet::bytes);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  // All threads of all blocks of a cluster, once every team has shared its part of the rows: what this
  // block has of each unit goes to the block that puts it together.
  DLATTN_DEVICE void conclude_together() {
    cluster_wait();
    const int each = units_of_block();
    for (int i = threadIdx.x; i < units_of_item(); i += threads) {
      const Unit unit = merge_teams(i / row_units, i % row_units * Unit::columns);
      const int owner = i / each;
      const Packet& packet = shared.mailbox.packets[work.rank * each + i % each];
      const uint32 to = shared_address_in(&packet, owner);
      const uint32 full = shared_address_in(&shared.mailbox.full, owner);
      send(to, float4{unit.o[0], unit.o[1], unit.o[2], unit.o[3]}, full);
      send(to + 16, float4{unit.o[4], unit.o[5], unit.o[6], unit.o[7]}, full);
      send(to + 32, float2{unit.reference, unit.sum}, full);
    }
    if (threadIdx.x >= own_units()) return;
    mbarrier_wait(shared.mailbox.full, 0);
    for (int i = threadIdx.x; i < own_units(); i += threads) {
      constexpr int at_a_time = 8;
      Unit unit;
#pragma unroll 1
      for (int other = 0; other < work.blocks; other += at_a_time) {
        add_units<at_a_time>(unit, work.blocks - other, [&](Unit& part, int block) {
          const Packet& packet = shared.mailbox.packets[(other + block) * each + i];
          load_unit(part.o, packet.o);
          part.reference = packet.reference;
          part.sum = packet.sum;
        });
      }
      const int at = work.rank * each + i;
      store(unit, at / row_units, at % row_units * Unit::columns);
    }
  }

  // One item, or what this block has of it.
  DLATTN_DEVICE void visit_item() {
    const Row row[2] = {row_of(16 * row_group + Scores::row(0, 0)),
                        row_of(16 * row_group + Scores::row(0, 2))};
    Queries queries;
    read(queries, row);
    Softmax softmax(Problem::Score::factor(values));
    Output output;
    output.clear();
    const Interval full = Mask::full_keys({0, work.length.q}, work.length, p);
    int warming = Tiling::warm && cold;
    cold = false;
    if constexpr (Tiling::clusters) {
      if (work.left > 0) walk(full, queries, row, softmax, output, warming);
      share(softmax, output);
      conclude_together();
      work.left = 0;
    } else {
      const bool completes = work.completes();
      const int first_team = work.first_team();
      walk(full, queries, row, softmax, output, warming);
      share(softmax, output);
      conclude(completes, first_team);
      advance();
    }
  }
  bool cold = true;
  DLATTN_DEVICE void walk(Interval full, const Queries& queries, const Row (&row)[2],
                          Softmax& softmax, Output& output, int warming) {
#pragma unroll 1
    for (int rest = work.tile - work.last_of_item();; --rest) {
      if (!warming) {
        Base::await_tile();
        load_next(stage == 0 ? stages - 1 : stage - 1);
      }
      attend(full, queries, row, softmax, output);
      if (Tiling::warm && warming) {
        warming = 0;
        softmax = Softmax(Problem::Score::factor(values));
        output.clear();
        ++rest;
        continue;
      }
      if (rest == 0) break;
      advance();
    }
  }

  DLATTN_DEVICE void advance() {
    work.advance();
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  DLATTN_DEVICE void run() {
#pragma unroll 1
    for (int ahead = 0; ahead < stages - 1; ++ahead) load_next(ahead);
    if constexpr (Tiling::clusters) {
      visit_item();
    } else {
#pragma unroll 1
      while (work.left > 0) visit_item();
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void decode(const Params& p) {
  using Kernel = Decode<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);
  static_assert(sizeof(typename Kernel::Left) == Problem::part_bytes);
  if constexpr (Tiling::early) release_next_kernel();
  const bool reads = Problem::paged_k || Problem::paged_v || Problem::ragged ||
                     p.seq_len_q.data != nullptr || p.seq_len_kv.data != nullptr;
  if (Tiling::early && reads) await_kernels_before();
  Kernel kernel(p, shared);
  if constexpr (Tiling::clusters) kernel.open_mailbox();
  if constexpr (Tiling::early) await_kernels_before();
  kernel.run();
}

}  // namespace dlattn
