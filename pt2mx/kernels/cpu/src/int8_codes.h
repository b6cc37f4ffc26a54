// Values of x as 8-bit integer codes times one power of two per group, and the weight's table and scales, for kernels
// that multiply integers. Which kernel multiplies does not change a bit: each computes the sums of groups exactly, and
// adds them in the order of gemm_int8.h.

#pragma once

#include "decode.h"
#include "quantize_vec.h"

namespace {

constexpr i64 kStripGroups = 8;              // groups of a partial sum: a sum of partial sums is more exact
constexpr i64 kLanes = 16;                   // sums of a span of dot_int8.h
constexpr int kSpanParts = kLanes / kWidth;  // vectors of these
constexpr i64 kDotTile = 4;                  // rows of the weight that it multiplies together
constexpr i64 kMaxCode = 128;                // the largest magnitude of a code of x
constexpr int32_t kCodeMantissa = 6;         // the largest code of a group is in [2**6, 2**7]
constexpr int32_t kLargestExponent = 90;     // of a group's sum: 2**20 times that, in 2**17 groups, is finite

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

// The scale bytes whose powers of two, times any of x, are normal numbers, and whose sums are finite.
struct ScaleRange {
  int32_t least, most;

  // shift: of the weight's integers.
  ScaleRange(int32_t shift, const ExponentRange& x) {
    const int32_t unit = kBias + shift;
    least = std::max(0, unit + 1 - kBias - x.min);
    most = std::min({254, unit + kBias - kCodeMantissa - 1, unit + kLargestExponent - x.max});
  }
};

// What codes of 4 and 6 bits share: the integers of a table.
struct IntegerTable {
  int32_t shift = 0, offset = 0, most = 0;

  // True if the integers, plus `offset`, times codes of x fit 16 bits in sums of 2 * steps products.
  bool fits(int steps) const { return 2 * steps * kMaxCode * (most + offset) <= INT16_MAX; }

 protected:
  int32_t integer(float value) const { return int32_t(value * float(1 << shift)); }

  IntegerTable(const float* table, int n, bool is_signed) {
    while (shift < 8 && !std::all_of(
                            table, table + n,
                            [&](float value) {
                              return std::abs(value) * float(1 << shift) <= 127 &&
                                     value * float(1 << shift) == float(integer(value));
                            })) {
      ++shift;
    }
    if (shift == 8) return;
    most = integer(*std::max_element(table, table + n));
    if (!is_signed) offset = -integer(*std::min_element(table, table + n));
  }

  // Writes the integers of the first N values, plus `offset`.
  template <int N>
  void get_codes(const float* table, u8 (&codes)[N]) const {
    for (int i = 0; i < N; ++i) codes[i] = u8(offset + integer(table[i]));
  }
};

// ---- the weight: `decode` writes the codes of a group of kWidth rows in columns, `decode_row` the codes of one row as
// they lie, both as integers plus `offset` ----
//
//   kWideSums        vpmaddubsw: the number of steps whose sums of products fit 16 bits; 0 if not even one does
//   kEvenOdd         true if a step has every second code of eight
//   kRowVectors      the vectors that `decode_row` writes
//   shift            the integers are values times 2**shift; 8 if they are no integers

template <class Decoder>
struct IntegerColumns {
  static constexpr bool kSupported = false;
};

#if defined(__AVX2__)

// Returns the sum of signed bytes.
inline int32_t sum_of_codes(__m256i codes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
}

// Writes the integers of a group, of up to 8 bits, as bytes, and returns their sum.
inline int32_t store_codes(const Ints* v, u8* out) {
#if defined(__AVX512F__)
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(__m512i(v[1])), _mm512_cvtepi32_epi8(__m512i(v[0])));
#else
  const __m256i low = _mm256_packs_epi32(__m256i(v[0]), __m256i(v[1]));
  const __m256i high = _mm256_packs_epi32(__m256i(v[2]), __m256i(v[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
#endif
  store(out, bytes);
  return sum_of_codes(bytes);
}

#else

inline int32_t store_codes(const Ints* v, u8* out) {
  int32_t sum = 0;
  for (i64 i = 0; i < kGroup; ++i) {
    const int32_t code = v[i / kWidth][i % kWidth];
    out[i] = u8(code);
    sum += code;
  }
  return sum;
}

#endif

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
  out->power = *exponent * (1 << 23);
  out->offset = store_codes(codes, out->codes);
  return !any_bit(wrong);
}

}  // namespace
