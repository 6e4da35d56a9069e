// A value whose history the compiler does not see.
#pragma once

#include "base/types.cuh"

namespace dlattn {

// The same value. What is computed from it stays in the loop or branch where it stands, instead of
// being hoisted out and holding registers (or spilling) across everything between.
DLATTN_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
// An address: what is near it is loaded from constant distances.
template <class T>
DLATTN_DEVICE T* opaque(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

}  // namespace dlattn
