// The one argument of every kernel. dlattn/plans/argument.py mirrors this layout; generated sources
// assert the size that Python computed.
#pragma once

#include "attn/ragged_refs.cuh"
#include "attn/refs.cuh"

namespace dlattn {

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
  TileOrderRef tile_order;         // of a block mask
  float* dq_accum;    // (dq_places, heads_per_block, query tiles, tile): fp32 sums; of no
                      // places, (query tiles of all heads, tile)
  int* dq_arrivals;   // the same without tile: key tiles added so far; in a relay, 1: a part waits
  int* dq_stored;     // (dq_places): query tiles of which dQ has been stored
  int* shares_taken;  // of those shares of dQ that belong to no item
  float* row_stats;   // of query tiles, one after the other: kernels/bwd_tile.cuh
  float* sink_parts;  // (heads_q, batch, query tiles): what each tile adds to dSink_token
  int batch, heads_q, seq_q, seq_kv;
  Divisor heads_per_k, heads_per_v;  // query heads that share a head of K, or of V
  // Query heads that an item has: in a backward, whole groups of K and V; at the most, in a Hopper
  // forward: some that share keys, if more than one.
  Divisor heads_per_block;
  ItemsRef items;
  int band_left, band_right;  // cuDNN's diagonal bounds
  int bottom_right;           // the diagonal ends in the bottom right corner
  int dq_places;  // for how many pairs there are sums of dQ, or bundles of a ragged problem; 0: for all
                  // query tiles of one
  int paged_rows;  // of dK and dV, where K or V is paged: seq_kv, up to whole pages
  int dq_lag;      // with an item goes the share of dQ of the item, or bundle, so many before
  float attn_scale;
  float softcap, softcap_inverse;  // what soft-capped scores stay within
  uint32 dropout_addend;           // brings random bits to 2^15 where they drop, in each half
  SoftCapSeries softcap_series;
  // (batch, heads_q, seq_q and seq_kv rounded up to 128), like q: signed probabilities.
  TensorRef debug_softmax;
  BiasRef score_mod[8];  // what a user's function of scores reads; numbers in place of addresses
  // Where the function masks blocks, block_mask is the first kernel's (kernels/score_blocks.cuh): what
  // the user gave, or null; and bits like those of block_mask, of blocks that it masks nothing of.
  BlockMaskRef given_block_mask;
  unsigned char* whole_blocks;
  BiasRef d_score_mod[8];  // the gradients of what it reads
  float* dbias_parts;   // (tiles of a gradient, blocks of a tile, tile): what each block has of it
  int* dbias_arrivals;  // (tiles of a gradient): how many blocks of it are done
  float* key_sums;      // (batch, heads of k, key tiles, less whole_items): fp32 sums of dK and dV
  int whole_items;  // of a Hopper backward: items from here on have parts of groups or of queries,
                    // and add to those sums
  int lone_shares;  // shares of dQ from here on go with no item
  SharesRef shares;
  // Of a Hopper forward: rows of each head that a consumer has, and how many consumers have other queries.
  int log2_head_rows, parts_per_tile;
  TileHeadsRef tile_heads;
  int* dq_additions;  // by row tile: with a block mask, how many key tiles add to its dQ

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
