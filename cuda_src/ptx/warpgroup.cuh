// Registers and barriers of a group of warps.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// 9.7.19.5 (setmaxnreg): gives registers back, or takes them once they are free.
template <int registers>
DLATTN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
DLATTN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// 9.7.13.14 (elect.sync): true in one lane of a warp, of which every lane must be there. The compiler knows that
// it is one; where another condition tells a lane, it has a loop over lanes around what takes uniform
// registers, like copies of boxes.
DLATTN_DEVICE bool elected() {
  uint32 is_elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// 9.7.13.1 (barrier.sync, barrier.arrive): barrier 0 is __syncthreads.
DLATTN_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DLATTN_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// 9.7.14.5.16 (stmatrix): lane 8 j + r gives the address of row r of matrix j.
DLATTN_DEVICE void stmatrix_x4(uint32 shared_address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// The same; each matrix is stored transposed.
DLATTN_DEVICE void stmatrix_x4_transposed(uint32 shared_address, uint32 r0, uint32 r1, uint32 r2,
                                          uint32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace dlattn
