// How blocks of a Hopper forward share the keys of few query tiles where the device alone knows lengths.
//
// Key tiles of all query tiles stand in a line, in the order of batch entries, heads and rows, which
// blocks cut into parts of equal length (dlattn/plans/schedule.py does the same where the host knows
// lengths). Behind those of a query tile is a gap, as long as what it takes beside its products: a block that
// goes on with the next one has fewer key tiles. Every block finds out by itself how long the line is and
// what its part of it is; all come to the same. Many query tiles are not divided: blocks ask for whole ones. A
// warp's.
#pragma once

#include "kernels/fwd_sm90_block.cuh"

namespace dlattn {

template <class Block>
struct KeyDivision {
  using Work = typename Block::Work;
  using Groups = typename Block::Parts::Groups;

  // Query tiles for each block up to which keys are divided; keys of a part at the least; parts of a
  // query tile at the most, on average, unless a later kernel adds them.
  static constexpr int most_tiles = 4, least_part = 256, most_parts = 16;
  // What a query tile takes beside its products, and what parts cost a block more, in keys.
  static constexpr float keys_beside = 250.f, parts_cost = 800.f;
  // What of the time may be left at the most. Blocks with parts come to the same keys at different times: that
  // costs more where L2 does not keep all keys that several query tiles read.
  static constexpr float least_gain = 0.8f, least_gain_in_l2 = 0.9f, l2_bytes = 40e6f;
  static constexpr int most_gap = ceil_div(int(keys_beside), Block::tile_k);
  // Query tiles, and lines, that are longer are not divided: so far fp32 counts.
  static constexpr int most_units = 1 << 20, most_length = 1 << 22;
  // Query tiles up to which lanes count those of an entry each; else all those of one.
  static constexpr int few_tiles = 8;

  // What lanes find out on their way through the entries.
  struct Seen {
    int longest = 0;     // the most key tiles of a query tile
    int tiles = 0;       // query tiles of the last entry
    int read_again = 0;  // key tiles of a head that several query tiles read
  };

  // Query tiles of other heads with the same keys stand side by side, and have blocks of their own each (along
  // x): a team of blocks comes to the same keys at a time.
  const Params& p;
  const int beside = gridDim.x, teams = gridDim.y;
  const int groups;  // of heads that share a query tile, or have theirs side by side
  int of_lane = 0;   // the line of the entry that a lane has seen last
  int gap = 0;       // behind the key tiles of each query tile
  int dividing = 0;  // teams that share it; 0 if none do
  int each, larger;  // how much of it a team has, and how many teams have one more

  // Of so many query tiles in all.
  DLATTN_DEVICE KeyDivision(const Params& params, int all_tiles)
      : p(params), groups(params.tile_heads.beside.quotient(Block::tiles_of_heads(params))) {
    const int tiles = p.tile_heads.beside.quotient(all_tiles);
    if (tiles == 0 || tiles > most_tiles * teams) return;
    Seen seen;
    const int units =
        BatchWalk::count(p.batch, [&](int batch) { return of_lane = units_of_entry(batch, seen); });
    const int longest = __reduce_max_sync(0xffffffffu, seen.longest);
    if (longest > most_units || units > most_length - most_gap * tiles) return;
    int most = least(teams, units / ceil_div(least_part, Block::tile_k));
    if (p.parts.tiles == nullptr) most = least(most, most_parts * tiles);
    // Of equal tiles nobody had better have the end of one and the beginning of another.
    const int as_many = small_quotient(most, tiles) * tiles;
    const bool alike = longest * tiles == units && as_many >= 0.9f * most;
    if (alike) most = as_many;
    if (!alike) gap = most_gap;
    const int length = units + gap * tiles;
    of_lane += gap * seen.tiles;
    // Each has a unit at the least.
    if (!alike) most = least(most, length / (most_gap + 1));
    if (most == 0) return;
    const float parts = keys_of(__fdividef(length, most), 1) + parts_cost;
    const float gain = stay_in_l2(seen.read_again) ? least_gain_in_l2 : least_gain;
    if (parts >= gain * keys_if_whole(units, tiles, longest)) return;
    dividing = most;
    each = small_quotient(length, dividing);
    larger = length - each * dividing;
  }

  // Calls offer(item, key tiles) for each part of this block, of WorkItem and Interval. A block waits for parts of
  // smaller numbers only, after it has left its own: what it leaves is what it comes to first.
  template <class Offer>
  DLATTN_DEVICE void for_each_part(Offer offer) const {
    const int team = blockIdx.y;
    if (team >= dividing) return;
    const Interval own{cut(team), cut(team + 1)};
    for (QueryTile at(*this, own.last - 1);; at.go_back(*this)) {
      const Interval part = own & at.units;
      if (part.empty()) return;  // its own begin in the gap behind them
      WorkItem item{at.tile, first_head(at, blockIdx.x), at.batch};
      const int before = team - team_with(at.units.first);
      const int after = team_with(at.units.last - 1) - team;
      item.parts = after == 0 ? before : -1 - Groups::added_to(after, before + after);
      const int first = at.first_key_tile + part.first - at.units.first;
      offer(item, Interval{first, first + part.last - part.first});
      if (part.first == own.first) return;
    }
  }

  // Tells the later kernel of the query tile of this number among those of an entry
  // (dlattn/plans/schedule.py), if it is divided.
  DLATTN_DEVICE void tell(int4* to, int batch, int number) const {
    const Lengths length(p, batch);
    const int tiles = Block::tiles_of(p, length.q), group_and_place = small_quotient(number, tiles);
    const int group = p.tile_heads.beside.quotient(group_and_place);
    const int place = group_and_place - group * beside;
    const QueryTile at(*this, batch, group, number - group_and_place * tiles);
    const int first = team_with(at.units.first), last = team_with(at.units.last - 1);
    if (threadIdx.x % 32 != 0 || first == last) return;
    const int before = place * teams;  // blocks
    to[0] = {at.tile, first_head(at, place), batch, 0};
    to[1] = {before + first, block_count() + before + last, last - first + 1, 0};
  }

 private:
  struct QueryTile;
  DLATTN_DEVICE int first_head(const QueryTile& at, int place) const {
    return Block::first_head(p, at.group * beside + place);
  }

  // Of so many key tiles a lane, of one head.
  DLATTN_DEVICE bool stay_in_l2(int key_tiles) const {
    constexpr float bytes = Block::tile_k * (Block::KTile::columns + Block::VTile::columns) * 2.f;
    const float heads = p.tile_heads.of_keys.quotient(Block::tiles_of_heads(p));
    return __reduce_add_sync(0xffffffffu, key_tiles) * heads * bytes <= l2_bytes;
  }

  // What a block takes, in keys.
  static DLATTN_DEVICE float keys_of(float key_tiles, int tiles) {
    return key_tiles * Block::tile_k + keys_beside * tiles;
  }
  // The block with the most, where tiles are whole: those that differ fill each other's gaps.
  DLATTN_DEVICE float keys_if_whole(int units, int tiles, int longest) const {
    if (tiles <= teams) return keys_of(longest, 1);
    const int rounds = small_quotient(tiles + teams - 1, teams);
    const float mean = __fdividef(units, tiles), even = __fdividef(units, teams) + mean / 2;
    if (longest <= 1.25f * mean) return keys_of(mean * rounds, rounds);
    return keys_of(even > longest ? even : longest, rounds);
  }

  // Also of a query tile without keys, which someone stores.
  static DLATTN_DEVICE int units_of(const Work& work) {
    return most(1, work.last_tile - work.first_tile + 1);
  }
  DLATTN_DEVICE int units_of(int tile, const Lengths& length) const {
    return units_of(Work::of(p, {tile, 0, 0}, length));
  }
  // A lane's: of all heads.
  DLATTN_DEVICE int units_of_entry(int batch, Seen& seen) const {
    const Lengths length = Lengths::of_lane(p, batch);
    // Lanes beyond the last entry have that one once more, which is counted once.
    const int lane = threadIdx.x % 32, before_it = __shfl_up_sync(0xffffffffu, batch, 1);
    const bool is_first = lane == 0 || batch != before_it;
    const int tiles = is_first ? Block::tiles_of(p, length.q) : 0;
    int sum = 0;
    const auto add = [&](int own) {
      seen.longest = most(seen.longest, own);
      sum += own;
    };
#pragma unroll 1
    for (int tile = 0; tile < (tiles > few_tiles ? 0 : tiles); ++tile) add(units_of(tile, length));
    uint32 many = __ballot_sync(0xffffffffu, tiles > few_tiles);
#pragma unroll 1
    for (; many != 0; many &= many - 1) {
      const int owner = __ffs(many) - 1;
      const Lengths its = Lengths::of(from_lane(length.q, owner), from_lane(length.kv, owner),
                                      from_lane(length.shift, owner));
      const int before = sum;
      sum = 0;
#pragma unroll 1
      for (int tile = lane; tile < Block::tiles_of(p, its.q); tile += 32) add(units_of(tile, its));
      const int all = __reduce_add_sync(0xffffffffu, sum);
      sum = lane == owner ? all : before;
    }
    seen.tiles = tiles * groups;
    if (tiles > 1) seen.read_again += ceil_div(length.kv, Block::tile_k);
    return sum * groups;
  }
  // The same of the line.
  DLATTN_DEVICE int length_of_entry(int batch) const {
    if (p.batch <= 32) return of_lane;
    Seen seen;
    const int units = units_of_entry(batch, seen);
    return units + gap * seen.tiles;
  }

  // Where team i begins in the line, and the team that a unit is of.
  DLATTN_DEVICE int cut(int i) const { return i * each + least(i, larger); }
  DLATTN_DEVICE int team_with(int place) const {
    const int after = place - larger * (each + 1);
    return after < 0 ? small_quotient(place, each + 1) : larger + small_quotient(after, each);
  }

  // A query tile of each place side by side, and its key tiles in the line.
  struct QueryTile {
    int batch, group, tile, first_key_tile;
    Interval units;
    Lengths length;

    // With this place of the line, or before a gap that it is in.
    DLATTN_DEVICE QueryTile(const KeyDivision& all, int place) : length(all.p) {
      BatchWalk walk;
      walk.find(place, all.p.batch, [&](int b) { return all.length_of_entry(b); });
      batch = walk.batch;
      length = Lengths(all.p, batch);
      const int tiles = Block::tiles_of(all.p, length.q);
      if (tiles == 1) {  // as of few queries, which should not wait for more code
        tile = 0;
        const int own = look(all.p), of_tile = own + all.gap;
        group = small_quotient(walk.rest, of_tile);
        units.first = place - walk.rest + group * of_tile;
        units.last = units.first + own;
        return;
      }
      const auto own = [&](int of) { return all.units_of(of, length) + all.gap; };
      const int of_group = BatchWalk::count(tiles, own);  // heads have as many each
      group = small_quotient(walk.rest, of_group);
      BatchWalk within;
      within.find(walk.rest - group * of_group, tiles, own);
      tile = within.batch;
      units.first = place - within.rest;
      units.last = units.first + look(all.p);
    }

    DLATTN_DEVICE QueryTile(const KeyDivision& all, int of_batch, int of_group, int number)
        : batch(of_batch), group(of_group), tile(number), length(all.p, of_batch) {
      const int earlier = BatchWalk::count(batch, [&](int b) { return all.length_of_entry(b); });
      const auto own = [&](int of) { return all.units_of(of, length) + all.gap; };
      const int of_group_before = BatchWalk::count(Block::tiles_of(all.p, length.q), own);
      units.first = earlier + group * of_group_before + BatchWalk::count(tile, own);
      units.last = units.first + look(all.p);
    }

    // To the one before, of which there is one.
    DLATTN_DEVICE void go_back(const KeyDivision& all) {
      if (--tile < 0) {
        if (--group < 0) {
          group = all.groups - 1;
          do {
            length = Lengths(all.p, --batch);
          } while (length.q == 0);
        }
        tile = Block::tiles_of(all.p, length.q) - 1;
      }
      units.last = units.first - all.gap;
      units.first = units.last - look(all.p);
    }

   private:
    DLATTN_DEVICE int look(const Params& p) {
      const Work work = Work::of(p, {tile, 0, batch}, length);
      first_key_tile = work.first_tile;
      return units_of(work);
    }
  };
};

}  // namespace dlattn
