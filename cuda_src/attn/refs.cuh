// What the argument of kernels refers to: tensors, lengths, numbers, tables, scratch.
#pragma once

#include "base/divisor.cuh"
#include "ptx/memory.cuh"

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
  static constexpr int longest_given = (1 << 30) - (1 << 10);  // that a sequence may be

  DLATTN_DEVICE int at(int b, int longest) const {
    if (data == nullptr) return longest;
    const int64 length = is_int64 ? static_cast<const int64*>(data)[b * stride]
                                  : static_cast<const int*>(data)[b * stride];
    return within(length, longest);
  }
  // As it was given, whatever rows there are.
  DLATTN_DEVICE int given(int b, int longest) const {
    return data == nullptr ? longest : at(b, longest_given);
  }
  // Null if nothing was given.
  DLATTN_DEVICE const void* address(int b) const {
    if (data == nullptr) return nullptr;
    return static_cast<const char*>(data) + b * stride * (is_int64 ? 8 : 4);
  }
  static DLATTN_DEVICE int within(int64 length, int longest) {
    return int(length < 0 ? 0 : length > longest ? longest : length);
  }
  // Of an entry, if there is one.
  DLATTN_DEVICE void prefetch(int b, int batch) const {
    if (data != nullptr && b < batch) prefetch_l2(address(b));
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
    if (offsets == nullptr) return unpacked_entries(b);
    return data + load_offset(offsets, has_int64_offsets, b);
  }
  DLATTN_DEVICE const int* unpacked_entries(int b) const { return data + b * batch; }
  // The number of the page that a row of a sequence is in; and where it is.
  DLATTN_DEVICE int number(const int* entries, int row) const {
    return __ldg(number_at(entries, row));
  }
  DLATTN_DEVICE const int* number_at(const int* entries, int row) const {
    return entries + (row >> log2_rows) * page;
  }
  // Of the last of these rows, by a warp, which asks L2 for each sector once: all blocks may want the same
  // ones.
  DLATTN_DEVICE void prefetch_numbers(const int* entries, Interval rows) const {
    constexpr int sector = 8;
    const int first = rows.first >> log2_rows;
    const int own = ((rows.last - 1) >> log2_rows) - threadIdx.x % 32 * sector;
    if (!rows.empty() && own > first - sector) prefetch_l2(entries + most(own, first) * page);
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
  // A term fewer, in the powers of x^2 + few_below, of x whose square is below that power of two: then
  // all these sums have its exponent, which is cheaper to ask than which x is the largest.
  float few[3], few_below;
  float bound,
      inverse_bound;  // of scores; their product is 1, or what is bounded would have a slope
  uint32 zero;        // which the compiler does not know

  // highest: of[3].
  DLATTN_DEVICE float ratio(float x, float highest) const {
    const float square = x * x;
    return fmaf(fmaf(fmaf(highest, square, of[2]), square, of[1]), square, of[0]);
  }
  DLATTN_DEVICE float few_variable(float x) const { return fmaf(x, x, few_below); }
  // highest: few[2].
  DLATTN_DEVICE float few_ratio(float variable, float highest) const {
    return fmaf(fmaf(highest, variable, few[1]), variable, few[0]);
  }
};

// A bit for each block of queries and keys, of a byte the lowest first; strides as of a bias.
struct BlockMaskRef {
  const unsigned char* data;  // (batch, heads_q, blocks of queries, bytes of blocks of keys)
  int64 batch, head, row, column;

  DLATTN_DEVICE bool keeps(int b, int h, int queries, int keys) const {
    return bit(data, b, h, queries, keys);
  }
  // Of bits that lie like those of the mask.
  DLATTN_DEVICE bool bit(const unsigned char* bits, int b, int h, int queries, int keys) const {
    return byte(bits, b, h, queries, keys / 8) >> keys % 8 & 1;
  }
  DLATTN_DEVICE uint32 byte(const unsigned char* bits, int b, int h, int queries, int eight) const {
    return __ldg(bits + b * batch + h * head + queries * row + eight * column);
  }
};

// In which order the query tiles of a (batch, head) pair are handed out (kernels/tile_order.cuh).
struct TileOrderRef {
  int* data;  // null: the last tile first
  int batch, head;

  DLATTN_DEVICE int* tiles(int b, int h) const { return data + int64(b) * batch + h * head; }
};

// What blocks of a decode leave to each other (kernels/decode.cuh), or of a forward (attn/key_parts.cuh). Of
// one whose blocks ask for tiles, the first mark says that these are being counted.
struct PartsRef {
  void* data;     // a part for each block; two for a later kernel
  uint64* marks;  // likewise: `mark` where the part is there, or says itself whether it is
  uint64 mark;
  int4* tiles;  // of which parts a later kernel puts together (kernels/fwd_parts.cuh), or null
};

// How items are numbered (attn/schedule.cuh): of pairs of a batch entry and a head, or a group of heads, so
// many at a time.
struct ItemsRef {
  Divisor of_wave;            // items of so many pairs
  Divisor pairs, last_pairs;  // of a wave, and of the last one
  Divisor heads;              // of a batch entry, or groups of them, that have items of their own
  // Of a Hopper backward: of its queries, that an item from whole_items on is in. Of a decode: of the key
  // tiles of all, at the most (attn/shares.cuh).
  Divisor parts;
};

// Where the sums of dQ of a backward are; and how those of a Hopper backward are shared out, unless it is
// ragged (kernels/bwd_sm90_shares.cuh).
struct SharesRef {
  Divisor places;       // dq_places, or one
  Divisor query_tiles;  // of a head
  int tiles;            // of a pair's query tiles, that a share has at the most
  Divisor lone_parts;   // that a share which goes with no item is in
};

// Which heads share query tiles of a Hopper forward (dlattn/plans/fwd_sm90_tiles.py).
struct TileHeadsRef {
  Divisor tiles;     // with the same queries, of all heads of a batch entry
  Divisor of_keys;   // of the heads that share keys
  Divisor together;  // these heads
  Divisor beside;    // of such tiles, how many have blocks side by side
};

}  // namespace dlattn
