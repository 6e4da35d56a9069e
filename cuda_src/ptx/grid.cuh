// Kernels that begin before the one before them has ended. PTX ISA 9.7.13.14 (griddepcontrol).
#pragma once

#include "base/types.cuh"

namespace dlattn {

// Waits until all that the kernels before have written is there.
DLATTN_DEVICE void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin once every block has said so.
DLATTN_DEVICE void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dlattn
