// What kernels of a ragged problem know of its batch entries, and where it stands.
#pragma once

#include "attn/refs.cuh"

namespace dlattn {

// What the first kernel of a ragged problem (kernels/ragged.cuh) tells the others of a batch entry.
struct RaggedEntry {
  int first_tile, query_tiles;  // of one head, among those of all entries
  // Groups of heads whose sums of dQ share a place are a bundle; the first one, in the order of the
  // items, and groups of each.
  int first_bundle, bundled;

  // The first query tile of a head, of so many, among those of all heads and entries.
  DLATTN_DEVICE int tile_of_head(int head, int heads) const {
    return first_tile * heads + head * query_tiles;
  }

  // Of so many groups, those of a bundle.
  DLATTN_DEVICE Interval groups_of(int bundle, int all) const {
    const int first = (bundle - first_bundle) * bundled;
    return {first, least(first + bundled, all)};
  }
};

// Where the copy engine finds a batch entry of a tensor: added to its rows, and the last coordinate.
struct MappedEntry {
  int row, batch;
};
enum class Mapped { q, k, v, o, dO };
inline constexpr int mapped_tensors = 5;

struct RaggedRef {
  LengthRef given_q, given_kv;  // what the user gave; null: offsets tell, else all are full
  // (batch + 1): where entries begin, in rows; null: offsets tell. Tensors whose offsets nobody gave
  // have memory for them, int64, which the first kernel writes.
  const int *cu_seqlens_q, *cu_seqlens_kv;
  RaggedEntry* entries;  // (batch); and behind them, if asked for, the first key tile of each
  int* bundles;          // the batch entry of each; or null
  int4* items;           // how many, bundles too; then of each tile, head, batch, bundle; or null
  MappedEntry* mapped;   // (mapped_tensors, batch); or null
  Divisor tile_q;        // rows of a query tile
  Divisor item_rows;     // queries or keys that an item has
  Divisor groups;        // of heads that have items of their own
  Divisor wave;          // such groups whose items follow each other, the last ones perhaps fewer
  int row_tiles;         // query tiles that the workspace has room for, of one head
  int items_of_keys, last_first;
  int tokens_q, tokens_kv;  // with cu_seqlens, rows of the tensors in all
  int key_tiles;            // whose sums of dK and dV the workspace has room for, of one head

  // Among those of all entries, of one head.
  DLATTN_DEVICE int& first_key_tile(int batches, int b) const {
    return reinterpret_cast<int*>(entries + batches)[b];
  }
};

}  // namespace dlattn
