// Ordering of warpgroup matrix multiplies, and the descriptors of their shared-memory operands.
#pragma once

#include "base/types.cuh"
#include "ptx/wgmma_shapes.cuh"

namespace dlattn {

// Registers written so far may be read by the multiplies that follow. PTX ISA 9.7.15.7.1.
DLATTN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of multiplies. PTX ISA 9.7.15.7.2.
DLATTN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most pending groups are in flight. PTX ISA 9.7.15.7.3.
template <int pending>
DLATTN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Ties a value to this point: it is neither read earlier nor written later.
DLATTN_DEVICE void wgmma_tie(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// A matrix descriptor, 128-byte swizzle. PTX ISA 9.7.15.5.1.2.2.
//   stride: bytes between groups of eight 128-byte rows
//   leading: bytes between 64-column slabs; used by operands that are read transposed
//   offset: of the operand from the address; constant in the loop
DLATTN_DEVICE uint64 wgmma_descriptor(uint32 shared_address, uint32 offset, uint32 leading,
                                      uint32 stride) {
  // In a cluster, the rank of the block stands above an address.
  const uint32 low = (shared_address & 0x3ffff) / 16 + ((offset >> 4) | (leading >> 4) << 16);
  const uint32 high = (stride >> 4) | 1u << 30;
  return uint64(high) << 32 | low;
}

}  // namespace dlattn
