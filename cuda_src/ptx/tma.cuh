// Bulk tensor copies between global and shared memory. PTX ISA 9.7.9.27 (cp.async.bulk.tensor).
#pragma once

#include "base/types.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// CUtensorMap: an opaque 128 bytes that the driver encodes.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// 9.7.9.27.1.2: a box into shared memory; zeros where it leaves the tensor.
DLATTN_DEVICE void tma_load_4d(uint32 shared, const TensorMap& map, uint64& barrier, int c0, int c1,
                               int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier))
      : "memory");
}

// What L2 does with what is accessed: 9.7.9.15 (createpolicy), for all of it.
enum class L2 : uint64 { evict_first = 0x12f0000000000000, evict_last = 0x14f0000000000000 };

// The same, with a policy.
DLATTN_DEVICE void tma_load_4d(uint32 shared, const TensorMap& map, uint64& barrier, int c0, int c1,
                               int c2, int c3, L2 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)),
      "l"(uint64(policy))
      : "memory");
}

// The same, to this address of all blocks in the mask, whose barriers at this address count the bytes.
DLATTN_DEVICE void tma_load_4d_everywhere(uint32 shared, const TensorMap& map, uint64& barrier,
                                          int c0, int c1, int c2, int c3, uint32 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)),
      "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// 9.7.9.25.4.1 (cp.async.bulk): contiguous bytes, a multiple of 16, both addresses 16-byte aligned.
DLATTN_DEVICE void bulk_load(uint32 shared, const void* global, uint32 bytes, uint64& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// The same, into global memory.
DLATTN_DEVICE void bulk_store(void* global, uint32 shared, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// 9.7.9.27.1.2: a box from shared memory; what leaves the tensor is not written.
DLATTN_DEVICE void tma_store_4d(const TensorMap& map, uint32 shared, int c0, int c1, int c2,
                                int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared)
      : "memory");
}

// 9.7.9.25.4.2 (cp.reduce.async.bulk): adds contiguous floats to global memory.
DLATTN_DEVICE void bulk_reduce_add(void* global, uint32 shared, uint32 bytes, L2 policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 "
      "[%0], [%1], %2, %3;" ::"l"(global),
      "r"(shared), "r"(bytes), "l"(uint64(policy))
      : "memory");
}

// 9.7.9.25.4.3 (cp.async.bulk.commit_group).
DLATTN_DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// 9.7.9.25.4.4 (cp.async.bulk.wait_group.read): all but this thread's last `pending` groups of
// stores have read their memory.
template <int pending>
DLATTN_DEVICE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// 9.7.9.25.4.4 (cp.async.bulk.wait_group): all but this thread's last `pending` groups are done, and
// their writes visible to it.
template <int pending>
DLATTN_DEVICE void tma_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// 9.7.9.27.2 (prefetch.tensormap).
DLATTN_DEVICE void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// 9.7.13.4 (fence.proxy.async): ordinary writes to shared memory are visible to copies and wgmma.
DLATTN_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same of global memory.
DLATTN_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace dlattn
