// The one argument of every kernel. dlattn/plans/argument.py mirrors this layout; generated sources
// assert the size that Python computed.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// One of some element offsets, int32 or int64.
DLATTN_DEVICE int64 load_offset(const void* offsets, int are_int64, int b) {
  return are_int64 ? __ldg(static_cast<const int64*>(offsets) + b)
                   : __ldg(static_cast<const int*>(offsets) + b);
}

// A (batch, head, row, column) tensor whose columns are contiguous; strides in elements.
struct TensorRef {
  void* data;
  int64 batch, head, row;
  const void*
      offsets;  // [batch + 1], int32 or int64: where a ragged tensor's entries begin; or null
  int has_int64_offsets;
  int unused;

  // Of a problem without ragged tensors, the code of what they need does not exist.
  template <bool ragged>
  DLATTN_DEVICE bool is_ragged() const {
    return ragged && offsets != nullptr;
  }
  DLATTN_DEVICE int64 offset(int b) const { return load_offset(offsets, has_int64_offsets, b); }
  template <class T, bool ragged = false>
  DLATTN_DEVICE T* rows(int b, int h, int r) const {
    const int64 entry = is_ragged<ragged>() ? offset(b) : b * batch;
    return static_cast<T*>(data) + entry + h * head + r * row;
  }
  // How many rows an output stores: where the next sequence may follow, none of padding.
  template <bool ragged>
  DLATTN_DEVICE int stored_rows(int length, int longest) const {
    return is_ragged<ragged>() ? length : longest;
  }
};

// Actual lengths, one per batch entry; null when every sequence is full.
struct LengthRef {
  const void* data;  // [batch], int32 or int64
  int64 stride;      // in elements
  int is_int64;
  int unused;

  DLATTN_DEVICE int at(int b, int longest) const {
    if (data == nullptr) return longest;
    const int64 length = is_int64 ? static_cast<const int64*>(data)[b * stride]
                                  : static_cast<const int*>(data)[b * stride];
    return int(length < 0 ? 0 : length > longest ? longest : length);
  }
};

// One number per head, or per batch entry and head.
struct SlopeRef {
  const float* data;
  int64 batch, head;  // strides in elements

  DLATTN_DEVICE float at(int b, int h) const { return __ldg(data + b * batch + h * head); }
};

// A (batch, head, query, key) tensor that broadcasts: strides, in elements, are 0 where its size is 1.
struct BiasRef {
  void* data;
  int64 batch, head, row, column;
};

// A number on the device, or if there is none there, here.
struct IntegerRef {
  const void* data;  // int32 or int64
  int64 number;
  int is_int64;
  int unused;

  DLATTN_DEVICE int64 value() const {
    if (data == nullptr) return number;
    return is_int64 ? *static_cast<const int64*>(data) : *static_cast<const int*>(data);
  }
};
struct FloatRef {
  const float* data;
  float number;
  int unused;

  DLATTN_DEVICE float value() const { return data == nullptr ? number : *data; }
};

// Where the pages of each sequence are, if k and dK, or v and dV, lie in pages: entry i is the number
// of its page i in a container, a TensorRef with the page in the place of the batch entry.
struct PageTableRef {
  const int* data;      // (batch, pages of a sequence)
  int64 batch, page;    // strides in elements
  const void* offsets;  // packed: where the entries of each sequence begin, int32 or int64; or null
  int has_int64_offsets;
  int log2_rows;  // of a page
  int pages;      // of the container
  int unused;

  // Of a sequence.
  DLATTN_DEVICE const int* entries(int b) const {
    if (offsets == nullptr) return data + b * batch;
    return data + load_offset(offsets, has_int64_offsets, b);
  }
  // The number of the page that a row of a sequence is in.
  DLATTN_DEVICE int number(const int* entries, int row) const {
    return __ldg(entries + (row >> log2_rows) * page);
  }
  // A page that the container has.
  DLATTN_DEVICE bool has(int number) const { return uint32(number) < uint32(pages); }
  DLATTN_DEVICE int slot(int row) const { return row & ((1 << log2_rows) - 1); }
  // The rows of the pages that hold so many tokens.
  DLATTN_DEVICE int whole_pages(int rows) const {
    const int last_slot = (1 << log2_rows) - 1;
    return (rows + last_slot) & ~last_slot;
  }
};

// Soft-capped scores in log2 units, of raw products x up to `most` in magnitude: x * ratio(x), the
// hyperbolic tangent's series. Nothing is in reach where the host does not know the scale.
struct SoftCapSeries {
  float of[4], most;
  float bound,
      inverse_bound;  // of scores; their product is 1, or what is bounded would have a slope
  uint32 zero;        // which the compiler does not know

  // highest: of[3].
  DLATTN_DEVICE float ratio(float x, float highest) const {
    const float square = x * x;
    return fmaf(fmaf(fmaf(highest, square, of[2]), square, of[1]), square, of[0]);
  }
};

// What the first kernel of a ragged problem (kernels/ragged.cuh) tells the others of a batch entry.
struct RaggedEntry {
  int first_tile, query_tiles;  // of one head, among those of all entries
  int rank;                     // in the order of the items
  int unused;
};

// Where the copy engine finds a batch entry of a tensor: added to its rows, and the last coordinate.
struct MappedEntry {
  int row, batch;
};
enum class Mapped { q, k, v, o, dO, dK, dV };
inline constexpr int mapped_tensors = 7;

struct RaggedRef {
  LengthRef given_q, given_kv;  // what the user gave; null: offsets tell, else all are full
  // (batch + 1): where entries begin, in rows; null: offsets tell. Tensors whose offsets nobody gave
  // have memory for them, int64, which the first kernel writes.
  const int *cu_seqlens_q, *cu_seqlens_kv;
  RaggedEntry* entries;  // (batch)
  int* order;            // (batch): entries by rank
  int4* items;           // their number, then of each tile, head, batch, pair; or null
  MappedEntry* mapped;   // (mapped_tensors, batch); or null
  int tile_q;            // rows of a query tile
  int row_tiles;         // that the workspace has room for, of one head
  int item_rows;         // queries or keys that an item has
  int items_of_keys, last_first;
  int tokens_q, tokens_kv;  // with cu_seqlens, rows of the tensors in all
  int unused;
};

// A bit for each block of queries and keys, of a byte the lowest first; strides as of a bias.
struct BlockMaskRef {
  const unsigned char* data;  // (batch, heads_q, blocks of queries, bytes of blocks of keys)
  int64 batch, head, row, column;

  DLATTN_DEVICE bool keeps(int b, int h, int queries, int keys) const {
    const int64 offset = b * batch + h * head + queries * row + keys / 8 * column;
    return __ldg(data + offset) >> keys % 8 & 1;
  }
};

// What blocks of a decode leave to each other (kernels/decode.cuh).
struct PartsRef {
  void* data;     // a part for each block
  uint64* marks;  // likewise: `mark` where the part is there
  uint64 mark;
};

struct Params {
  TensorRef q;      // (batch, heads_q, seq_q, head_dim_qk)
  TensorRef k;      // (batch, heads_k, seq_kv, head_dim_qk); paged: (pages, heads_k, slots, ...)
  TensorRef v;      // (batch, heads_v, seq_kv, head_dim_v); paged: likewise
  TensorRef o;      // (batch, heads_q, seq_q, head_dim_v)
  TensorRef stats;  // (batch, heads_q, seq_q, 1): natural log of the sum of exponentials
  TensorRef dO;     // like o
  TensorRef dQ;     // like q
  TensorRef dK;     // like k
  TensorRef dV;     // like v
  TensorRef score_max, score_sum_exp;  // like stats: a row's maximum, and the sum relative to it
  TensorRef sink_token, dSink_token;   // (1, heads_q, 1, 1), fp32
  TensorRef rng_dump;  // (batch, heads_q, seq_q, seq_kv), fp32: 1 where kept, else 0
  TensorRef delta;     // (batch, heads_q, seq_q, 1), fp32: rowsum(dO * O)
  TensorRef dStats;    // (batch, heads_q, seq_q, 1), fp32
  LengthRef seq_len_q, seq_len_kv;
  SlopeRef alibi_slopes;
  BiasRef bias, dBias;
  BiasRef dropout_mask;  // nonzero where probabilities are kept
  IntegerRef dropout_seed, dropout_offset;
  FloatRef dropout_scale, dropout_scale_inv;  // of kept probabilities
  PageTableRef k_pages, v_pages;
  RaggedRef ragged;  // in ragged problems, the lengths above are in the workspace
  BlockMaskRef block_mask;
  PartsRef parts;
  const float* attn_scale_device;  // null: attn_scale holds the value
  const int* schedule;             // persistent forward: see dlattn/plans/schedule.py
  int* items_taken;                // else: tiles that blocks have asked for so far
  float* dq_accum;    // (pairs with a place, heads_per_block, query tiles, tile): fp32 sums
  int* dq_arrivals;   // the same without tile: how many key tiles have been added
  int* dq_stored;     // (pairs with a place): query tiles of which dQ has been stored
  int* shares_taken;  // of those shares of dQ that belong to no item
  float* row_stats;   // (batch, heads_q, query tiles, 2, tile_q): stats in log2 units, then -delta
  float* sink_parts;  // (heads_q, batch, query tiles): what each tile adds to dSink_token
  int batch, heads_q, seq_q, seq_kv;
  int heads_per_k, heads_per_v;  // query heads that share a head of K, or of V
  int band_left, band_right;     // cuDNN's diagonal bounds
  int bottom_right;              // the diagonal ends in the bottom right corner
  int heads_per_wave;   // (batch, head) pairs scheduled together, so that K and V stay in L2; of a
                        // decode, items that blocks walk side by side
  int heads_per_block;  // query heads that an item has: in a backward, whole groups of K and V
  int dq_places;        // for how many pairs there are sums of dQ
  int paged_rows;       // of dK and dV, where K or V is paged: seq_kv, up to whole pages
  int dq_lag;           // with an item goes the share of dQ of the item so many before
  float attn_scale;
  float softcap, softcap_inverse;  // what soft-capped scores stay within
  uint32 dropout_addend;           // brings random bits to 2^15 where they drop, in each half
  SoftCapSeries softcap_series;
  // (batch, heads_q, seq_q and seq_kv rounded up to 128), like q: signed probabilities.
  TensorRef debug_softmax;
  BiasRef score_mod[8];  // what a user's function of scores reads; numbers in place of addresses

  // A tensor that is not ragged is its own map's.
  template <bool ragged>
  DLATTN_DEVICE MappedEntry mapped_entry(Mapped tensor, int b) const {
    if constexpr (ragged) return this->ragged.mapped[int(tensor) * batch + b];
    return {0, b};
  }

  DLATTN_DEVICE float sink(int head) const { return *sink_token.rows<float>(0, head, 0); }

  DLATTN_DEVICE float scale() const {
    return attn_scale_device == nullptr ? attn_scale : *attn_scale_device;
  }
};

}  // namespace dlattn
