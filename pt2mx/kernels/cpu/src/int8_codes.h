// Values of x as 8-bit integer codes times one power of two per group, for kernels that multiply integers. Which kernel
// multiplies does not change a bit: each computes the sums of groups exactly, and adds them in the order of
// gemm_int8.h.

#pragma once

#include "decode.h"
#include "quantize_vec.h"

namespace {

constexpr i64 kStripGroups = 8;           // groups of a partial sum: a sum of partial sums is more exact
constexpr int32_t kCodeMantissa = 6;      // the largest code of a group is in [2**6, 2**7]
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

#if defined(__AVX2__)

// Returns true if any bit is 1.
inline bool any_bit(Ints v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(v), __m512i(v));
#else
  return !_mm256_testz_si256(__m256i(v), __m256i(v));
#endif
}

// Returns the sum of signed bytes.
inline int32_t sum_of_codes(__m256i codes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
}

// Returns the integers of a group, of up to 8 bits, as bytes.
inline __m256i to_bytes(const Ints* v) {
#if defined(__AVX512F__)
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(__m512i(v[1])), _mm512_cvtepi32_epi8(__m512i(v[0])));
#else
  const __m256i low = _mm256_packs_epi32(__m256i(v[0]), __m256i(v[1]));
  const __m256i high = _mm256_packs_epi32(__m256i(v[2]), __m256i(v[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
#endif
}

// Writes a group of x as codes times 2**exponent, and the sum of the codes as `offset`. The largest code is in
// [2**mantissa, 2**(mantissa + 1)); it may be -128. Returns false if a value has no code.
inline bool to_codes(const float* x, CodeGroup* out, int32_t* exponent, int32_t mantissa = kCodeMantissa) {
  const int32_t least = mantissa == kCodeMantissa ? -1 : 0;  // -128 is a code, and 128 is not
  Ints keys{}, wrong{}, any{}, codes[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const Ints bits = load<Ints>(x + v * kWidth), magnitude = bits & kMagnitude;
    any |= magnitude;
    keys = larger(keys, magnitude + (bits >> 31 & least));
  }
  *exponent = 0;
  *out = {};
  const int32_t biased = largest_lane(keys) >> 23;
  if (biased <= mantissa) return !any_bit(any);  // its power of two would be subnormal
  if (biased >= 2 * kBias) return false;         // -Inf counts as 2**127
  *exponent = biased - kBias - mantissa;
  const float factor = from_bits((biased - mantissa) << 23);
  const float inverse = from_bits((2 * kBias + mantissa - biased) << 23);
  for (int v = 0; v < kVectors; ++v) {
    const Floats values = load<Floats>(x + v * kWidth);
    codes[v] = __builtin_convertvector(values * inverse, Ints);
    wrong |= Ints(__builtin_convertvector(codes[v], Floats) * factor != values);
  }
  const __m256i bytes = to_bytes(codes);
  store(out->codes, bytes);
  out->power = *exponent * (1 << 23);
  out->offset = sum_of_codes(bytes);
  return !any_bit(wrong);
}

#endif

}  // namespace
