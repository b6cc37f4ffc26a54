// Softmax in fp32, for attention.

#pragma once

#include <cmath>

#include "values.h"

namespace {

// Returns e**x for x up to 0, within 2 units in the last place: 2**n times a polynomial of the remainder. NaN stays
// NaN. Hidden keys have scores of -Inf: no instruction computes their zeros, because one that underflows takes 100
// times as long.
inline Floats exponential(Floats x) {
  const auto is_zero = x < -104.0f;
  x = is_zero ? floats(0) : x;
  const Floats n = fused(x, floats(1.44269504f), floats(12582912.0f)) - 12582912.0f;
  const Floats r = fused(n, floats(2.12194440e-4f), fused(n, floats(-0.693359375f), x));
  Floats p = floats(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = fused(p, r, floats(c));
  }
  const Floats y = fused(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  return is_zero ? floats(0) : Floats(_mm512_scalef_ps(y, n));
#else
  const Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;
  return is_zero ? floats(0) : y * Floats((half + kBias) << 23) * Floats((whole - half + kBias) << 23);
#endif
}

inline float largest_lane(Floats v) {
  float lanes[kWidth];
  store(lanes, v);
  return *std::max_element(lanes, lanes + kWidth);
}

// Returns the largest of `n` scores, which fill whole vectors; ignores NaN.
inline float largest_score(const float* scores, i64 n) {
  Floats most = floats(-INFINITY);
  for (i64 i = 0; i < n; i += kWidth) most = larger(load<Floats>(scores + i), most);
  return largest_lane(most);
}

// Turns scores into weights e**(score - largest), and returns their sum. All weights of a fully masked row are 0.
inline float softmax(float* scores, i64 n, float largest) {
  const float shift = largest == -INFINITY ? 0.0f : largest;
  Floats sum{};
  for (i64 i = 0; i < n; i += kWidth) {
    const Floats weight = exponential(load<Floats>(scores + i) - shift);
    store(scores + i, weight);
    sum += weight;
  }
  return sum_of_lanes(sum);
}

}  // namespace
