// A ring of buffers between producers and consumers, and a place in it.
#pragma once

#include "base/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"

namespace dlattn {

// Two barriers per buffer, named by the event.
template <int stages_>
struct Ring {
  static constexpr int stages = stages_;
  uint64 full[stages];   // every producer has filled it, or the copy engine
  uint64 empty[stages];  // every consumer has read it

  DLATTN_DEVICE void init(int consumers, int producers = 1) {
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full[stage], producers);
      mbarrier_init(empty[stage], consumers);
    }
  }
};

// A buffer of a ring, and how often the ring has been passed (its parity).
template <int stages>
struct Place {
  int stage = 0;
  uint32 parity = 0;

  DLATTN_DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The same of the n-th buffer that is passed through a ring.
template <int stages>
DLATTN_DEVICE Place<stages> place_of(uint32 n) {
  return {int(n % stages), n / stages % 2};
}

// A warp is done with a buffer: has read it, or has filled it.
DLATTN_DEVICE void release(uint64& event) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(event);
}

// Once the buffer is empty, one lane calls start(stage, landed), which orders copies of so many bytes; an
// elected one where that is faster (bench/NOTES.md).
template <bool elects = false, int stages, class Start>
DLATTN_DEVICE void order(Ring<stages>& ring, const Place<stages>& place, uint64& landed,
                         uint32 bytes, Start start) {
  mbarrier_wait(ring.empty[place.stage], place.parity ^ 1);
  if (elects ? elected() : threadIdx.x % 32 == 0) {
    mbarrier_arrive_expect(landed, bytes);
    start(place.stage, landed);
  }
}

// A warp fills the next buffer, which is full when the copies have landed.
template <int stages, class Start>
DLATTN_DEVICE void fill(Ring<stages>& ring, Place<stages>& place, uint32 bytes, Start start) {
  order(ring, place, ring.full[place.stage], bytes, start);
  place.advance();
}

}  // namespace dlattn
