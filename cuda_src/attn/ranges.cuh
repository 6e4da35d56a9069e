// Interval arithmetic: what lines of a user's function may be in a block of scores, of the least and
// greatest that is read there (dlattn/problem/ranges.py says the same; dlattn/plans/score_blocks.py
// writes the lines).
//
// A range holds every value that an element can have, rounding included; it may hold more.
#pragma once

#include "attn/program.cuh"

namespace dlattn {

// Numbers from low to high, of float or int64. Where `any` is true: any number, or none.
template <class T>
struct Range {
  T low, high;
  bool any;
};

// Whether something may be true somewhere, and surely is everywhere.
struct Truth {
  bool maybe, surely;

  DLATTN_DEVICE Truth operator&(Truth other) const {
    return {maybe && other.maybe, surely && other.surely};
  }
};

namespace ranges {

using Floats = Range<float>;
using Wholes = Range<int64>;

// Whole numbers are known below this: sums of two fit 64 bits.
inline constexpr int64 most_whole = 1ll << 62;

template <class T>
DLATTN_DEVICE Range<T> range(T low, T high, bool any) {
  return {any ? T(0) : low, any ? T(0) : high, any};
}
DLATTN_DEVICE bool is_finite(float x) { return fabsf(x) < infinity(); }
DLATTN_DEVICE bool is_finite(int64) { return true; }
DLATTN_DEVICE Floats finite(float low, float high, bool any) {
  return range(low, high, any || !is_finite(low) || !is_finite(high));
}
DLATTN_DEVICE Wholes finite(int64 low, int64 high, bool any) { return range(low, high, any); }

// Numbers of a type that holds them all, or any.
template <class T>
DLATTN_DEVICE Wholes fit(Wholes x) {
  constexpr int64 least = same_type<T, int> ? -(1ll << 31) : 1 - most_whole;
  constexpr int64 most = same_type<T, int> ? (1ll << 31) - 1 : most_whole - 1;
  return range(x.low, x.high, x.any || x.low < least || x.high > most);
}

// ---- Of numbers ----

// NaN if either is.
DLATTN_DEVICE Floats between(float low, float high) {
  return range(low, high, low != low || high != high);
}
DLATTN_DEVICE Wholes between(int64 low, int64 high) { return fit<int64>({low, high, false}); }
DLATTN_DEVICE Wholes between(int low, int high) { return {low, high, false}; }
DLATTN_DEVICE Truth between(bool low, bool high) { return {high, low}; }
template <class T>
DLATTN_DEVICE auto only(T value) {
  return between(value, value);
}

// ---- Casts ----

template <class To>
struct Cast;
template <>
struct Cast<bool> {
  static DLATTN_DEVICE Truth of(Truth x) { return x; }
  template <class T>
  static DLATTN_DEVICE Truth of(Range<T> x) {
    return {x.any || x.low != 0 || x.high != 0, !x.any && (x.low > 0 || x.high < 0)};
  }
};
template <>
struct Cast<float> {
  static DLATTN_DEVICE Floats of(Truth x) { return {float(x.surely), float(x.maybe), false}; }
  static DLATTN_DEVICE Floats of(Wholes x) { return {float(x.low), float(x.high), x.any}; }
};
template <class To>
struct Cast {
  static DLATTN_DEVICE Wholes of(Truth x) { return {x.surely, x.maybe, false}; }
  static DLATTN_DEVICE Wholes of(Wholes x) { return fit<To>(x); }
  static DLATTN_DEVICE Wholes of(Floats x) {
    constexpr float most = same_type<To, int> ? 2147483648.f : 4611686018427387904.f;
    const bool any = x.any || !(fabsf(x.low) < most && fabsf(x.high) < most);
    return {any ? 0 : int64(x.low), any ? 0 : int64(x.high), any};
  }
};

// ---- Operations, by the names of dlattn.problem.POINTWISE ----

template <class T>
DLATTN_DEVICE T least_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
DLATTN_DEVICE T most_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
DLATTN_DEVICE Range<T> add(Range<T> a, Range<T> b) {
  return finite(a.low + b.low, a.high + b.high, a.any || b.any);
}
template <class T>
DLATTN_DEVICE Range<T> sub(Range<T> a, Range<T> b) {
  return finite(a.low - b.high, a.high - b.low, a.any || b.any);
}

// Products and quotients of others may be no numbers, which comparisons lose.
DLATTN_DEVICE bool are_finite(Floats a, Floats b) {
  return !a.any && !b.any && is_finite(a.low) && is_finite(a.high) && is_finite(b.low) &&
         is_finite(b.high);
}

// Exact products, too: what is added to them may be added before they are rounded.
struct Product {
  float low, high;
  DLATTN_DEVICE Product(float a, float b) {
    const float product = __fmul_rn(a, b);
    const bool exact = fmaf(a, b, -product) == 0.f;
    low = exact ? product : nextafterf(product, -infinity());
    high = exact ? product : nextafterf(product, infinity());
  }
};
DLATTN_DEVICE Floats mul(Floats a, Floats b) {
  const Product of[4] = {{a.low, b.low}, {a.low, b.high}, {a.high, b.low}, {a.high, b.high}};
  return finite(least_of(least_of(of[0].low, of[1].low), least_of(of[2].low, of[3].low)),
                most_of(most_of(of[0].high, of[1].high), most_of(of[2].high, of[3].high)),
                !are_finite(a, b));
}
DLATTN_DEVICE bool is_far(int64 a, int64 b) {
  return fabs(double(a) * double(b)) >= double(most_whole);
}
DLATTN_DEVICE Wholes mul(Wholes a, Wholes b) {
  if (a.any || b.any || is_far(a.low, b.low) || is_far(a.low, b.high) || is_far(a.high, b.low) ||
      is_far(a.high, b.high)) {
    return {0, 0, true};
  }
  const int64 of[4] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
  return {least_of(least_of(of[0], of[1]), least_of(of[2], of[3])),
          most_of(most_of(of[0], of[1]), most_of(of[2], of[3])), false};
}

DLATTN_DEVICE Floats div(Floats a, Floats b) {
  const float of[4] = {a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high};
  return finite(least_of(least_of(of[0], of[1]), least_of(of[2], of[3])),
                most_of(most_of(of[0], of[1]), most_of(of[2], of[3])),
                !are_finite(a, b) || (b.low <= 0.f && b.high >= 0.f));
}

// Of finite numbers by one positive number: a period, or what there is in one.
template <class T>
DLATTN_DEVICE Range<T> mod(Range<T> a, Range<T> b) {
  const bool any =
      a.any || b.any || b.low != b.high || !(b.low > 0) || !is_finite(a.low) || !is_finite(a.high);
  const T by = any ? T(1) : b.low;
  const T greatest = same_type<T, float> ? by : by - T(1);
  const T low = pointwise::mod(a.low, by), high = pointwise::mod(a.high, by);
  // Both ends in one period, on one side of 0.
  const bool same = a.high - a.low < by && low <= high && (a.low >= 0 || a.high <= 0);
  return finite(same         ? low
                : a.low >= 0 ? T(0)
                             : -greatest,
                same          ? high
                : a.high <= 0 ? T(0)
                              : greatest,
                any);
}

template <class T>
DLATTN_DEVICE Range<T> max(Range<T> a, Range<T> b) {
  return range(most_of(a.low, b.low), most_of(a.high, b.high), a.any || b.any);
}
template <class T>
DLATTN_DEVICE Range<T> min(Range<T> a, Range<T> b) {
  return range(least_of(a.low, b.low), least_of(a.high, b.high), a.any || b.any);
}
template <class T>
DLATTN_DEVICE Range<T> neg(Range<T> x) {
  return {-x.high, -x.low, x.any};
}
template <class T>
DLATTN_DEVICE Range<T> abs(Range<T> x) {
  const T low = x.low < 0 ? -x.low : x.low, high = x.high < 0 ? -x.high : x.high;
  return {x.low <= 0 && x.high >= 0 ? T(0) : least_of(low, high), most_of(low, high), x.any};
}
DLATTN_DEVICE Floats floor(Floats x) { return {floorf(x.low), floorf(x.high), x.any}; }
DLATTN_DEVICE Floats ceil(Floats x) { return {ceilf(x.low), ceilf(x.high), x.any}; }

template <class T>
DLATTN_DEVICE Truth cmp_lt(Range<T> a, Range<T> b) {
  const bool any = a.any || b.any;
  return {any || a.low < b.high, !any && a.high < b.low};
}
template <class T>
DLATTN_DEVICE Truth cmp_le(Range<T> a, Range<T> b) {
  const bool any = a.any || b.any;
  return {any || a.low <= b.high, !any && a.high <= b.low};
}
template <class T>
DLATTN_DEVICE Truth cmp_gt(Range<T> a, Range<T> b) {
  return cmp_lt(b, a);
}
template <class T>
DLATTN_DEVICE Truth cmp_ge(Range<T> a, Range<T> b) {
  return cmp_le(b, a);
}
template <class T>
DLATTN_DEVICE Truth cmp_eq(Range<T> a, Range<T> b) {
  const bool any = a.any || b.any, single = a.low == a.high && b.low == b.high && a.low == b.low;
  return {any || (a.low <= b.high && b.low <= a.high), !any && single};
}

DLATTN_DEVICE Truth logical_and(Truth a, Truth b) { return a & b; }
DLATTN_DEVICE Truth logical_or(Truth a, Truth b) {
  return {a.maybe || b.maybe, a.surely || b.surely};
}
DLATTN_DEVICE Truth logical_not(Truth x) { return {!x.surely, !x.maybe}; }
template <class T>
DLATTN_DEVICE Truth cmp_neq(Range<T> a, Range<T> b) {
  return logical_not(cmp_eq(a, b));
}

template <class T>
DLATTN_DEVICE Range<T> binary_select(Range<T> x, Range<T> y, Truth mask) {
  if (mask.surely) return x;
  if (!mask.maybe) return y;
  return range(least_of(x.low, y.low), most_of(x.high, y.high), x.any || y.any);
}
DLATTN_DEVICE Truth binary_select(Truth x, Truth y, Truth mask) {
  return {(mask.maybe && x.maybe) || (!mask.surely && y.maybe),
          (!mask.maybe || x.surely) && (mask.surely || y.surely)};
}

}  // namespace ranges
}  // namespace dlattn
