// The one argument of every kernel. dlattn/plans/params.py mirrors this layout; generated sources
// assert the size that Python computed.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// A (batch, head, row, column) tensor whose columns are contiguous; strides in elements.
struct TensorRef {
  void* data;
  int64 batch, head, row;

  template <class T>
  DLATTN_DEVICE T* rows(int b, int h, int r) const {
    return static_cast<T*>(data) + b * batch + h * head + r * row;
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

// Soft-capped scores in log2 units, of raw products x up to `most` in magnitude: x * ratio(x), the
// hyperbolic tangent's series. Nothing is in reach where the host does not know the scale.
struct SoftCapSeries {
  float of[4], most;

  DLATTN_DEVICE float ratio(float x) const {
    const float square = x * x;
    return fmaf(fmaf(fmaf(of[3], square, of[2]), square, of[1]), square, of[0]);
  }
};

struct Params {
  TensorRef q;      // (batch, heads_q, seq_q, head_dim_qk)
  TensorRef k;      // (batch, heads_k, seq_kv, head_dim_qk)
  TensorRef v;      // (batch, heads_v, seq_kv, head_dim_v)
  TensorRef o;      // (batch, heads_q, seq_q, head_dim_v)
  TensorRef stats;  // (batch, heads_q, seq_q, 1): natural log of the sum of exponentials
  TensorRef dO;     // like o
  TensorRef dQ;     // like q
  TensorRef dK;     // like k
  TensorRef dV;     // like v
  TensorRef score_max, score_sum_exp;  // like stats: a row's maximum, and the sum relative to it
  TensorRef sink_token, dSink_token;   // (1, heads_q, 1, 1), fp32
  LengthRef seq_len_q, seq_len_kv;
  SlopeRef alibi_slopes;
  BiasRef bias, dBias;
  const float* attn_scale_device;  // null: attn_scale holds the value
  const int* schedule;             // persistent forward: see dlattn/plans/schedule.py
  int* items_taken;   // else: tiles that blocks have asked for so far
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
  int heads_per_wave;   // (batch, head) pairs scheduled together, so that K and V stay in L2
  int heads_per_block;  // query heads that a backward item has: whole groups of K and V
  int dq_places;        // for how many pairs there are sums of dQ
  int dq_lag;           // with an item goes the share of dQ of the item so many before
  float attn_scale;
  float softcap, softcap_inverse;  // what soft-capped scores stay within
  SoftCapSeries softcap_series;

  DLATTN_DEVICE float sink(int head) const { return *sink_token.rows<float>(0, head, 0); }

  DLATTN_DEVICE float scale() const {
    return attn_scale_device == nullptr ? attn_scale : *attn_scale_device;
  }
};

}  // namespace dlattn
