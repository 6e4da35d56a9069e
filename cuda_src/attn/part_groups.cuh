// Parts of an item, of blocks that stand in a line: the last one adds them all up in the end. Many meet in
// groups of so many first, in the part of each that is nearest to the last: one block would be long about
// it. Every block waits for earlier ones only.
#pragma once

#include "base/math.cuh"

namespace dlattn {

template <int size, int most_by_one_>
struct PartGroups {
  static constexpr int most_by_one = most_by_one_;

  // Of the parts that the last one adds, of so many before it: from the nearest on each of these; and how
  // many.
  static DLATTN_DEVICE int step(int before_last) { return before_last > most_by_one ? size : 1; }
  static DLATTN_DEVICE int added_last(int before_last) {
    return before_last > most_by_one ? ceil_div(before_last, size) : before_last;
  }

  // How many next to it the part at this distance from the last adds before that adds it.
  static DLATTN_DEVICE int added_to(int distance, int before_last) {
    if (before_last <= most_by_one || distance % size != 1) return 0;
    return least(size - 1, before_last - distance);
  }
};

}  // namespace dlattn
