// Attention forward for Hopper: wgmma, TMA, warp specialisation (FlashAttention-3, section 3).
//
// A block has one producer warpgroup, of which one warp drives the copy engine, and two or three
// consumer warpgroups, each with 64 query rows of a tile. Key tiles are walked from the last to the
// first. In the steady loop a consumer starts the scores of one tile, then the output of the tile
// before it, and does the softmax of the first while the tensor cores work on the second.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/schedule.cuh"
#include "attn/seqlen.cuh"
#include "attn/softmax.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/pipeline.cuh"
#include "tile/slab_tile.cuh"

namespace dlattn {

template <int consumers_, int tile_k_, int stages_, bool ping_pong_, bool aliased_>
struct Sm90FwdTiling {
  static constexpr int consumers = consumers_;  // warpgroups, of 64 query rows each
  static constexpr int tile_q = 64 * consumers, tile_k = tile_k_;
  static constexpr int stages = stages_;         // key tiles, and value tiles, in shared memory
  static constexpr bool ping_pong = ping_pong_;  // consumers take turns at the tensor cores
  static constexpr bool aliased = aliased_;      // o is staged over q, for want of shared memory
};

// Params, and what the copy engine needs beside them.
struct alignas(64) MappedParams {
  TensorMap q, k, v, o;  // boxes: tile_q, tile_k, tile_k and 64 rows of 64 columns
  Params p;
};

template <class Problem, class Tiling>
struct FwdSm90 {
  using T = typename Problem::Element;
  static constexpr int consumers = Tiling::consumers, stages = Tiling::stages;
  static constexpr int tile_q = Tiling::tile_q, tile_k = Tiling::tile_k;
  static constexpr int dim_qk = round_up(Problem::head_dim_qk, 16);
  static constexpr int dim_v = Problem::value_columns;  // head_dim_v, up to a width of wgmma
  static constexpr int producer_registers = consumers == 2 ? 24 : 32;
  static constexpr int consumer_registers = consumers == 2 ? 240 : 160;

  using QTile = SlabTile<T, tile_q, dim_qk>;
  using OTile = SlabTile<T, tile_q, dim_v>;
  using KTile = SlabTile<T, tile_k, dim_qk>;
  using VTile = SlabTile<T, tile_k, dim_v>;
  using Scores = Accumulator<1, tile_k / 8>;
  using Output = Accumulator<1, dim_v / 8>;
  using Probabilities = RegisterLeft<T, 1, tile_k / 16>;
  using Softmax = OnlineSoftmax<1>;

  struct Apart {
    QTile q;
    OTile o;
  };
  struct Aliased {
    union {
      QTile q;
      OTile o;  // each warpgroup's rows, once it has read its rows of q for the last time
    };
  };

  struct SharedMemory : Either<Tiling::aliased, Aliased, Apart> {
    KTile k[stages];
    VTile v[stages];
    Ring<1> q_ring;
    Ring<stages> k_ring, v_ring;
  };

  // Named barriers, by event.
  enum Barrier {
    values_cleared = 1,
    turn = 2,         // + warpgroup
    rows_free = 5,    // + warpgroup
    rows_staged = 8,  // + warpgroup
  };

  // What a query tile means for both roles.
  struct Work {
    WorkItem item;
    Lengths length;
    Interval queries;  // that exist
    Interval full;     // keys that every query attends to
    int first_tile, last_tile;

    DLATTN_DEVICE Work(const Params& p, int index)
        : item(tile_of_head(index, ceil_div(p.seq_q, tile_q), p.heads_q)),
          length(p, item.batch),
          queries{item.tile * tile_q, least((item.tile + 1) * tile_q, length.q)},
          full(Problem::Mask::full_keys(queries, length, p)) {
      const Interval keys = Problem::Mask::keys(queries, length, p);
      const bool none = queries.empty() || keys.empty();
      first_tile = none ? 0 : keys.first / tile_k;
      last_tile = none ? -1 : ceil_div(keys.last, tile_k) - 1;
    }
    DLATTN_DEVICE bool empty() const { return last_tile < first_tile; }
    DLATTN_DEVICE bool is_full(int tile) const {
      return full.contains({tile * tile_k, (tile + 1) * tile_k});
    }
  };

  const MappedParams& m;
  const Params& p;
  SharedMemory& shared;
  const int warpgroup;  // among the consumers
  const int first_row;  // of this warp, in the tile

  DLATTN_DEVICE FwdSm90(const MappedParams& params, SharedMemory& shared_memory)
      : m(params),
        p(params.p),
        shared(shared_memory),
        warpgroup(warp_index() / 4 - 1),
        first_row(16 * (warp_index() - 4)) {}

  // Calls visit(work) for each query tile that the schedule gives this block.
  template <class Visit>
  DLATTN_DEVICE void for_each_work(Visit visit) const {
    const int last = p.schedule[blockIdx.x + 1];
    for (int i = p.schedule[blockIdx.x]; i < last; ++i) visit(Work(p, p.schedule[i]));
  }

  DLATTN_DEVICE void init() {
    if (threadIdx.x == 0) {
      tma_prefetch(m.q);
      tma_prefetch(m.k);
      tma_prefetch(m.v);
      tma_prefetch(m.o);
      shared.q_ring.init(consumers);
      shared.k_ring.init(consumers);
      shared.v_ring.init(consumers);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // ---- Producer: one warp, of which one lane gives the orders ----

  // Fills the next buffer of a ring with a tile of keys or values.
  template <class Tile>
  DLATTN_DEVICE void load(Tile (&tiles)[stages], Ring<stages>& ring, Place<stages>& place,
                          const TensorMap& map, int tile, int head, int batch) {
    mbarrier_wait(ring.empty[place.stage], place.parity ^ 1);
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(ring.full[place.stage], Tile::bytes);
      tiles[place.stage].load(map, ring.full[place.stage], tile * tile_k, head, batch);
    }
    place.advance();
  }

  DLATTN_DEVICE void produce() {
    Place<1> q_place;
    Place<stages> k_place, v_place;
    for_each_work([&](const Work& work) {
      const WorkItem at = work.item;
      mbarrier_wait(shared.q_ring.empty[0], q_place.parity ^ 1);
      q_place.advance();
      if (threadIdx.x == 0) {
        if (work.empty()) {  // nothing to load, but its rows of o take the place of q
          mbarrier_arrive(shared.q_ring.full[0]);
        } else {
          mbarrier_arrive_expect(shared.q_ring.full[0], QTile::bytes);
          shared.q.load(m.q, shared.q_ring.full[0], work.queries.first, at.head, at.batch);
        }
      }
      const int head_k = at.head / p.heads_per_k, head_v = at.head / p.heads_per_v;
      // Keys run one tile ahead of values, as the consumers do.
      for (int tile = work.last_tile; tile >= work.first_tile; --tile) {
        if (tile == work.last_tile) {
          load(shared.k, shared.k_ring, k_place, m.k, tile, head_k, at.batch);
        }
        if (tile > work.first_tile) {
          load(shared.k, shared.k_ring, k_place, m.k, tile - 1, head_k, at.batch);
        }
        load(shared.v, shared.v_ring, v_place, m.v, tile, head_v, at.batch);
      }
    });
  }

  // ---- Consumer ----

  DLATTN_DEVICE void release(uint64& empty) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(empty);
  }
  DLATTN_DEVICE void await_turn() {
    if constexpr (Tiling::ping_pong) named_barrier_sync(turn + warpgroup, 256);
  }
  DLATTN_DEVICE void pass_turn() {
    if constexpr (Tiling::ping_pong) {
      named_barrier_arrive(turn + (warpgroup + 1) % consumers, 256);
    }
  }

  // Starts scores = Q K^T.
  DLATTN_DEVICE void start_scores(Scores& scores, int stage) {
    auto& d = reinterpret_cast<float(&)[tile_k / 2]>(scores.at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < dim_qk / 16; ++k) {
      WgmmaShape<tile_k>::template shared_shared<T>(
          d, shared.q.along_columns(64 * warpgroup, k), shared.k[stage].along_columns(0, k),
          k > 0);
    }
    wgmma_commit();
  }

  // Starts output += P V.
  DLATTN_DEVICE void start_output(Output& output, const Probabilities& probabilities, int stage) {
    auto& d = reinterpret_cast<float(&)[dim_v / 2]>(output.at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile_k / 16; ++k) {
      WgmmaShape<dim_v>::template register_shared<T, 1>(d, probabilities.at[0][k],
                                                        shared.v[stage].along_rows(k), 1);
    }
    wgmma_commit();
  }

  template <int m_tiles, int n_tiles>
  static DLATTN_DEVICE void tie(Accumulator<m_tiles, n_tiles>& c) {
    c.for_each([](float& value, int, int, int) { wgmma_tie(value); });
  }

  DLATTN_DEVICE void edit_and_mask(Scores& scores, const Work& work, const ScoreValues& values,
                                   int tile) {
    const int first_query = work.queries.first + first_row, first_key = tile * tile_k;
    scores.for_each([&](float& score, int, int n, int i) {
      const Position at{work.item.batch, work.item.head, first_query + Scores::row(0, i),
                        first_key + Scores::column(n, i)};
      score = Problem::Score::apply(score, at, values);
    });
    if (work.is_full(tile)) return;
    scores.for_each([&](float& score, int, int n, int i) {
      const int query = first_query + Scores::row(0, i), key = first_key + Scores::column(n, i);
      if (!Problem::Mask::keep(query, key, work.length, p)) score = -infinity();
    });
  }

  // Beyond the actual length, but inside the tensor, lies whatever the user left there: zero
  // probabilities do not silence NaN, zero values do.
  DLATTN_DEVICE void clear_padding(const Work& work, int stage) {
    const int first = work.length.kv - work.last_tile * tile_k;
    if (work.length.kv == p.seq_kv || first >= tile_k) return;
    for (int unit = threadIdx.x % 128; unit < (tile_k - first) * VTile::slabs * 8; unit += 128) {
      const int row = first + unit / (VTile::slabs * 8);
      const uint32 address = shared.v[stage].unit_address(row, unit % (VTile::slabs * 8));
      store_shared_zeros(address);
    }
    fence_proxy_async();
    named_barrier_sync(values_cleared, 128 * consumers);
  }

  DLATTN_DEVICE void consume() {
    const ScoreValues values(p);
    Place<1> q_place;
    Place<stages> k_place, v_place;
    if (Tiling::ping_pong && warpgroup == consumers - 1) named_barrier_arrive(turn, 256);
    for_each_work([&](const Work& work) {
      Softmax softmax(Problem::Score::factor(values));
      Output output;
      output.clear();
      mbarrier_wait(shared.q_ring.full[0], q_place.parity);
      q_place.advance();
      if (!work.empty()) {
        attend(work, values, softmax, output, k_place, v_place);
      } else if constexpr (!Tiling::aliased) {
        release(shared.q_ring.empty[0]);
      }
      store(work, softmax, output);
    });
    if (threadIdx.x % 128 == 0) tma_wait_read();
  }

  // After the last product that reads q, the next one may come.
  DLATTN_DEVICE void release_q(const Work& work, int tile) {
    if (!Tiling::aliased && tile == work.first_tile) release(shared.q_ring.empty[0]);
  }

  DLATTN_DEVICE void attend(const Work& work, const ScoreValues& values, Softmax& softmax,
                            Output& output, Place<stages>& k_place, Place<stages>& v_place) {
    float factor[2];
    int tile = work.last_tile;
    Scores scores;
    mbarrier_wait(shared.k_ring.full[k_place.stage], k_place.parity);
    start_scores(scores, k_place.stage);
    wgmma_wait<0>();
    tie(scores);
    release(shared.k_ring.empty[k_place.stage]);
    k_place.advance();
    release_q(work, tile);
    edit_and_mask(scores, work, values, tile);
    softmax.advance(scores, factor);
    softmax.exponentiate(scores);
    Probabilities probabilities(scores);

    mbarrier_wait(shared.v_ring.full[v_place.stage], v_place.parity);
    clear_padding(work, v_place.stage);

#pragma unroll 1
    for (--tile; tile >= work.first_tile; --tile) {
      mbarrier_wait(shared.k_ring.full[k_place.stage], k_place.parity);
      await_turn();
      start_scores(scores, k_place.stage);
      mbarrier_wait(shared.v_ring.full[v_place.stage], v_place.parity);
      start_output(output, probabilities, v_place.stage);
      pass_turn();
      wgmma_wait<1>();
      tie(scores);
      release(shared.k_ring.empty[k_place.stage]);
      k_place.advance();
      release_q(work, tile);
      edit_and_mask(scores, work, values, tile);
      const bool grew = softmax.advance(scores, factor);
      softmax.exponentiate(scores);
      wgmma_wait<0>();
      tie(output);
      release(shared.v_ring.empty[v_place.stage]);
      v_place.advance();
      probabilities = Probabilities(scores);
      if (grew) softmax.rescale(output, factor);
    }

    mbarrier_wait(shared.v_ring.full[v_place.stage], v_place.parity);
    start_output(output, probabilities, v_place.stage);
    wgmma_wait<0>();
    tie(output);
    release(shared.v_ring.empty[v_place.stage]);
    v_place.advance();
  }

  DLATTN_DEVICE void store(const Work& work, Softmax& softmax, Output& output) {
    const WorkItem at = work.item;
    finish_rows<Problem>(p, at.batch, at.head, at.tile * tile_q + first_row, work.length.q, softmax,
                         output);
    if constexpr (!Tiling::aliased) {
      // The copy engine may still be reading the rows of the tile before.
      if (threadIdx.x % 128 == 0) tma_wait_read();
      named_barrier_sync(rows_free + warpgroup, 128);
    }
    const int lane = threadIdx.x % 32;
    const int row = first_row + lane % 16;
#pragma unroll
    for (int n = 0; n < dim_v / 8; n += 2) {
      const RegisterLeft<T, 1, 1> packed(reinterpret_cast<Accumulator<1, 2>&>(output.at[0][n]));
      stmatrix_x4(shared.o.unit_address(row, n + lane / 16), packed.at[0][0][0],
                  packed.at[0][0][1], packed.at[0][0][2], packed.at[0][0][3]);
    }
    fence_proxy_async();
    named_barrier_sync(rows_staged + warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int slab = 0; slab < OTile::slabs; ++slab) {
        const uint32 rows = shared.o.address() + slab * OTile::slab_bytes + warpgroup * 64 * 128;
        tma_store_4d(m.o, rows, slab * 64, at.tile * tile_q + 64 * warpgroup, at.head, at.batch);
      }
      tma_commit();
      if constexpr (Tiling::aliased) {
        tma_wait_read();
        mbarrier_arrive(shared.q_ring.empty[0]);
      }
    }
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void fwd_sm90(const MappedParams& params) {
  using Kernel = FwdSm90<Problem, Tiling>;
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(dynamic_shared_memory);
  static_assert(sizeof(typename Kernel::SharedMemory) == Problem::shared_memory);

  Kernel kernel(params, shared);
  kernel.init();
  if (warp_index() / 4 == 0) {
    give_registers<Kernel::producer_registers>();
    if (warp_index() == 0) kernel.produce();
  } else {
    take_registers<Kernel::consumer_registers>();
    kernel.consume();
  }
}

}  // namespace dlattn
