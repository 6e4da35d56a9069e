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
    for (int i = 0; i < count; ++i) {
      const int of_warp = __reduce_add_sync(0xffffffffu, values[i]);
      if (threadIdx.x % 32 == 0) atomicAdd(shared + i, of_warp);
    }
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
    return r.items_of_keys ? key_tiles(kv) : r.item_rows.ceil(q);
  }
  // At least one, because earlier pairs' dQ is stored with an item.
  DLATTN_DEVICE int key_tiles(int kv) const { return most(1, r.item_rows.ceil(kv)); }

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
    const int fit = r.tile_q.ceil(p.seq_q) / most(1, r.tile_q.ceil(q));
    return least(fit, r.groups.number);
  }

  DLATTN_DEVICE void write_items(int batch, int tiles, int first, const RaggedEntry& entry) const {
    const int groups = r.groups.number;
    for (int i = threadIdx.x; i < groups * tiles; i += threads) {
      const int round = r.groups.quotient(i), group = i - round * groups;
      const int first_of_wave = group - r.wave.rest(group);
      const int width = least(r.wave.number, groups - first_of_wave);
      const int number = first_of_wave * tiles + round * width + group - first_of_wave;
      int bundle = 0;
      if (r.bundles != nullptr) {
        bundle = entry.first_bundle + group / entry.bundled;
        r.bundles[bundle] = batch;
      }
      const int tile = r.last_first ? tiles - 1 - round : round;
      r.items[1 + first + number] = int4{tile, group, batch, bundle};
    }
  }

  DLATTN_DEVICE bool is_of_keys(const TensorRef& tensor) const {
    return &tensor == &p.k || &tensor == &p.v || &tensor == &p.dK || &tensor == &p.dV;
  }

  // Of a tensor whose offsets nobody gave.
  DLATTN_DEVICE void write_offset(const TensorRef& tensor, int batch) const {
    const CumulativeLengths cu = is_of_keys(tensor) ? cu_kv : cu_q;
    if (cu.first == nullptr || tensor.offsets == nullptr) return;
    const int64 gap = &tensor == &p.delta ? delta_gap : 0;
    auto* offsets = static_cast<int64*>(const_cast<void*>(tensor.offsets));
    offsets[batch] = (cu.begin(batch) + gap * batch) * tensor.row;
  }

  DLATTN_DEVICE void write_map(Mapped map, int batch, int q, int kv) const {
    const TensorRef& tensor = map == Mapped::dO ? p.dO : (&p.q)[int(map)];
    const bool of_keys = is_of_keys(tensor);
    const int length = of_keys ? kv : q, longest = of_keys ? p.seq_kv : p.seq_q;
    const CumulativeLengths cu = of_keys ? cu_kv : cu_q;
    MappedEntry entry{0, batch};
    if (tensor.offsets != nullptr) {
      const int64 begin = cu.first != nullptr ? cu.begin(batch) * tensor.row : tensor.offset(batch);
      entry = {longest - length, int((begin + length * tensor.row) / 8)};
    }
    r.mapped[int(map) * p.batch + batch] = entry;
  }

  // Threads have a tensor each: one would be longer about all of them than about all else.
  DLATTN_DEVICE void write_places(int batch, int q, int kv) const {
    static_assert(threads >= 96);
    const int of_offsets = threadIdx.x - 32, of_maps = threadIdx.x - 64;
    if (0 <= of_offsets && of_offsets <= &p.dStats - &p.q) {
      write_offset((&p.q)[of_offsets], batch);
    }
    if (0 <= of_maps && of_maps < mapped_tensors && r.mapped != nullptr) {
      write_map(Mapped(of_maps), batch, q, kv);
    }
  }

  DLATTN_DEVICE void describe(int batch, int* s_sums) const {
    int q = length_q(batch);
    const int kv = length_kv(batch);
    // Items of long sequences take long: keys of many queries, queries of many keys.
    const auto cost = [&](int of_q, int of_kv) { return r.items_of_keys ? of_q : of_kv; };
    const int groups = r.groups.number;
    const bool bundles_heads = r.bundles != nullptr;
    int tiles_before = 0, items_before = 0, bundles_before = 0, items = 0, bundles = 0;
    for (int b = threadIdx.x; b < p.batch; b += threads) {
      const int other_q = length_q(b), other_kv = length_kv(b);
      const int tiles = item_tiles(other_q, other_kv) * groups;
      const int its_bundles = bundles_heads ? ceil_div(groups, bundled(other_q)) : 0;
      const int own = cost(q, kv), other = cost(other_q, other_kv);
      items += tiles;
      bundles += its_bundles;
      if (b < batch) tiles_before += r.tile_q.ceil(other_q);
      if (other > own || (other == own && b < batch)) {
        items_before += tiles;
        bundles_before += its_bundles;
      }
    }
    BlockSums<threads, 5> sums(s_sums);
    sums.add({tiles_before, items_before, bundles_before, items, bundles});
    tiles_before = s_sums[0];
    const int tiles = item_tiles(q, kv), groups_of_bundle = bundles_heads ? bundled(q) : groups;
    int query_tiles = r.tile_q.ceil(q);
    if (tiles_before + query_tiles > r.row_tiles)
      q = query_tiles = 0;  // no room: more than promised
    if constexpr (Tiling::counts_key_tiles) place_key_sums(batch);
    const RaggedEntry entry{tiles_before, query_tiles, s_sums[2], groups_of_bundle};
    if (threadIdx.x == 0) {
      const_cast<int*>(static_cast<const int*>(p.seq_len_q.data))[batch] = q;
      const_cast<int*>(static_cast<const int*>(p.seq_len_kv.data))[batch] = kv;
      r.entries[batch] = entry;
      if (batch == 0 && r.items != nullptr) {
        r.items[0] = int4{s_sums[3], s_sums[4], 0, 0};
        *p.items_taken = 0;
        if (p.shares_taken != nullptr) *p.shares_taken = 0;
      }
    }
    write_places(batch, q, kv);
    if (r.items != nullptr) write_items(batch, tiles, s_sums[1], entry);
  }
};

template <class Problem, class Tiling>
DLATTN_DEVICE void ragged(const Params& p) {
  __shared__ int s_sums[5];
  launch_dependents();
  await_kernel_before();
  Ragged<Tiling>(p).describe(blockIdx.x, s_sums);
}

}  // namespace dlattn
