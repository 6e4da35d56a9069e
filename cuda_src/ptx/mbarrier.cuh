// Barriers in shared memory that count arrivals and bytes. PTX ISA 9.7.13.15 (mbarrier).
#pragma once

#include "base/types.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// 9.7.13.15.9 (mbarrier.init): a phase ends after this many arrivals.
DLATTN_DEVICE void mbarrier_init(uint64& barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// 9.7.13.15.13 (mbarrier.arrive).
DLATTN_DEVICE void mbarrier_arrive(uint64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// 9.7.13.15.13 (mbarrier.arrive.expect_tx): arrives, and adds bytes that the phase waits for.
DLATTN_DEVICE void mbarrier_arrive_expect(uint64& barrier, uint32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// 9.7.13.15.16 (mbarrier.try_wait): until the phase of this parity has ended.
DLATTN_DEVICE void mbarrier_wait(uint64& barrier, uint32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// 9.7.13.15.16 (mbarrier.test_wait): whether the phase of this parity has ended.
DLATTN_DEVICE bool mbarrier_test(uint64& barrier, uint32 parity) {
  int done;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.s32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// 9.7.13.4 (fence.mbarrier_init): initialised barriers are visible to the copy engine.
DLATTN_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace dlattn
