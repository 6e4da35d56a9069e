// Before attention over a cache of keys and values: new tokens are written behind the cached ones, keys
// and queries are rotated on the way (arXiv 2104.09864), and the plan that follows is told how long the
// sequences are then, and where. As FlashAttention's `mha_fwd_kvcache`, but for pages of any size.
//
// A cache is a container of pages of any number of rows. Of one that is not paged, a page is a whole
// sequence. What no page holds is not written; what the table of angles has no row for becomes NaN.
#pragma once

#include "attn/params.cuh"
#include "base/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "tile/unit.cuh"

namespace dlattn {

// Which page of a container each page of a sequence is.
struct CacheRef {
  const int* table;   // (batch, pages_per_sequence); null where sequence b is page b
  int64 batch, page;  // strides of the table in elements
  int page_rows;      // rows of a page
  int pages;          // of the container
  int pages_per_sequence;
  int unused;

  DLATTN_DEVICE int capacity() const { return page_rows * pages_per_sequence; }
  // The number of a page, -1 if the container has none.
  DLATTN_DEVICE int number(int b, int index) const {
    if (index < 0 || index >= pages_per_sequence) return -1;
    const int found = table == nullptr ? b : __ldg(table + b * batch + index * page);
    return uint32(found) < uint32(pages) ? found : -1;
  }
};

// What is written for the plan that follows, where it is not null.
struct CacheEntries {
  int* seq_len_kv;   // (batch): with the new tokens, without the padding on the left
  int* table;        // (batch, pages_per_sequence * split), contiguous: of smaller pages,
  int64* k_offsets;  // (batch + 1): where the rows of a sequence begin, in elements
  int64* v_offsets;
  int split, page_step;  // which are so many to a page, and so many from a page to the next
};

// dlattn/plans/append.py mirrors this.
struct AppendParams {
  TensorRef k_new, v_new, q;              // (batch, head, row): new tokens, and queries
  TensorRef k_cache, v_cache, q_rotated;  // (page, head, row of a page); (batch, head, row)
  CacheRef pages;
  LengthRef cache_seqlens;  // of what is in the cache; null: cached_tokens
  LengthRef leftpad;        // rows of a sequence before its first token; null: none
  const void *cos, *sin;    // (angles, rotary_dim / 2), contiguous
  CacheEntries entries;
  int batch, cached_tokens, new_tokens, seq_q, heads_k, heads_v, heads_q;
  int head_dim_qk, head_dim_v, rotary_dim, angles;
  int queries_move;  // query i is at position cached + i, else all are at `cached`
};

struct AppendTiling {
  static constexpr int threads = 256;
};

template <class Element, class Angle, int lanes, bool wide, bool interleaved>
struct Append {
  static constexpr int unit = unit_size<wide, Element>;
  const AppendParams& p;

  DLATTN_DEVICE static int lane() { return threadIdx.x % lanes; }

  DLATTN_DEVICE int cached(int b) const {
    if (p.cache_seqlens.data != nullptr) return p.cache_seqlens.at(b, p.pages.capacity());
    return least(most(p.cached_tokens, 0), p.pages.capacity());
  }

  DLATTN_DEVICE void copy(Element* g_to, const Element* g_from, int first, int columns) const {
#pragma unroll 1
    for (int column = first + lane() * unit; column < columns; column += lanes * unit) {
      float values[unit];
      load_unit(values, g_from + column);
      store_unit(g_to + column, values);
    }
  }

  // Column c turns with its partner, a pair of neighbours (GPT-J) or of the halves (NeoX).
  DLATTN_DEVICE void rotate(Element* g_to, const Element* g_from, int position) const {
    const int half = p.rotary_dim / 2;
    const bool is_known = position < p.angles;
    const int64 row = is_known ? int64(position) * half : 0;
    const Angle* g_cos = static_cast<const Angle*>(p.cos) + row;
    const Angle* g_sin = static_cast<const Angle*>(p.sin) + row;
#pragma unroll 1
    for (int column = lane() * unit; column < p.rotary_dim; column += lanes * unit) {
      float values[unit], partners[unit];
      load_unit(values, g_from + column);
      const bool lower = column < half;
      if constexpr (interleaved && unit > 1) {
#pragma unroll
        for (int i = 0; i < unit; ++i) partners[i] = values[i ^ 1];
      } else {
        const int partner = interleaved ? column ^ 1 : lower ? column + half : column - half;
        load_unit(partners, g_from + partner);
      }
#pragma unroll
      for (int i = 0; i < unit; ++i) {
        const int c = column + i;
        const int angle = interleaved ? c / 2 : lower ? c : c - half;
        const bool is_first = interleaved ? c % 2 == 0 : lower;
        const float sine = to_float(load_constant(g_sin + angle));
        const float turned = values[i] * to_float(load_constant(g_cos + angle)) +
                             partners[i] * (is_first ? -sine : sine);
        values[i] = is_known ? turned : __int_as_float(0x7fffffff);
      }
      store_unit(g_to + column, values);
    }
  }

  // The row of a container where a token of a sequence belongs; null if there is none.
  DLATTN_DEVICE Element* cache_row(const TensorRef& cache, int b, int head, int position) const {
    const int number = p.pages.number(b, position / p.pages.page_rows);
    if (number < 0) return nullptr;
    return cache.rows<Element>(number, head, position % p.pages.page_rows);
  }

  // Rows are those of k, then those of v, then those of q; heads of a token are neighbours.
  DLATTN_DEVICE void move(int b, int row) const {
    const int first = cached(b);
    const int rows_k = p.new_tokens * p.heads_k, rows_v = p.new_tokens * p.heads_v;
    Element* g_to = nullptr;
    const Element* g_from = nullptr;
    int position = first, columns = p.head_dim_qk, turned = p.rotary_dim;
    if (row < rows_k) {
      const int token = row / p.heads_k, head = row % p.heads_k;
      position += token;
      g_from = p.k_new.rows<Element>(b, head, token);
      g_to = cache_row(p.k_cache, b, head, position);
    } else if (row < rows_k + rows_v) {
      const int token = (row - rows_k) / p.heads_v, head = (row - rows_k) % p.heads_v;
      g_from = p.v_new.rows<Element>(b, head, token);
      g_to = cache_row(p.v_cache, b, head, position + token);
      columns = p.head_dim_v, turned = 0;
    } else if (row < rows_k + rows_v + p.seq_q * p.heads_q) {
      row -= rows_k + rows_v;
      const int query = row / p.heads_q, head = row % p.heads_q;
      position += p.queries_move ? query : 0;
      g_from = p.q.rows<Element>(b, head, query);
      g_to = p.q_rotated.rows<Element>(b, head, query);
    }
    if (g_to == nullptr) return;
    if (turned > 0) rotate(g_to, g_from, position);
    copy(g_to, g_from, turned, columns);
  }

  DLATTN_DEVICE void describe(int b) const {
    const CacheEntries& entries = p.entries;
    const int padding = p.leftpad.data == nullptr ? 0 : p.leftpad.at(b, p.pages.capacity());
    const int filled = least(cached(b) + p.new_tokens, p.pages.capacity());
    if (threadIdx.x == 0) {
      const int number = p.pages.number(b, 0);
      const bool exists = entries.k_offsets == nullptr || number >= 0;
      const int length = exists ? most(0, filled - padding) : 0;
      if (entries.seq_len_kv != nullptr) entries.seq_len_kv[b] = length;
      if (entries.k_offsets != nullptr) {
        const int64 page = most(0, number);
        // Of no row, where rows begin is not read; the last one ends the array.
        for (int end = 0; end < (b == p.batch - 1 ? 2 : 1); ++end) {
          entries.k_offsets[b + end] = page * p.k_cache.batch + padding * p.k_cache.row;
          entries.v_offsets[b + end] = page * p.v_cache.batch + padding * p.v_cache.row;
        }
      }
    }
    if (entries.table == nullptr) return;
    const int count = p.pages.pages_per_sequence * entries.split;
    for (int i = threadIdx.x; i < count; i += AppendTiling::threads) {
      const int number = p.pages.number(b, i / entries.split);
      entries.table[int64(b) * count + i] =
          number < 0 ? -1 : number * entries.page_step + i % entries.split;
    }
  }
};

template <class Element, class Angle, int lanes, bool wide, bool interleaved>
DLATTN_DEVICE void append(const AppendParams& p) {
  const Append<Element, Angle, lanes, wide, interleaved> work{p};
  const int batch = blockIdx.y;
  work.move(batch, blockIdx.x * (AppendTiling::threads / lanes) + threadIdx.x / lanes);
  if (blockIdx.x == 0) work.describe(batch);
}

}  // namespace dlattn
