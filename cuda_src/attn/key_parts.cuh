// Query tiles whose keys several blocks share: each leaves what it has of the rows in the workspace, and
// the last of them has it all in the end. A mark says that a warp's part is there; it is drawn when the
// plan is made, and taken away by who adds: nobody has to clear the workspace.
#pragma once

#include "attn/refs.cuh"
#include "attn/softmax.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// How parts of the same rows meet where they are many: the last of four, one after the other, adds up what
// these have, and of four of those sums, again the last. One block for all would read as much as each has,
// one after the other. Blocks wait for parts with smaller numbers only.
struct PartGroups {
  static constexpr int log2_size = 2, size = 1 << log2_size;
  int number;  // of a part, from 0 on
  bool last;

  // Groups of four, of four groups, and so on by level, that end before this part.
  DLATTN_DEVICE constexpr int ended(int level) const {
    return last ? number >> log2_size * level : ((number + 1) >> log2_size * level) - 1;
  }
  // Those of them that this part's block adds, the i-th of which ends with a part.
  DLATTN_DEVICE constexpr int others(int level) const { return ended(level) % size; }
  DLATTN_DEVICE constexpr int end_of_other(int level, int i) const {
    return ((ended(level) - others(level) + i + 1) << log2_size * level) - 1;
  }
  // Then another block adds what this one has; or it has all.
  DLATTN_DEVICE constexpr bool leaves(int level) const {
    return !last && others(level) < size - 1;
  }
  DLATTN_DEVICE constexpr bool completes(int level) const { return last && ended(level) < size; }
};

// Rows of so many warps. What a lane leaves is for the lane of the same number: no row is gathered.
template <int warps, class Softmax, int v_tiles>
struct KeyParts {
  using Output = Accumulator<1, v_tiles>;
  struct Part {
    float4 output[v_tiles][32 * warps];
    float4 softmax[32 * warps];  // references of the lane's two rows, and sums
  };

  const PartsRef& parts;
  const int thread;  // among these warps

  // True if this block then has all of the rows. The last part has the number of parts before it, others
  // have -1, -2, ...
  DLATTN_DEVICE bool gather(int block, int number, Softmax& softmax, Output& output) const {
    if (number < 0) {
      leave(block, softmax, output);
      return false;
    }
#pragma unroll 1
    for (int before = number; before > 0; --before) add(block - before, softmax, output);
    return true;
  }
  DLATTN_DEVICE bool gather_in_groups(int block, int number, Softmax& softmax,
                                      Output& output) const {
    const bool last = number > 0;
    const PartGroups part{last ? number : -1 - number, last};
#pragma unroll 1
    for (int level = 0;; ++level) {
      if (part.leaves(level)) {
        leave(block, softmax, output);
        return false;
      }
#pragma unroll 1
      for (int i = 0; i < part.others(level); ++i) {
        add(block - part.number + part.end_of_other(level, i), softmax, output);
      }
      if (part.completes(level)) return true;
    }
  }

 private:
  DLATTN_DEVICE Part& of(int block) const { return static_cast<Part*>(parts.data)[block]; }
  DLATTN_DEVICE uint64& mark(int block) const { return parts.marks[block * warps + thread / 32]; }

  DLATTN_DEVICE void leave(int block, const Softmax& softmax, const Output& output) const {
    Part& part = of(block);
#pragma unroll
    for (int n = 0; n < v_tiles; ++n) {
      const float(&o)[4] = output.at[0][n];
      part.output[n][thread] = {o[0], o[1], o[2], o[3]};
    }
    const float(&reference)[2] = softmax.reference, (&sum)[2] = softmax.row_sum;
    part.softmax[thread] = {reference[0], reference[1], sum[0], sum[1]};
    __syncwarp();
    if (thread % 32 == 0) store_release(&mark(block), parts.mark);
  }

  // When it is there.
  DLATTN_DEVICE void add(int block, Softmax& softmax, Output& output) const {
    // A vote, because ptxas then knows that lanes stay together.
    while (!__all_sync(0xffffffffu, load_acquire(&mark(block)) == parts.mark)) {
    }
    const Part& part = of(block);
    const float4 other = load_relaxed(&part.softmax[thread]);
    float own_factor[2], factor[2];
    softmax.add_part({other.x, other.y}, {other.z, other.w}, own_factor, factor);
#pragma unroll
    for (int n = 0; n < v_tiles; ++n) {
      const float4 o = load_relaxed(&part.output[n][thread]);
      float(&own)[4] = output.at[0][n];
      own[0] = own[0] * own_factor[0] + o.x * factor[0];
      own[1] = own[1] * own_factor[0] + o.y * factor[0];
      own[2] = own[2] * own_factor[1] + o.z * factor[1];
      own[3] = own[3] * own_factor[1] + o.w * factor[1];
    }
    __syncwarp();
    if (thread % 32 == 0) mark(block) = 0;
  }
};

}  // namespace dlattn
