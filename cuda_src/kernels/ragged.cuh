// Before every other kernel of a ragged problem: what they need to know of each batch entry. Its
// lengths; where its query tiles' scratch is; where the copy engine finds it; and the items that
// persistent blocks take, those of no empty tile, the longest sequences first. One block per entry.
//
// A tensor map of a ragged tensor has as many rows as the longest sequence, and as its last dimension
// elements, eight at a time: coordinates add up to an address, so the rows of an entry of length n may
// be numbered from longest - n on, at a last coordinate that makes up for it. Then the tensor ends where
// the entry does: the copy engine fills up with zeros what it loads beyond, and stores nothing there.
// To keep that coordinate positive, maps begin `longest` rows before the tensor (plans/mapped.py).
#pragma once

#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "ptx/grid.cuh"

namespace dlattn {

// Rows between one entry's delta and the next one's, with cumulative lengths.
inline constexpr int delta_gap = 128;

template <int threads_, bool counts_key_tiles_ = false>
struct RaggedTiling {
  static constexpr int threads = threads_;
  static constexpr bool counts_key_tiles = counts_key_tiles_;
};

// Rows of all entries, as cumulative lengths divide them; entries never leave the tensor.
struct CumulativeLengths {
  const int* first;  // (batch + 1); or null
  int tokens;

  DLATTN_DEVICE int begin(int b) const { return least(most(__ldg(first + b), 0), tokens); }
  DLATTN_DEVICE int length(const LengthRef& given, int b, int longest) const {
    const int own = least(most(begin(b + 1) - begin(b), 0), longest);
    return given.data == nullptr ? own : least(given.at(b, longest), tokens - begin(b));
  }
};

// Lengths as the user gave them, or as the distance to the next entry says, or full.
DLATTN_DEVICE int ragged_length(const LengthRef& given, const TensorRef& tensor, int b,
                                int longest) {
  if (given.data != nullptr || tensor.offsets == nullptr) return given.at(b, longest);
  const int64 distance = tensor.offset(b + 1) - tensor.offset(b);
  const int64 length = tensor.row > 1 ? distance / tensor.row : distance;
  return int(length < 0 ? 0 : length > longest ? longest : length);
}

// Sums of a few numbers over a block.
template <int threads, int count>
struct BlockSums {
  int* shared;  // [count]
  DLATTN_DEVICE explicit BlockSums(int* memory) : shared(memory) {
    if (threadIdx.x < count) shared[threadIdx.x] = 0;
    __syncthreads();
  }
  DLATTN_DEVICE void add(const int (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) atomicAdd(shared + i, values[i]);
    __syncthreads();
  }
};

template <class Tiling>
struct Ragged {
  static constexpr int threads = Tiling::threads;
  const Params& p;
  const RaggedRef& r;
  const CumulativeLengths cu_q, cu_kv;

  DLATTN_DEVICE explicit Ragged(const Params& params)
      : p(params),
        r(params.ragged),
        cu_q{r.cu_seqlens_q, r.tokens_q},
        cu_kv{r.cu_seqlens_kv, r.tokens_kv} {}

  DLATTN_DEVICE int length_q(int b) const {
    if (cu_q.first != nullptr) return cu_q.length(r.given_q, b, p.seq_q);
    return ragged_length(r.given_q, p.q, b, p.seq_q);
  }
  DLATTN_DEVICE int length_kv(int b) const {
    if (cu_kv.first != nullptr) return cu_kv.length(r.given_kv, b, p.seq_kv);
    return ragged_length(r.given_kv, p.k.offsets != nullptr ? p.k : p.v, b, p.seq_kv);
  }

  // Tiles of an entry's items, for each head or group of heads.
  DLATTN_DEVICE int item_tiles(int q, int kv) const {
    return r.items_of_keys ? key_tiles(kv) : ceil_div(q, r.item_rows);
  }
  // At least one, because earlier pairs' dQ is stored with an item.
  DLATTN_DEVICE int key_tiles(int kv) const { return most(1, ceil_div(kv, r.item_rows)); }

  // Where an entry's sums of dK and dV are. A block's.
  DLATTN_DEVICE void place_key_sums(int batch) const {
    __shared__ int s_before;
    int before = 0;
    for (int b = threadIdx.x; b < batch; b += threads) before += key_tiles(length_kv(b));
    BlockSums<threads, 1> sums(&s_before);
    sums.add({before});
    if (threadIdx.x == 0) r.first_key_tile(p.batch, batch) = s_before;
  }

  // A place has room for the sums of dQ of a group of heads of the longest sequence: of how many
  // groups of this one?
  DLATTN_DEVICE int bundled(int q) const {
    const int fit = ceil_div(p.seq_q, r.tile_q) / most(1, ceil_div(q, r.tile_q));
    return least(fit, p.heads_q / p.heads_per_block);
  }

  DLATTN_DEVICE void write_items(int batch, int tiles, int first, const RaggedEntry& entry) const {
    const int heads = p.heads_q / p.heads_per_block;
    const int per_wave = least(p.heads_per_wave, heads);
    for (int i = threadIdx.x; i < heads * tiles; i += threads) {
      const int first_head = i / (tiles * per_wave) * per_wave;
      const int width = least(per_wave, heads - first_head);
      const int rest = i - first_head * tiles, head = first_head + rest % width;
      const int tile = r.last_first ? tiles - 1 - rest / width : rest / width;
      const int bundle = entry.first_bundle + head / entry.bundled;
      r.items[1 + first + i] = int4{tile, head, batch, bundle};
      if (r.bundles != nullptr) r.bundles[bundle] = batch;
    }
  }

  // Where an entry begins, in elements.
  DLATTN_DEVICE static int64 begin(const TensorRef& tensor, const CumulativeLengths& cu,
                                   int batch) {
    return cu.first != nullptr ? cu.begin(batch) * tensor.row : tensor.offset(batch);
  }

  DLATTN_DEVICE void write_offset(const TensorRef& tensor, const CumulativeLengths& cu, int batch,
                                  int gap = 0) const {
    if (tensor.offsets == nullptr) return;
    auto* offsets = static_cast<int64*>(const_cast<void*>(tensor.offsets));
    offsets[batch] = (cu.begin(batch) + int64(gap) * batch) * tensor.row;
  }

  // Of tensors whose offsets nobody gave.
  DLATTN_DEVICE void write_offsets(int batch) const {
    if (cu_q.first != nullptr) {
      write_offset(p.q, cu_q, batch);
      write_offset(p.o, cu_q, batch);
      write_offset(p.stats, cu_q, batch);
      write_offset(p.score_max, cu_q, batch);
      write_offset(p.score_sum_exp, cu_q, batch);
      write_offset(p.dO, cu_q, batch);
      write_offset(p.dQ, cu_q, batch);
      write_offset(p.dStats, cu_q, batch);
      write_offset(p.delta, cu_q, batch, delta_gap);
    }
    if (cu_kv.first != nullptr) {
      write_offset(p.k, cu_kv, batch);
      write_offset(p.v, cu_kv, batch);
      write_offset(p.dK, cu_kv, batch);
      write_offset(p.dV, cu_kv, batch);
    }
  }

  DLATTN_DEVICE void write_map(Mapped map, const TensorRef& tensor, const CumulativeLengths& cu,
                               int batch, int length, int longest) const {
    const bool is_ragged = tensor.offsets != nullptr;
    r.mapped[int(map) * p.batch + batch] =
        is_ragged ? MappedEntry{longest - length,
                                int((begin(tensor, cu, batch) + length * tensor.row) / 8)}
                  : MappedEntry{0, batch};
  }

  DLATTN_DEVICE void write_maps(int batch, int q, int kv) const {
    write_map(Mapped::q, p.q, cu_q, batch, q, p.seq_q);
    write_map(Mapped::k, p.k, cu_kv, batch, kv, p.seq_kv);
    write_map(Mapped::v, p.v, cu_kv, batch, kv, p.seq_kv);
    write_map(Mapped::o, p.o, cu_q, batch, q, p.seq_q);
    write_map(Mapped::dO, p.dO, cu_q, batch, q, p.seq_q);
  }

  DLATTN_DEVICE void describe(int batch, int* s_sums) const {
    int q = length_q(batch);
    const int kv = length_kv(batch);
    // Items of long sequences take long: keys of many queries, queries of many keys.
    const auto cost = [&](int of_q, int of_kv) { return r.items_of_keys ? of_q : of_kv; };
    const int groups = p.heads_q / p.heads_per_block;
    int tiles_before = 0, items_before = 0, bundles_before = 0, items = 0, bundles = 0;
    for (int b = threadIdx.x; b < p.batch; b += threads) {
      const int other_q = length_q(b), other_kv = length_kv(b);
      const int tiles = item_tiles(other_q, other_kv) * groups;
      const int its_bundles = ceil_div(groups, bundled(other_q));
      const int own = cost(q, kv), other = cost(other_q, other_kv);
      items += tiles;
      bundles += its_bundles;
      if (b < batch) tiles_before += ceil_div(other_q, r.tile_q);
      if (other > own || (other == own && b < batch)) {
        items_before += tiles;
        bundles_before += its_bundles;
      }
    }
    BlockSums<threads, 5> sums(s_sums);
    sums.add({tiles_before, items_before, bundles_before, items, bundles});
    tiles_before = s_sums[0];
    const int tiles = item_tiles(q, kv), groups_of_bundle = bundled(q);
    int query_tiles = ceil_div(q, r.tile_q);
    if (tiles_before + query_tiles > r.row_tiles)
      q = query_tiles = 0;  // no room: more than promised
    if constexpr (Tiling::counts_key_tiles) place_key_sums(batch);
    const RaggedEntry entry{tiles_before, query_tiles, s_sums[2], groups_of_bundle};
    if (threadIdx.x == 0) {
      const_cast<int*>(static_cast<const int*>(p.seq_len_q.data))[batch] = q;
      const_cast<int*>(static_cast<const int*>(p.seq_len_kv.data))[batch] = kv;
      r.entries[batch] = entry;
      write_offsets(batch);
      if (r.mapped != nullptr) write_maps(batch, q, kv);
      if (batch == 0 && r.items != nullptr) {
        r.items[0] = int4{s_sums[3], s_sums[4], 0, 0};
        *p.items_taken = 0;
        if (p.shares_taken != nullptr) *p.shares_taken = 0;
      }
    }
    if (r.items != nullptr) write_items(batch, tiles, s_sums[1], entry);
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void ragged(const Params& p) {
  __shared__ int s_sums[5];
  launch_dependents();
  Ragged<Tiling>(p).describe(blockIdx.x, s_sums);
}

}  // namespace dlattn
