// Scalars, intervals and compile-time arithmetic. No attention, no PTX, no standard library
// (an include of <type_traits> costs NVRTC a second).
#pragma once

#define DLATTN_DEVICE __device__ __forceinline__

namespace dlattn {

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

struct bf16 {
  uint16 bits;
};
struct half {
  uint16 bits;
};

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

template <bool condition, class A, class B>
struct Choice {
  using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
  using Type = B;
};
template <bool condition, class A, class B>
using Either = typename Choice<condition, A, B>::Type;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int power_of_two_at_least(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

DLATTN_DEVICE constexpr int least(int a, int b) { return a < b ? a : b; }
DLATTN_DEVICE constexpr int most(int a, int b) { return a > b ? a : b; }

// A value that is the same in all lanes, made known to the compiler as such: what depends on it
// alone takes uniform registers, of which there are plenty. Every lane of the warp must be there.
DLATTN_DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
// Another lane's value. Every lane of the warp must be there.
template <class T>
DLATTN_DEVICE T from_lane(T value, int lane) {
  return T(__shfl_sync(0xffffffffu, value, lane));
}
DLATTN_DEVICE int warp_index() { return uniform(threadIdx.x / 32); }

// Half-open range of positions.
struct Interval {
  int first, last;

  DLATTN_DEVICE bool empty() const { return first >= last; }
  DLATTN_DEVICE bool contains(Interval other) const {
    return first <= other.first && other.last <= last;
  }
  DLATTN_DEVICE Interval operator&(Interval other) const {
    return {most(first, other.first), least(last, other.last)};
  }
};

// The same of a struct of words.
template <class T>
  requires(__is_class(T))
DLATTN_DEVICE T uniform(const T& value) {
  struct Words {
    int of[sizeof(T) / 4];
  };
  Words words = __builtin_bit_cast(Words, value);
#pragma unroll
  for (int& word : words.of) word = uniform(word);
  return __builtin_bit_cast(T, words);
}

}  // namespace dlattn
