// Warp-level matrix multiply, m16n8k16, fp32 accumulation. PTX ISA 9.7.14.5 (mma).
//
// Fragments, for lane = 4 g + t:
//   a[0] rows g,   k 2t..2t+1     a[1] rows g+8, k 2t..2t+1
//   a[2] rows g,   k 2t+8..2t+9   a[3] rows g+8, k 2t+8..2t+9
//   b[0] k 2t..2t+1, column g     b[1] k 2t+8..2t+9, column g
//   c[0..1] row g, columns 2t..2t+1     c[2..3] row g+8, columns 2t..2t+1
#pragma once

#include "base/types.cuh"

namespace dlattn {

template <class T>
DLATTN_DEVICE void mma_m16n8k16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (same_type<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace dlattn
