// Blocks of a cluster: their shared memory, and barriers in it.
#pragma once

#include "base/types.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// 10.12 (%cluster_ctarank).
DLATTN_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.9.24 (mapa): where this address is in the shared memory of another block.
DLATTN_DEVICE uint32 address_in_block(uint32 shared, int rank) {
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// 9.7.13.5 (barrier.cluster): all threads of all blocks.
DLATTN_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
DLATTN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// 9.7.9.13 (st.async): a word into another block, whose barrier counts its bytes.
DLATTN_DEVICE void store_in_block(uint32 address, int value, uint32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(value), "r"(barrier)
      : "memory");
}

// 9.7.13.15.13 (mbarrier.arrive.shared::cluster). Without a scope, it waits for no writes of this thread to
// memory: a fence for those takes 1,000 cycles.
DLATTN_DEVICE void mbarrier_arrive_in_block(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DLATTN_DEVICE void mbarrier_arrive_expect_in_block(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// 9.7.9.25.4.1 (cp.async.bulk.shared::cluster.shared::cta): contiguous bytes, a multiple of 16, into another
// block, whose barrier counts them.
DLATTN_DEVICE void bulk_copy_to_block(uint32 address, uint32 shared, uint32 bytes, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(address),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace dlattn
