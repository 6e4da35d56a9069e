// How the parts of an item meet: those of a block's teams in its shared memory; those of blocks in each
// other's if a cluster has the item, else in the workspace. There the block that has the item's last tile
// collects what others leave, of which some have collected what those before them left (attn/part_groups.cuh).
// Each number of a part says by itself that it is there: no fence, barrier or mark is behind the last one. A
// block opens the part that it will leave when it begins: it makes all numbers absent ones, and says so by a
// mark which is drawn when the plan is made, and which the collector takes away. So nobody has to clear the
// workspace, whose other contents differ from the mark.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/part_groups.cuh"
#include "attn/softmax.cuh"
#include "kernels/decode_boxes.cuh"
#include "kernels/decode_loads.cuh"
#include "tile/unit.cuh"

namespace dlattn {

template <class Problem, class Tiling>
using DecodeCopies =
    Either<Tiling::boxes, DecodeBoxes<Problem, Tiling>, DecodeLoads<Problem, Tiling>>;

template <class Problem, class Tiling>
struct DecodeParts : DecodeCopies<Problem, Tiling> {
  using Base = DecodeCopies<Problem, Tiling>;
  using Base::await_team;
  using Base::dim_v;
  using Base::first_head;
  using Base::most_blocks;
  using Base::p;
  using Base::ragged;
  using Base::row_group;
  using Base::row_of;
  using Base::rows;
  using Base::shared;
  using Base::team;
  using Base::teams;
  using T = typename Base::T;
  using typename Base::Attempt;
  using typename Base::Beginning;
  using typename Base::Mailbox;
  using typename Base::Packet;
  using typename Base::Part;
  using typename Base::Row;
  using typename Base::SharedMemory;
  using typename Base::Tiles;
  static constexpr int threads = 32 * Base::warps;
  using Output = Accumulator<1, dim_v / 8>;
  using Softmax = OnlineSoftmax<1, wants_maxima<Problem>>;

  // What a block leaves to another one.
  struct Left {
    float o[rows][dim_v];
    float2 row[rows];  // reference and sum
  };

  const ScoreValues values;
  Tiles work;  // where products are

  DLATTN_DEVICE DecodeParts(const MappedDecodeParams& params, SharedMemory& shared_memory,
                            const Beginning& beginning, int warp, Attempt attempt = {})
      : Base(params, shared_memory, beginning, warp, attempt),
        values(params.p),
        work(Base::loads) {}

  // All that needs nothing that a kernel before may write.
  static DLATTN_DEVICE void open(const MappedDecodeParams& m, SharedMemory& shared,
                                 const Beginning& beginning, int warp) {
    if constexpr (Tiling::boxes) Base::open_rings(m, shared, warp);
    if constexpr (Tiling::clusters) open_mailbox(m.p, shared.mailbox);
    Base::prefetch_first(m.p, beginning.tiles, warp);
  }

  // Leaves this warp's rows where the team's last tile was.
  DLATTN_DEVICE void share(const Softmax& softmax, Output& output) {
    Part& s_part = Base::part(team);
    if constexpr (Base::parts_apart) {
      __syncthreads();  // those of the item before have been read
    } else {
      await_team();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * row_group + Output::row(0, 2 * i);
      const float sum = reduce_row(softmax.row_sum[i], [](float a, float b) { return a + b; });
      if (threadIdx.x % 4 == 0) {
        shared.rows[team][row] = {softmax.reference[i], sum};
      }
      if (row >= p.seq_q * p.heads_per_block.number) continue;
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        *reinterpret_cast<float2*>(&s_part.o[row][Output::column(n, 0)]) =
            float2{output.at[0][n][2 * i], output.at[0][n][2 * i + 1]};
      }
    }
  }

  // Some columns of a partial row: as many as a packet has in a cluster; half of them elsewhere, so that more
  // threads have some.
  struct Unit {
    static constexpr int columns = Tiling::clusters ? 8 : 4;
    float reference = Softmax::no_key, sum = 0.f, o[columns] = {};

    // Numbers that are not there: a NaN that arithmetic never has, whose only one is 0x7fffffff (CUDA C++
    // Programming Guide, "Floating-Point Standard").
    static constexpr uint32 absent_bits = 0xffffffffu;
    static DLATTN_DEVICE Unit absent() {
      Unit unit;
      unit.reference = unit.sum = __uint_as_float(absent_bits);
#pragma unroll
      for (int i = 0; i < columns; ++i) unit.o[i] = unit.sum;
      return unit;
    }
    // Two numbers arrive at once.
    DLATTN_DEVICE bool is_there() const {
      uint32 largest = __float_as_uint(sum);
#pragma unroll
      for (int i = 0; i < columns; i += 2) largest = umax(largest, __float_as_uint(o[i]));
      return largest != absent_bits;
    }

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
  };
  static constexpr int row_units = Problem::head_dim_v / Unit::columns;

  // Adds `count` units or fewer, all of which are loaded before the first is waited for.
  template <int count, class Load>
  static DLATTN_DEVICE void add_units(Unit& unit, int existing, Load load) {
    Unit other[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i < existing) load(other[i], i);
    }
    add_units(unit, other);
  }
  // The same of units whose numbers may be absent yet; meanwhile() is what is done before they are needed.
  template <int count, class Load, class Meanwhile>
  static DLATTN_DEVICE void add_awaited(Unit& unit, int existing, Load load, Meanwhile meanwhile) {
    Unit other[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i < existing) other[i] = Unit::absent();
    }
    for (bool all = false; !all;) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (!other[i].is_there()) load(other[i], i);
      }
      meanwhile();
      all = true;
#pragma unroll
      for (int i = 0; i < count; ++i) all &= other[i].is_there();
      if (!all) __nanosleep(40);  // blocks that are still at work share L2 with those that ask
    }
    add_units(unit, other);
  }
  template <int count>
  static DLATTN_DEVICE void add_units(Unit& unit, const Unit (&other)[count]) {
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
      const float2 of_row = shared.rows[t][row];
      part.reference = of_row.x, part.sum = of_row.y;
      load_unit(part.o, &Base::part(t).o[row][column]);
    });
    return unit;
  }

  DLATTN_DEVICE void store(Unit& unit, int row, int column) const {
    const auto [query, head_in_item] = row_of(p, row);
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

  // Calls use(row, column) for each unit of an item that this thread has of all threads of the block.
  template <class Use>
  DLATTN_DEVICE void for_each_unit(Use use) const {
    for (int i = threadIdx.x; i < units_of_item(p); i += threads) {
      use(i / row_units, i % row_units * Unit::columns);
    }
  }
  static DLATTN_DEVICE int units_of_item(const Params& p) {
    return p.seq_q * p.heads_per_block.number * row_units;
  }

  // ---- A block that has an item to itself ----

  // All threads, whose teams have shared their parts of the rows.
  DLATTN_DEVICE void conclude_alone() const {
    __syncthreads();
    for_each_unit([&](int row, int column) {
      Unit unit = merge_teams(row, column);
      store(unit, row, column);
    });
  }

  // ---- Blocks that share items, through the workspace ----

  DLATTN_DEVICE Left& left_by(int block) const { return static_cast<Left*>(p.parts.data)[block]; }

  // Parts that a block adds to its own: those of `count` teams, from `nearest` on each `step`-th below.
  struct Sources {
    int nearest, step, count;
    DLATTN_DEVICE int team(int i) const { return nearest - i * step; }
  };
  // Of them, that a thread has on their way: many, if it has a unit or two, which wait for L2 more than for
  // each other.
  static constexpr int few = 8, many = 16;
  using Groups = PartGroups<few + 1, many>;

  DLATTN_DEVICE Sources sources() const {
    const int nearest = work.team - 1;
    if (work.completes()) {
      const int others = work.tile == 0 ? 0 : work.team - work.first_team();
      return {nearest, Groups::step(others), Groups::added_last(others)};
    }
    if (!work.may_exceed(Groups::most_by_one)) return {};
    const int last = work.last_team();
    return {nearest, 1, Groups::added_to(last - work.team, last - work.first_team())};
  }

  DLATTN_DEVICE void leave(const Unit& unit, int row, int column) const {
    Left& left = left_by(blockIdx.x);
    store_pairs(reinterpret_cast<float4*>(&left.o[row][column]),
                float4{unit.o[0], unit.o[1], unit.o[2], unit.o[3]});
    if (column == 0) store_pairs(&left.row[row], float2{unit.reference, unit.sum});
  }

  // Of the first item, if this block does not complete it: it completes all others. The mark is released by
  // another lane than the one that orders copies: a release waits for those.
  DLATTN_DEVICE void open_part() const {
    if (work.left == 0 || work.completes()) return;
    for_each_unit([&](int row, int column) { leave(Unit::absent(), row, column); });
    __syncthreads();
    if (threadIdx.x == threads - 1) store_release(p.parts.marks + blockIdx.x, p.parts.mark);
  }
  // Their numbers are absent or there.
  DLATTN_DEVICE void await_open(const Sources& from) const {
    for (int i = threadIdx.x; i < from.count; i += threads) {
      uint64& mark = p.parts.marks[work.block_of(from.team(i))];
      while (load_acquire(&mark) != p.parts.mark) {
      }
      mark = 0;
    }
  }

  // Of the teams of warps, and of other blocks, of which the first are on their way meanwhile.
  DLATTN_DEVICE Unit merge(const Sources& from, int row, int column) const {
    if (from.count == 0) return merge_teams(row, column);
    Unit unit;
    int done = 0;
    const auto load = [&](Unit& part, int i) {
      const Left& left = left_by(work.block_of(from.team(done + i)));
      const float4 o = load_pairs(reinterpret_cast<const float4*>(&left.o[row][column]));
      const float2 of_row = load_pairs(&left.row[row]);
      part.reference = of_row.x, part.sum = of_row.y;
      part.o[0] = o.x, part.o[1] = o.y, part.o[2] = o.z, part.o[3] = o.w;
    };
    bool merged = false;
    const auto meanwhile = [&] {
      if (merged) return;
      merged = true;
      unit = merge_teams(row, column);
    };
    while (done < from.count) {
      const int rest = from.count - done;
      if (rows == 16 && rest > few) {
        add_awaited<many>(unit, rest, load, meanwhile);
        done += many;
      } else {
        add_awaited<few>(unit, rest, load, meanwhile);
        done += few;
      }
    }
    return unit;
  }

  // All threads, whose teams have shared their parts of the rows.
  DLATTN_DEVICE void conclude(const Sources& from) {
    const bool completes = work.completes();
    __syncthreads();
    for_each_unit([&](int row, int column) {
      Unit unit = merge(from, row, column);
      if (completes) {
        store(unit, row, column);
      } else {
        leave(unit, row, column);
      }
    });
    if (!Base::parts_apart) __syncthreads();
  }

  // ---- Blocks of a cluster, which have an item together ----

  // The units that this block of a cluster puts together, of `each` or fewer.
  struct OwnUnits {
    int each, first, count;
    DLATTN_DEVICE OwnUnits(const Params& p, int rank, int blocks)
        : each(small_quotient(units_of_item(p) + blocks - 1, blocks)),
          first(rank * each),
          count(most(0, least(each, units_of_item(p) - first))) {}
  };

  // Ready to be sent parts by the other blocks of the cluster.
  static DLATTN_DEVICE void open_mailbox(const Params& p, Mailbox& mailbox) {
    if (threadIdx.x == 0) {
      const int blocks = cluster_blocks();
      mbarrier_init(mailbox.full, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect(mailbox.full,
                             blocks * OwnUnits(p, cluster_rank(), blocks).count * Packet::bytes);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  // All threads of all blocks of a cluster, whose teams have shared their parts of the rows: what this
  // block has of each unit goes to the block that puts it together.
  DLATTN_DEVICE void conclude_together() {
    __syncthreads();
    cluster_wait();
    const OwnUnits own(p, work.rank, work.blocks);
    for (int i = threadIdx.x; i < units_of_item(p); i += threads) {
      const Unit unit = merge_teams(i / row_units, i % row_units * Unit::columns);
      const int owner = small_quotient(i, own.each);
      const Packet& packet = shared.mailbox.packets[own.first + i - owner * own.each];
      const uint32 to = address_in_block(shared_address(&packet), owner);
      const uint32 full = address_in_block(shared_address(&shared.mailbox.full), owner);
      store_in_block(to, float4{unit.o[0], unit.o[1], unit.o[2], unit.o[3]}, full);
      store_in_block(to + 16, float4{unit.o[4], unit.o[5], unit.o[6], unit.o[7]}, full);
      store_in_block(to + 32, float2{unit.reference, unit.sum}, full);
    }
    if (threadIdx.x >= own.count) return;
    mbarrier_wait(shared.mailbox.full, 0);
    for (int i = threadIdx.x; i < own.count; i += threads) {
      Unit unit;
      add_units<most_blocks>(unit, work.blocks, [&](Unit& part, int block) {
        const Packet& packet = shared.mailbox.packets[block * own.each + i];
        load_unit(part.o, packet.o);
        part.reference = packet.reference;
        part.sum = packet.sum;
      });
      const int at = own.first + i;
      store(unit, at / row_units, at % row_units * Unit::columns);
    }
  }
};

}  // namespace dlattn
