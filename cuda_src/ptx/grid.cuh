// Kernels that begin before the one in front of them has ended. PTX ISA 9.7.13.13 (griddepcontrol).
#pragma once

#include "base/types.cuh"

namespace dlattn {

// Lets the next kernel's blocks begin, as soon as all of this one say so. Before sm_90, none does.
DLATTN_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before has ended, and what it wrote is visible.
DLATTN_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace dlattn
