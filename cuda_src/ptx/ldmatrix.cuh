// Loads of 8x8 matrices of 16-bit elements from shared memory. PTX ISA 9.7.14.5.15 (ldmatrix).
// Lane 8 j + r gives the address of row r of matrix j; with transpose the matrix arrives transposed.
#pragma once

#include "base/types.cuh"

namespace dlattn {

template <bool transpose>
DLATTN_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 shared_address) {
  if constexpr (transpose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address)
                 : "memory");
  }
}

template <bool transpose>
DLATTN_DEVICE void ldmatrix_x2(uint32 (&r)[2], uint32 shared_address) {
  if constexpr (transpose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address)
                 : "memory");
  }
}

// Transposes an 8 x 8 matrix of 16-bit elements among the lanes of a warp. PTX ISA 9.7.14.5.17
// (movmatrix).
DLATTN_DEVICE uint32 transpose_8x8(uint32 pair) {
  uint32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace dlattn
