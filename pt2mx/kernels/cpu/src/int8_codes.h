// Values of x as 8-bit integer codes times one power of two per group, for kernels that multiply integers. Which kernel
// multiplies does not change a bit: each computes the sums of groups exactly, and adds them in the order of
// gemm_vnni.h.

#pragma once

#include "decode.h"

namespace {

constexpr i64 kStripGroups = 8;           // groups of a partial sum: a sum of partial sums is more exact
constexpr int32_t kCodeMantissa = 6;      // the largest code of a block is in [2**6, 2**7]
constexpr int32_t kLargestExponent = 90;  // of a group's sum: 2**20 times that, in 2**17 groups, is finite

// The range of the exponents of groups. A group of zeros has exponent 0.
struct ExponentRange {
  int32_t min = INT16_MAX, max = INT16_MIN;
  void add(int32_t exponent) {
    min = std::min(min, exponent);
    max = std::max(max, exponent);
  }
  void add(ExponentRange other) {
    add(other.min);
    add(other.max);
  }
};

// A group of x.
struct CodeGroup {
  u8 codes[kGroup];
  int32_t power;   // of two, as an integer to be added to the bits of a float
  int32_t offset;  // initial value of a sum: minus the sum of the codes times what is added to the weight's codes
};

// Writes a group of x as codes times 2**exponent, and the sum of the codes as `offset`. Returns false if a value has no
// code.
inline bool to_codes(const float* x, CodeGroup* out, int32_t* exponent) {
  int32_t largest = 0, any = 0, total = 0, exact = -1;
#pragma omp simd reduction(max : largest) reduction(| : any)
  for (i64 i = 0; i < kGroup; ++i) {
    const int32_t bits = int32_t(bits_of(x[i])), magnitude = bits & kMagnitude;
    any |= magnitude;
    largest = std::max(largest, magnitude - int32_t(bits < 0));  // -128 is a code, and 128 is not
  }
  *exponent = 0;
  *out = {};
  const int32_t biased = largest >> 23;
  if (biased <= kCodeMantissa) return !any;  // its power of two would be subnormal
  if (biased >= 2 * kBias) return false;     // -Inf counts as 2**127
  *exponent = biased - kBias - kCodeMantissa;
  const float factor = from_bits((biased - kCodeMantissa) << 23);
  const float inverse = from_bits((2 * kBias + kCodeMantissa - biased) << 23);
#pragma omp simd reduction(+ : total) reduction(& : exact)
  for (i64 i = 0; i < kGroup; ++i) {
    const int32_t code = int32_t(x[i] * inverse);
    exact &= -int32_t(float(code) * factor == x[i]);
    out->codes[i] = u8(code);
    total += code;
  }
  out->power = *exponent * (1 << 23);
  out->offset = total;
  return exact;
}

}  // namespace
