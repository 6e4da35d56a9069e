// Asynchronous copies into shared memory and reductions into global memory.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// The 32-bit address that shared-memory instructions take. PTX ISA 9.7.9.20 (cvta).
DLATTN_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, bypassing L1; zeros when not valid. PTX ISA 9.7.9.25.3.1 (cp.async).
DLATTN_DEVICE void cp_async_16(uint32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// PTX ISA 9.7.9.25.3.3 (cp.async.wait_all): this thread's copies have landed.
DLATTN_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 9.7.9.25.3.2 (cp.async.commit_group, cp.async.wait_group): all but the latest `pending` groups of this
// thread's copies have landed.
DLATTN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
DLATTN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 16 bytes of zeros. PTX ISA 9.7.9.12 (st).
DLATTN_DEVICE void store_shared_zeros(uint32 shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

// One byte, or two, in the low bits. PTX ISA 9.7.9.8 (ld).
DLATTN_DEVICE uint32 load_shared_u8(uint32 shared) {
  uint32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}
DLATTN_DEVICE uint32 load_shared_u16(uint32 shared) {
  uint16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
  return v;
}

// 16 bytes. PTX ISA 9.7.9.12 (st).
DLATTN_DEVICE void store_16(void* global, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Not before the reads and writes of memory that stand before it, and not kept: a register costs more
// than another load. PTX ISA 9.7.9.8 (ld.volatile).
DLATTN_DEVICE float2 load_in_place(uint32 shared) {
  float2 v;
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared));
  return v;
}

// Stores what nobody reads soon. PTX ISA 9.7.9.12 (st), 9.7.9.1 (.cs).
DLATTN_DEVICE void store_streaming(void* global, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Four-wide reductions need sm_90.
#if __CUDA_ARCH__ >= 900
inline constexpr bool wide_reductions = true;
#else
inline constexpr bool wide_reductions = false;
#endif

// global[i * stride] += values[i]; stride is 1 where reductions are wide. PTX ISA 9.7.13.8 (red).
DLATTN_DEVICE void reduce_add_x4(float* global, int stride, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(global),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global + i * stride),
                 "f"(values[i])
                 : "memory");
  }
#endif
}

// An element that no thread of the launch writes. PTX ISA 9.7.9.9 (ld.global.nc).
DLATTN_DEVICE float load_constant(const float* global) { return __ldg(global); }
DLATTN_DEVICE bool load_constant(const bool* global) {
  return __ldg(reinterpret_cast<const unsigned char*>(global)) != 0;
}
template <class T>
DLATTN_DEVICE T load_constant(const T* global) {
  return T{__ldg(&global->bits)};
}

// The same, on its way from where it stands: else it is moved to where it is needed, and waited for.
DLATTN_DEVICE uint32 start_load(const uint32* global) {
  uint32 value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}

// The same of what a kernel before may still write: L1 keeps what it was asked for then, L2 has what is current
// (9.7.9.8, ld.relaxed).
enum class From { l1, l2 };
DLATTN_DEVICE uint32 start_load(const uint32* global, From from) {
  uint32 value;
  if (from == From::l1) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(global));
  } else {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(global));
  }
  return value;
}
DLATTN_DEVICE uint64 start_load(const uint64* global, From from) {
  uint64 value;
  if (from == From::l1) {
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(global));
  } else {
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(global));
  }
  return value;
}

// 9.7.9.16 (prefetch): into L2, which has what is current.
DLATTN_DEVICE void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// 9.7.9.8 (ld.relaxed), 9.7.13.4 (fence): what blocks of one launch tell each other.
DLATTN_DEVICE float4 load_relaxed(const float4* global) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(global)
               : "memory");
  return v;
}
// Two numbers at a time: both are there, or none is. 9.7.9.8 (ld.relaxed), 9.7.9.12 (st.relaxed).
DLATTN_DEVICE float4 load_pairs(const float4* global) {
  float4 v;
  asm volatile(
      "{\n\t.reg .b64 low, high;\n\t"
      "ld.relaxed.gpu.global.v2.b64 {low, high}, [%4];\n\t"
      "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(global)
      : "memory");
  return v;
}
DLATTN_DEVICE float2 load_pairs(const float2* global) {
  float2 v;
  asm volatile(
      "{\n\t.reg .b64 both;\n\t"
      "ld.relaxed.gpu.global.b64 both, [%2];\n\tmov.b64 {%0, %1}, both;\n\t}"
      : "=f"(v.x), "=f"(v.y)
      : "l"(global)
      : "memory");
  return v;
}
DLATTN_DEVICE void store_pairs(float4* global, float4 v) {
  asm volatile(
      "{\n\t.reg .b64 low, high;\n\t"
      "mov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
      "st.relaxed.gpu.global.v2.b64 [%0], {low, high};\n\t}" ::"l"(global),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
DLATTN_DEVICE void store_pairs(float2* global, float2 v) {
  asm volatile(
      "{\n\t.reg .b64 both;\n\tmov.b64 both, {%1, %2};\n\t"
      "st.relaxed.gpu.global.b64 [%0], both;\n\t}" ::"l"(global),
      "f"(v.x), "f"(v.y)
      : "memory");
}
DLATTN_DEVICE uint64 load_acquire(const uint64* global) {
  uint64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}
DLATTN_DEVICE void store_release(uint64* global, uint64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}
DLATTN_DEVICE int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
DLATTN_DEVICE void add_release(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
DLATTN_DEVICE void add_relaxed(int* global, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
DLATTN_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// 9.7.13.6 (atom): replaces a number in global memory if it is what is expected; returns what it was.
DLATTN_DEVICE uint64 compare_swap(uint64* address, uint64 expected, uint64 value) {
  uint64 before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return before;
}

// 9.7.13.6 (atom): adds to a number in global memory and returns what it was.
DLATTN_DEVICE int fetch_add(int* address, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

}  // namespace dlattn
