// Query tiles whose keys several blocks share: each leaves what it has of the rows in the workspace, and
// the last of them has it all in the end. A mark says that a warp's part is there; it is drawn when the
// plan is made, and taken away by who adds: nobody has to clear the workspace. Where parts of a tile are
// many, all are left, without marks, and a kernel of its own adds them up (kernels/fwd_parts.cuh).
#pragma once

#include "attn/part_groups.cuh"
#include "attn/refs.cuh"
#include "attn/schedule.cuh"
#include "attn/softmax.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// Adds a part of the same rows: of its softmax each row's reference and sum, of its output what
// `load(n)` returns, a lane's.
template <class Softmax, int v_tiles, class Load>
DLATTN_DEVICE void add_part(Softmax& softmax, Accumulator<1, v_tiles>& output, float4 other,
                            Load load) {
  float own_factor[2], factor[2];
  softmax.add_part({other.x, other.y}, {other.z, other.w}, own_factor, factor);
#pragma unroll
  for (int n = 0; n < v_tiles; ++n) {
    const float4 o = load(n);
    float (&own)[4] = output.at[0][n];
    own[0] = own[0] * own_factor[0] + o.x * factor[0];
    own[1] = own[1] * own_factor[0] + o.y * factor[0];
    own[2] = own[2] * own_factor[1] + o.z * factor[1];
    own[3] = own[3] * own_factor[1] + o.w * factor[1];
  }
}

template <class Softmax>
DLATTN_DEVICE float4 told_of(const Softmax& softmax) {
  const float (&reference)[2] = softmax.reference, (&sum)[2] = softmax.row_sum;
  return {reference[0], reference[1], sum[0], sum[1]};
}
DLATTN_DEVICE float4 told_of(const float (&output)[4]) {
  return {output[0], output[1], output[2], output[3]};
}

// What a block has of the rows of so many warps. What a lane leaves is for the lane of the same number: no
// row is gathered.
template <int warps, int v_tiles>
struct KeyPart {
  float4 output[v_tiles][32 * warps];
  float4 softmax[32 * warps];
};

template <int warps, int v_tiles>
struct KeyParts {
  using Output = Accumulator<1, v_tiles>;
  using Part = KeyPart<warps, v_tiles>;
  using Groups = PartGroups<4, 6>;  // a part that is added takes a microsecond

  const PartsRef& parts;
  const int thread;  // among these warps

  // True if this block then has all of the rows. The last part has the number of parts before it; others
  // have -1, less the number of those that they add, if parts meet in groups.
  template <class Softmax>
  DLATTN_DEVICE bool gather(int number, bool in_groups, Softmax& softmax, Output& output) const {
    const int count = number > 0 ? number : in_groups ? -1 - number : 0;
    const int step = in_groups ? Groups::step(most(0, number)) : 1;
#pragma unroll 1
    for (int before = round_up(count, step) - step + 1; before > 0; before -= step) {
      add(block_number() - before, softmax, output);
    }
    if (number > 0) return true;
    const int block = block_number();
    leave(block, softmax, output);
    tell(block);
    return false;
  }
  // For a later kernel. A block may have two parts: of a tile that ends with it, and of another.
  template <class Softmax>
  DLATTN_DEVICE void leave_behind(int number, const Softmax& softmax, const Output& output) const {
    leave(block_number() + (number > 0 ? block_count() : 0), softmax, output);
  }

 private:
  DLATTN_DEVICE Part& at(int place) const { return static_cast<Part*>(parts.data)[place]; }
  DLATTN_DEVICE uint64& mark(int block) const { return parts.marks[block * warps + thread / 32]; }

  template <class Softmax>
  DLATTN_DEVICE void leave(int place, const Softmax& softmax, const Output& output) const {
    Part& part = at(place);
#pragma unroll
    for (int n = 0; n < v_tiles; ++n) part.output[n][thread] = told_of(output.at[0][n]);
    part.softmax[thread] = told_of(softmax);
  }
  DLATTN_DEVICE void tell(int block) const {
    __syncwarp();
    if (thread % 32 == 0) store_release(&mark(block), parts.mark);
  }

  // When it is there.
  template <class Softmax>
  DLATTN_DEVICE void add(int block, Softmax& softmax, Output& output) const {
    // A vote, because ptxas then knows that lanes stay together.
    while (!__all_sync(0xffffffffu, load_acquire(&mark(block)) == parts.mark)) {
    }
    const Part& part = at(block);
    add_part(softmax, output, load_relaxed(&part.softmax[thread]),
             [&](int n) { return load_relaxed(&part.output[n][thread]); });
    __syncwarp();
    if (thread % 32 == 0) mark(block) = 0;
  }
};

}  // namespace dlattn
