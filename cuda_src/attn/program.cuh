// What the edit that a user's function of scores becomes is made of (dlattn/plans/score_source.py
// writes it: value(score, at, values), and in a backward derivative(score, at, values)).
#pragma once

#include "attn/params.cuh"
#include "attn/position.cuh"
#include "attn/softcap.cuh"
#include "base/math.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace dlattn {

// An edit of such a function. Where an element does not exist, there may be no tensors to read, and a
// backward multiplies by 0 what is made of raw products of zeros: where `guarded`, that is no number
// which 0 times something else is not 0.
template <class Function, bool guarded>
struct Programmed {
  // Steps of a backward that have rows which do not exist are masked, as with a bias.
  static constexpr bool reads_memory = true, stages_bias = false, is_quick = false;

  template <class At>
  static DLATTN_DEVICE float apply(float score, const At& at, const ScoreValues& values) {
    // A branch, as of a bias: ptxas would have more elements on their way than there are registers.
    if (guarded && !at.exists()) return 0.f;
    return Function::value(score, at, values);
  }
  // What is masked has no part in any gradient, whatever the derivative.
  template <class At>
  static DLATTN_DEVICE float backward(float grad, float score, const At& at,
                                      const ScoreValues& values) {
    if constexpr (Function::constant_derivative) {
      return grad;
    } else {
      if ((grad == 0.f) | (guarded & !at.exists())) return 0.f;
      return grad * Function::derivative(score, at, values);
    }
  }
};

// What lines of such a function are, by the names of dlattn.problem.POINTWISE.
namespace pointwise {

// Where the element is. As floats: each thread converts one number for all its elements.
DLATTN_DEVICE int query(const Position& at) { return at.query + at.down; }
DLATTN_DEVICE int key(const Position& at) { return at.key + at.right; }
DLATTN_DEVICE float query_as_float(const Position& at) { return float(at.query) + float(at.down); }
DLATTN_DEVICE float key_as_float(const Position& at) { return float(at.key) + float(at.right); }

template <class T>
DLATTN_DEVICE auto load(const T* global) {
  if constexpr (same_type<T, bool>) {
    return load_constant(global);
  } else if constexpr (same_type<T, bf16> || same_type<T, half>) {
    return to_float(load_constant(global));
  } else {
    return __ldg(global);
  }
}

// An element of a tensor that broadcasts. Keys are contiguous, or have any stride.
template <class T, bool by_query, bool by_key, bool contiguous>
DLATTN_DEVICE auto read(const BiasRef& tensor, const Position& at) {
  const T* g_element =
      static_cast<const T*>(tensor.data) + at.batch * tensor.batch + at.head * tensor.head;
  if constexpr (by_query) g_element += query(at) * tensor.row;
  if constexpr (by_key) g_element += contiguous ? key(at) : key(at) * tensor.column;
  return load(g_element);
}

// A number that is passed by value, in the place of the address.
template <class T>
DLATTN_DEVICE T number(const BiasRef& in_place) {
  if constexpr (same_type<T, float>) {
    return __uint_as_float(uint32(reinterpret_cast<uint64>(in_place.data)));
  } else {
    return T(reinterpret_cast<uint64>(in_place.data));
  }
}

template <class T>
DLATTN_DEVICE T add(T a, T b) {
  return a + b;
}
template <class T>
DLATTN_DEVICE T sub(T a, T b) {
  return a - b;
}
template <class T>
DLATTN_DEVICE T mul(T a, T b) {
  return a * b;
}
DLATTN_DEVICE float div(float a, float b) { return a / b; }
DLATTN_DEVICE float reciprocal(float x) { return 1.f / x; }
// NaN if either is, as in NumPy.
template <class T>
DLATTN_DEVICE T max(T a, T b) {
  return a >= b || a != a ? a : b;
}
template <class T>
DLATTN_DEVICE T min(T a, T b) {
  return a <= b || a != a ? a : b;
}
DLATTN_DEVICE float mod(float a, float b) { return fmodf(a, b); }
template <class T>
DLATTN_DEVICE T mod(T a, T b) {
  return b == 0 ? 0 : a % b;
}
DLATTN_DEVICE float pow(float a, float b) { return powf(a, b); }
template <class T>
DLATTN_DEVICE T neg(T x) {
  return -x;
}
template <class T>
DLATTN_DEVICE T abs(T x) {
  return x < 0 ? -x : x;
}
DLATTN_DEVICE float abs(float x) { return fabsf(x); }

DLATTN_DEVICE float exp(float x) { return expf(x); }
DLATTN_DEVICE float log(float x) { return logf(x); }
DLATTN_DEVICE float sqrt(float x) { return sqrtf(x); }
DLATTN_DEVICE float rsqrt(float x) { return rsqrtf(x); }
DLATTN_DEVICE float ceil(float x) { return ceilf(x); }
DLATTN_DEVICE float floor(float x) { return floorf(x); }
DLATTN_DEVICE float sin(float x) { return sinf(x); }
DLATTN_DEVICE float cos(float x) { return cosf(x); }
DLATTN_DEVICE float tan(float x) { return tanf(x); }
DLATTN_DEVICE float erf(float x) { return erff(x); }
DLATTN_DEVICE float tanh(float x) { return any_tanh(x); }
DLATTN_DEVICE float sigmoid(float x) { return reciprocal_approx(1.f + exp2_approx(-log2_e * x)); }
DLATTN_DEVICE float elu(float x) { return x > 0.f ? x : expm1f(x); }
DLATTN_DEVICE float softplus(float x) { return max(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <class T>
DLATTN_DEVICE bool cmp_eq(T a, T b) {
  return a == b;
}
template <class T>
DLATTN_DEVICE bool cmp_neq(T a, T b) {
  return a != b;
}
template <class T>
DLATTN_DEVICE bool cmp_gt(T a, T b) {
  return a > b;
}
template <class T>
DLATTN_DEVICE bool cmp_ge(T a, T b) {
  return a >= b;
}
template <class T>
DLATTN_DEVICE bool cmp_lt(T a, T b) {
  return a < b;
}
template <class T>
DLATTN_DEVICE bool cmp_le(T a, T b) {
  return a <= b;
}

// Not && and ||: a branch costs more than what it saves.
DLATTN_DEVICE bool logical_and(bool a, bool b) { return a & b; }
DLATTN_DEVICE bool logical_or(bool a, bool b) { return a | b; }
DLATTN_DEVICE bool logical_not(bool x) { return !x; }

template <class T>
DLATTN_DEVICE T binary_select(T x, T y, bool mask) {
  return mask ? x : y;
}

}  // namespace pointwise
}  // namespace dlattn
