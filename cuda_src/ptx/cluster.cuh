// Blocks of a cluster: who they are, how they meet, and each other's shared memory.
#pragma once

#include "base/types.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// 10.13, 10.14 (%cluster_ctarank, %cluster_nctarank): which block of how many.
DLATTN_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DLATTN_DEVICE int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// 9.7.13.3 (barrier.cluster).
DLATTN_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DLATTN_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 9.7.9.22 (mapa): where another block has what this one has at an address.
DLATTN_DEVICE uint32 shared_address_in(const void* shared, int rank) {
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// 9.7.9.13 (st.async): stores in another block's shared memory, and counts the bytes at a barrier there.
DLATTN_DEVICE void send(uint32 address, float4 v, uint32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
          "r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
DLATTN_DEVICE void send(uint32 address, float2 v, uint32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
          "r"(address),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}

}  // namespace dlattn
