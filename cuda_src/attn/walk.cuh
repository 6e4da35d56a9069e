// Walks over tiles: which of a range are visited. All of them, unless there is a block mask: then only
// those of its blocks. Tiles divide blocks, so that a tile is visited whole or not at all.
//
// Every lane of a warp must be there.
#pragma once

#include "attn/mask.cuh"
#include "attn/schedule.cuh"

namespace dlattn {

template <class Mask, int tile_q, int tile_k>
struct Walk {
  static constexpr bool skips = Mask::by_blocks;
  static_assert(!skips || (block_size % tile_q == 0 && block_size % tile_k == 0));

  // Of the key tiles of a query tile: the last to visit of those from `first` to `tile`, or first - 1.
  static DLATTN_DEVICE int last_keys(const Params& p, WorkItem queries, int tile, int first) {
    if constexpr (!skips) return tile;
    constexpr int tiles = block_size / tile_k;
    const int found = nearest<-1>(tile / tiles, first / tiles, keys_of(p, queries));
    return found < first / tiles ? first - 1 : least(tile, found * tiles + tiles - 1);
  }
  // The first of those from `tile` to `last`, or last + 1.
  static DLATTN_DEVICE int first_keys(const Params& p, WorkItem queries, int tile, int last) {
    if constexpr (!skips) return tile;
    constexpr int tiles = block_size / tile_k;
    const int found = nearest<1>(tile / tiles, last / tiles, keys_of(p, queries));
    return found > last / tiles ? last + 1 : most(tile, found * tiles);
  }
  // Of the query tiles of a key tile: the first to visit of those from `tile` to end - 1, or `end`.
  static DLATTN_DEVICE int first_queries(const Params& p, WorkItem keys, int tile, int end) {
    if constexpr (!skips) return tile;
    constexpr int tiles = block_size / tile_q;
    if (tile >= end) return end;
    const int last = (end - 1) / tiles, block = keys.tile * tile_k / block_size;
    const int found = nearest<1>(tile / tiles, last, [&](int queries) {
      return p.block_mask.keeps(keys.batch, keys.head, queries, block);
    });
    return found > last ? end : most(tile, found * tiles);
  }
  // Of some query tiles of a key tile and some heads from one on, from the first to the last block that
  // is visited.
  static DLATTN_DEVICE Interval span_of_queries(const Params& p, WorkItem keys, int heads,
                                                Interval all) {
    constexpr int tiles = block_size / tile_q;
    const int block = keys.tile * tile_k / block_size, last = (all.last - 1) / tiles;
    Interval span{0x7fffffff, 0};
#pragma unroll 1
    for (int head = keys.head; head < keys.head + heads; ++head) {
#pragma unroll 1
      for (int from = all.first / tiles; from <= last; from += 32) {
        // Beyond the last one, the last once more.
        const int own = least(from + int(threadIdx.x % 32), last);
        const uint32 kept =
            __ballot_sync(0xffffffffu, p.block_mask.keeps(keys.batch, head, own, block));
        if (kept == 0) continue;
        span.first = least(span.first, from + __ffs(kept) - 1);
        span.last = most(span.last, from + 32 - __clz(kept));
      }
    }
    if (span.empty()) return {0, 0};
    return all & Interval{span.first * tiles, span.last * tiles};
  }
  // How many key tiles visit a query tile, of some.
  static DLATTN_DEVICE int count_keys(const Params& p, WorkItem queries, Interval keys) {
    const int block = queries.tile * tile_q / block_size;
    int count = 0;
    for (int from = keys.first; from < keys.last; from += 32) {
      const int own = from + int(threadIdx.x % 32);
      const bool kept = own < keys.last && p.block_mask.keeps(queries.batch, queries.head, block,
                                                              own * tile_k / block_size);
      count += __popc(__ballot_sync(0xffffffffu, kept));
    }
    return count;
  }
  // Whether a tile is visited, for those who walk over all.
  static DLATTN_DEVICE bool visits(const Params& p, int batch, int head, int queries, int keys) {
    if constexpr (!skips) return true;
    return uniform(p.block_mask.keeps(batch, head, queries * tile_q / block_size,
                                      keys * tile_k / block_size)) != 0;
  }
  // Whether a user's function masks nothing of a tile, where that has been found out.
  static DLATTN_DEVICE bool is_whole(const Params& p, int batch, int head, int queries, int keys) {
    return p.block_mask.bit(p.whole_blocks, batch, head, queries * tile_q / block_size,
                            keys * tile_k / block_size);
  }

 private:
  static DLATTN_DEVICE auto keys_of(const Params& p, WorkItem queries) {
    const int block = queries.tile * tile_q / block_size;
    return [&p, queries, block](int keys) {
      return p.block_mask.keeps(queries.batch, queries.head, block, keys);
    };
  }

  // The block nearest to `from`, on the way to `to`, that is kept, or to + step. A lane looks at each.
  template <int step, class Kept>
  static DLATTN_DEVICE int nearest(int from, int to, Kept kept) {
    for (; step * (to - from) >= 0; from += 32 * step) {
      const int own = from + step * int(threadIdx.x % 32);
      const uint32 found = __ballot_sync(0xffffffffu, step * (to - own) >= 0 && kept(own));
      if (found != 0) return from + step * (__ffs(found) - 1);
    }
    return to + step;
  }
};

}  // namespace dlattn
