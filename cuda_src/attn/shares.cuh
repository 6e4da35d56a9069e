// Key tiles of all items, divided evenly among blocks (Stream-K: Osama et al. 2023, section 4).
//
// An item is what the queries of one batch entry attend to through one head of K and V. A column of
// items, one of each of some heads, has as many blocks side by side, which read the same keys' rows, one
// next to the other, at about the same time. Tiles of a column are numbered from its first key on, those
// of all columns one after the other, and each team of blocks takes as many as any other, wherever that
// cuts a column. It walks from its last tile to its first. So what it leaves of an item for another
// block to complete comes first, and what it completes last: whoever completes an item has its last
// tile. Blocks wait for others of lower numbers only, which began before.
#pragma once

#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "ptx/cluster.cuh"

namespace dlattn {

// The tiles of an item of one batch entry. At least one: rows without keys are stored, too.
template <class Mask, int tile_k>
struct ItemKeys {
  int first, last, tiles;

  ItemKeys() = default;
  DLATTN_DEVICE ItemKeys(const Lengths& length, const Params& p) {
    Interval keys = Mask::keys({0, length.q}, length, p);
    if (length.q == 0 || keys.empty()) keys = {0, 0};
    first = keys.first / 16 * 16;
    last = keys.last;
    tiles = most(1, ceil_div(last - first, tile_k));
  }

  // Of the tiles from one to another, and of both.
  DLATTN_DEVICE Interval rows(int first_tile, int last_tile) const {
    return {first + first_tile * tile_k, least(first + (last_tile + 1) * tile_k, last)};
  }
};

// The tiles of a block, of which it is at one. Every lane of a warp must be there.
template <class Mask, int tile_k>
struct Share {
  using Keys = ItemKeys<Mask, tile_k>;
  const Params& p;
  const int team, lane;  // of this block: its team's number, and its own there
  int total, left;       // tiles of all items; of this block's share: the last of them is the place
  int batch, column, tile;
  Lengths::AtOnce lengths;  // of the first batch entry
  Lengths length;           // of the batch entry
  Keys keys;

  DLATTN_DEVICE explicit Share(const Params& params)
      : p(params),
        team(params.items.pairs.quotient(blockIdx.x)),
        lane(params.items.pairs.rest(blockIdx.x)),
        lengths(params, 0),
        length(params) {
    if (p.batch == 1) lengths.find();
    divide_alike();
  }

  // Until then, all sequences are full.
  DLATTN_DEVICE void read_lengths() {
    if (p.seq_len_q.data == nullptr && p.seq_len_kv.data == nullptr) return;
    if (p.batch > 1) return divide();
    length = lengths.read(p);
    divide_alike();
  }

  DLATTN_DEVICE int width() const { return p.items.pairs.number; }  // blocks of a team
  // Of a batch entry.
  DLATTN_DEVICE int columns() const { return p.items.pairs.quotient(p.items.heads.number); }

  // Of the heads of K and V, or of queries that share them.
  DLATTN_DEVICE int group() const { return column * width() + lane; }
  DLATTN_DEVICE int first_key() const { return keys.first + tile * tile_k; }

  // Of this item, the least tile in the share.
  DLATTN_DEVICE int last_of_item() const { return most(0, tile - left + 1); }
  DLATTN_DEVICE bool enters_item() const { return tile == keys.tiles - 1; }
  // Whether the item's last tile is in the share.
  DLATTN_DEVICE bool completes() const { return last_place() < first_place(team + 1); }
  // The teams that have the first and the last tile of the item.
  DLATTN_DEVICE int first_team() const { return team_of(place() - tile); }
  DLATTN_DEVICE int last_team() const { return team_of(last_place()); }
  // Whether the item may be shared by more teams than these and one; it has all tiles of those between.
  DLATTN_DEVICE bool may_exceed(int other_teams) const {
    return keys.tiles - 2 >= other_teams * each();
  }
  DLATTN_DEVICE int block_of(int team) const { return team * width() + lane; }

  DLATTN_DEVICE void advance() {
    if (--left == 0 || --tile >= 0) return;
    if (--column < 0) {
      column = columns() - 1;
      length = Lengths::at_once(p, --batch);
      keys = Keys(length, p);
    }
    tile = keys.tiles - 1;
  }

 private:
  // Tiles that a share has, and how many teams, the first ones, have one more.
  DLATTN_DEVICE int each() const { return p.items.parts.quotient(total); }
  DLATTN_DEVICE int longer() const { return p.items.parts.rest(total); }
  // Among all tiles: of a team's first one, of this one, of the item's last one.
  DLATTN_DEVICE int first_place(int team) const { return team * each() + least(team, longer()); }
  DLATTN_DEVICE int place() const { return first_place(team) + left - 1; }
  DLATTN_DEVICE int last_place() const { return place() - tile + keys.tiles - 1; }
  DLATTN_DEVICE int team_of(int tile_of_all) const {
    const int after = tile_of_all - longer() * (each() + 1);
    const bool is_longer = after < 0;
    const int before = is_longer ? 0 : longer();
    return before + small_quotient(is_longer ? tile_of_all : after, each() + is_longer);
  }
  // Of batch entries that all have these lengths.
  DLATTN_DEVICE void divide_alike() {
    const int tiles = columns() * Keys(length, p).tiles;
    if (!take_share(p.batch * tiles)) return;
    batch = p.batch == 1 ? 0 : place() / tiles;
    enter(place() - batch * tiles);
  }
  DLATTN_DEVICE void divide() {
    if (!take_share(total_of_different())) return;
    BatchWalk walk;
    walk.find(place(), p.batch, [&](int b) { return tiles_of(b); });
    batch = walk.batch;
    length = Lengths::at_once(p, batch);
    enter(walk.rest);
  }
  // Of so many tiles of all columns. False if there is none.
  DLATTN_DEVICE bool take_share(int tiles) {
    total = tiles;
    left = each() + (team < longer());
    return left > 0;
  }
  // A tile of the batch entry.
  DLATTN_DEVICE void enter(int tile_of_entry) {
    keys = Keys(length, p);
    column = columns() == 1 ? 0 : tile_of_entry / keys.tiles;
    tile = tile_of_entry - column * keys.tiles;
  }
  DLATTN_DEVICE int tiles_of(int b) const {
    return columns() * Keys(Lengths::of_lane(p, b), p).tiles;
  }
  DLATTN_DEVICE int total_of_different() const {
    int sum = 0;
    for (int b = threadIdx.x % 32; b < p.batch; b += 32) sum += tiles_of(b);
    return __reduce_add_sync(0xffffffffu, sum);
  }
};

// The tiles of one item that a block of a cluster has: the cluster has the item, and its blocks divide it
// evenly. The clusters of the heads of a batch entry are neighbours. A block alone is a cluster of one.
template <class Mask, int tile_k>
struct ClusterShare {
  using Keys = ItemKeys<Mask, tile_k>;
  const Params& p;
  const int rank, blocks, log2_blocks;  // in the cluster
  const int batch, head_group;
  Lengths::AtOnce lengths;
  Lengths length;
  Keys keys;
  int tile, left;  // may be none

  DLATTN_DEVICE explicit ClusterShare(const Params& params)
      : p(params),
        rank(cluster_rank()),
        blocks(cluster_blocks()),
        log2_blocks(__popc(cluster_blocks() - 1)),
        batch(params.items.heads.quotient(blockIdx.x >> log2_blocks)),
        head_group(params.items.heads.rest(blockIdx.x >> log2_blocks)),
        lengths(params, batch),
        length(params) {
    lengths.find();
    divide();
  }

  // Until then, all sequences are full.
  DLATTN_DEVICE void read_lengths() {
    if (p.seq_len_q.data == nullptr && p.seq_len_kv.data == nullptr) return;
    take(lengths.read(p));
  }
  DLATTN_DEVICE void take(const Lengths& known) {
    length = known;
    divide();
  }

  DLATTN_DEVICE int group() const { return head_group; }
  DLATTN_DEVICE int first_key() const { return keys.first + tile * tile_k; }
  DLATTN_DEVICE int last_of_item() const { return tile - left + 1; }
  // Blocks have no more than the first item.
  DLATTN_DEVICE bool enters_item() const { return false; }
  DLATTN_DEVICE void advance() { --left, --tile; }

 private:
  DLATTN_DEVICE void divide() {
    keys = Keys(length, p);
    const int end = (rank + 1) * keys.tiles >> log2_blocks;
    tile = end - 1;
    left = end - (rank * keys.tiles >> log2_blocks);
  }
};

}  // namespace dlattn
