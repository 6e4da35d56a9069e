// What a block of bwd_dbias.cuh computes: its tile of a gradient, and the tiles of scores that are added
// to that, or every so many of them where several blocks share the tile.
#pragma once

#include "attn/params.cuh"
#include "attn/seqlen.cuh"
#include "attn/walk.cuh"
#include "base/math.cuh"

namespace dlattn {

// What is written, by the name of its commonest case: the gradient of the bias, or of a tensor that a
// user's function reads.
template <class Problem>
DLATTN_DEVICE const BiasRef& written(const Params& p) {
  if constexpr (Problem::gradient_of < 0) {
    return p.dBias;
  } else {
    return p.d_score_mod[Problem::gradient_of];
  }
}

// A tile of scores that is added to a tile of dBias.
struct DBiasStep {
  int batch, head;
  int query, key;  // the first
};
DLATTN_DEVICE DBiasStep uniform(const DBiasStep& step) {
  return {uniform(step.batch), uniform(step.head), uniform(step.query), uniform(step.key)};
}

// Of several blocks that share a tile, each takes every so many steps along two of the axes that it
// walks: the first of queries and keys, the first of heads and batch entries.
DLATTN_DEVICE DBiasStep along_walk(const BiasRef& dBias, int y, int z, int other) {
  return {dBias.head == 0 ? other : z, dBias.head == 0 ? z : other, dBias.row == 0 ? y : other,
          dBias.row == 0 ? other : y};
}
DLATTN_DEVICE DBiasStep parts_of_walk(const BiasRef& dBias) {
  return along_walk(dBias, gridDim.y, gridDim.z, 1);
}
DLATTN_DEVICE DBiasStep part_of_walk(const BiasRef& dBias) {
  return along_walk(dBias, blockIdx.y, blockIdx.z, 0);
}

// The steps of a block that see any position, in order.
template <class Problem, class Tiling>
struct DBiasWalk {
  DBiasStep first, at;
  Lengths length;

  DLATTN_DEVICE DBiasWalk(const Params& p, DBiasStep step)
      : first(step), at(step), length(p, step.batch) {
    if (!sees_any(p)) advance(p);
  }

  DLATTN_DEVICE bool done(const Params& p) const { return at.batch >= p.batch; }
  DLATTN_DEVICE Interval queries() const {
    return {at.query, least(at.query + Tiling::tile_q, length.q)};
  }
  DLATTN_DEVICE Interval keys() const {
    return {at.key, least(at.key + Tiling::tile_k, length.kv)};
  }

  DLATTN_DEVICE void advance(const Params& p) {
    do step(p);
    while (!done(p) && !sees_any(p));
  }

  // Whether all of the tile exists.
  DLATTN_DEVICE bool is_inside() const {
    return at.query + Tiling::tile_q <= length.q && at.key + Tiling::tile_k <= length.kv;
  }
  // Whether each query attends to each key of it.
  DLATTN_DEVICE bool is_full(const Params& p) const {
    return at.query + Tiling::tile_q <= length.q &&
           Problem::Mask::full_keys(queries(), length, p)
               .contains({at.key, at.key + Tiling::tile_k});
  }

 private:
  DLATTN_DEVICE bool sees_any(const Params& p) const {
    if (queries().empty() || keys().empty()) return false;
    if ((Problem::Mask::keys(queries(), length, p) & keys()).empty()) return false;
    using Tiles = dlattn::Walk<typename Problem::Mask, Tiling::tile_q, Tiling::tile_k>;
    return Tiles::visits(p, at.batch, at.head, at.query / Tiling::tile_q, at.key / Tiling::tile_k);
  }

  // Where dBias has a size of 1, its stride is 0.
  DLATTN_DEVICE void step(const Params& p) {
    const BiasRef& dBias = written<Problem>(p);
    const DBiasStep by = parts_of_walk(dBias);
    if (dBias.row == 0 && (at.query += by.query * Tiling::tile_q) < length.q) return;
    at.query = first.query;
    if (dBias.column == 0 && (at.key += by.key * Tiling::tile_k) < length.kv) return;
    at.key = first.key;
    if (dBias.head == 0 && (at.head += by.head) < p.heads_q) return;
    at.head = first.head;
    at.batch = dBias.batch == 0 ? at.batch + by.batch : p.batch;
    if (!done(p)) length = Lengths(p, at.batch);
  }
};

// Tiles of keys first: neighbours read the same queries.
template <class Problem, class Tiling>
DLATTN_DEVICE DBiasStep first_dbias_step(int index, const Params& p) {
  const BiasRef& dBias = written<Problem>(p);
  const int key_tiles = dBias.column == 0 ? 1 : ceil_div(p.seq_kv, Tiling::tile_k);
  const int query_tiles = dBias.row == 0 ? 1 : ceil_div(p.seq_q, Tiling::tile_q);
  const int heads = dBias.head == 0 ? 1 : p.heads_q;
  const int tile = index / key_tiles, pair = tile / query_tiles;
  const DBiasStep part = part_of_walk(dBias);
  return {pair / heads + part.batch, pair % heads + part.head,
          (tile % query_tiles + part.query) * Tiling::tile_q,
          (index % key_tiles + part.key) * Tiling::tile_k};
}

}  // namespace dlattn
